"""Files are written whole or not at all; what is replaced is kept; templates and names."""

import errno
import json
import multiprocessing
import os
import resource
import socket
import stat
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tokensieve import files
from tokensieve.errors import UserError


def test_slugs_are_readable_and_different():
    plans = ["anchor@6(k=10,m=50,alpha=0.5)", "pool@*:-8", "pool@*:8", "anchor@6:60 + pool@9:16", "random@6:50%"]
    assert files.slug(plans[0]) == "anchor@6_k10_m50_alpha0.5" and files.slug(plans[1]) == "pool@all--8"
    assert len(set(map(files.slug, plans))) == len(plans)
    assert not any(set(files.slug(plan)) & set(" /\\:*()") for plan in plans)


def test_templates():
    assert files.format_template("{a}_{b}.json", "--output", a="x", b="y") == "x_y.json"
    with pytest.raises(UserError, match=r"--output has \{dataste\}; allowed are \{dataset\}. Did you mean 'dataset'"):
        files.format_template("{dataste}", "--output", dataset="x")
    assert files.format_template("{{a}}{a}", "--output", a="{b}") == "{a}{b}"
    for bad in ("{", "{0}", "{a.b}", "}", "{}", "{a!r}", "{a:>99999999999}", "{a:{a}}", "{a.__class__}", "{a[0]}", "{\x1b}"):
        with pytest.raises(UserError, match="is not a template") as raised:
            files.format_template(bad, "--output", a="x")
        assert str(raised.value).isprintable()


def test_long_names_are_cut_and_stay_different():
    def name(plan: str, template: str = "{plan}.json") -> str:
        return str(files.output_path(template, "--output", plan=plan))

    assert name("x" * 235) == "x" * 235 + ".json"
    long = [name("x" * 235 + end) for end in ("x", "y", "é" * 300)]
    assert len(set(long)) == 3 and all(one.startswith("x" * 200) and one.endswith(".json") for one in long)
    assert all(len(one.encode()) <= files.MAX_NAME for one in (*long, name("é" * 300), name("x." + "y" * 300)))
    assert name("x" * 300, "a/{plan}/b.json") == f"a/{name('x' * 300, '{plan}')}/b.json"
    for wrong in ("a\nb", "a\0b", "\x1b[2J", "\x7f", "\u2028", "\ud800"):
        with pytest.raises(UserError, match="its name has the character") as raised:
            name(wrong)
        assert str(raised.value).isprintable()
    assert name("名 \"'é👩\u200d🔬") == "名 \"'é👩\u200d🔬.json"


def test_writing_makes_folders_and_an_ordinary_file(tmp_path):
    path = tmp_path / "new" / "folder" / "x.json"
    files.write_json(path, {"a": (1, float("nan")), "b": "ü"})
    assert json.loads(path.read_text()) == {"a": [1, None], "b": "ü"} and os.listdir(path.parent) == ["x.json"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x.txt"
    files.write_text(path, "old")

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match=r"cannot write .*x\.txt: No space left on device"):
        files.write_text(path, "new")
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["x.txt"]


def test_another_content_is_kept_under_a_number(tmp_path, capsys):
    path = tmp_path / "x.txt"
    for content in (b"one", b"one", b"two", b"three"):
        files.replace_file(path, content)
    assert [p.read_text() for p in (path, tmp_path / "x.txt.1", tmp_path / "x.txt.2")] == ["three", "one", "two"]
    assert capsys.readouterr().err.count("had other content; kept as") == 2


def test_cells_of_a_table_are_not_run():
    for text in ("=1", "+1+1", "-1+1", "@x", "\t=1", "\r=1", "\n=1", "＝1"):
        assert files.csv_cell(text) == f"'{text}"
    for value in (-0.5, None, 3, "-0.5", "+1e-3", "x", "", "a=b", "none"):
        assert files.csv_cell(value) == value


# ------------------------------------------------------------------------------------------------------ nothing is lost


WRITERS = (files.write_bytes, files.replace_file, files.create_file)


@pytest.mark.parametrize("has_links", [True, False])
def test_a_new_file_never_replaces_another(tmp_path, monkeypatch, has_links):
    if not has_links:
        monkeypatch.setattr(os, "link", fail_with(errno.EPERM))
    path = tmp_path / "new" / "x"
    assert files.create_file(path, b"one") and not files.create_file(path, b"two")
    assert path.read_bytes() == b"one" and os.listdir(path.parent) == ["x"]
    files.replace_file(path, b"three")
    assert (path.parent / "x.1").read_bytes() == b"one" and path.read_bytes() == b"three"


def fail_with(number: int):
    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_file_that_cannot_be_moved_aside_stays(tmp_path, monkeypatch):
    (tmp_path / "x").write_text("old")
    monkeypatch.setattr(os, "replace", fail_with(errno.EACCES))
    with pytest.raises(UserError, match=r"cannot write .*x: Permission denied"):
        files.replace_file(tmp_path / "x", b"new")
    assert os.listdir(tmp_path) == ["x"] and (tmp_path / "x").read_text() == "old"


@pytest.mark.parametrize("write", WRITERS)
def test_on_a_full_disk_the_old_file_stays_and_nothing_else_is_left(tmp_path, write):
    old = tmp_path / "old"
    old.write_text("old")
    path = tmp_path / "new" if write is files.create_file else old
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        with pytest.raises(UserError, match=f"cannot write {path}: File too large"):
            write(path, b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert os.listdir(tmp_path) == ["old"] and old.read_text() == "old"


def test_text_that_cannot_be_encoded(tmp_path):
    with pytest.raises(UserError, match="cannot write"):
        files.write_text(tmp_path / "x", "\ud800")
    files.write_json(tmp_path / "y", {"path": "caf\udce9"})  # a name that is not in UTF-8 is no reason to lose a result
    assert json.loads((tmp_path / "y").read_text()) == {"path": "caf?"} and os.listdir(tmp_path) == ["y"]


def test_a_name_that_no_system_allows(tmp_path):
    for name in ("a\0b", "\ud800", "x" * 300):
        for write in WRITERS:
            with pytest.raises(UserError, match="cannot write") as raised:
                write(tmp_path / name, b"")
            assert str(raised.value).isprintable()


# ------------------------------------------------------------------------------------------- devices, pipes and links


@pytest.fixture
def devices_stay(monkeypatch):
    """Nothing in /dev is renamed, replaced or removed, whatever the code under test does."""

    def guard(stock):
        def guarded(*paths, **options):
            assert not any(os.path.realpath(path).startswith("/dev/") for path in paths)
            return stock(*paths, **options)

        return guarded

    for name in ("replace", "rename", "link", "unlink", "remove"):
        monkeypatch.setattr(os, name, guard(getattr(os, name)))


@pytest.mark.parametrize("write", WRITERS[:2])
def test_devices_are_written_to_and_stay(tmp_path, devices_stay, write):
    for device in ("null", "full"):
        (tmp_path / device).symlink_to(f"/dev/{device}")
    for path in (Path("/dev/null"), tmp_path / "null"):
        files.check_writable(path)
        write(path, b"x")
    for path in (Path("/dev/full"), tmp_path / "full"):
        files.check_writable(path)
        with pytest.raises(UserError, match=f"cannot write {path}: No space left on device"):
            write(path, b"x")
    assert Path("/dev/null").is_char_device() and Path("/dev/full").is_char_device()
    assert sorted(os.listdir(tmp_path)) == ["full", "null"] and (tmp_path / "null").is_symlink()


@pytest.mark.parametrize("write", WRITERS[:2])
def test_a_pipe_is_written_to_if_somebody_reads_it(tmp_path, write):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    files.check_writable(path)
    with pytest.raises(UserError, match="pipe: no process reads this pipe"):
        write(path, b"x")
    content = b"x" * 200_000  # more than a pipe holds
    read = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    while True:
        try:
            write(path, content)
            break
        except UserError:  # the reader is not there yet
            time.sleep(0.01)
    reader.join()
    assert read == [content] and os.listdir(tmp_path) == ["pipe"] and path.is_fifo()


def test_descriptors_of_the_process(tmp_path, capfd):
    print("first")
    files.write_text(Path("/dev/stdout"), "second\n")
    files.replace_file(Path("/dev/stderr"), b"third\n")
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("first\nsecond\n", "third\n")
    with open(tmp_path / "x", "wb") as file:
        file.write(b"first ")
        file.flush()
        files.write_text(Path(f"/dev/fd/{file.fileno()}"), "second ")  # goes on where the file is
        files.write_text(Path(f"/proc/self/fd/{file.fileno()}"), "third")
    assert (tmp_path / "x").read_text() == "first second third" and os.listdir(tmp_path) == ["x"]
    for check in (files.check_writable, lambda path: files.write_bytes(path, b"")):
        with pytest.raises(UserError, match="cannot write /dev/fd/987654"):
            check(Path("/dev/fd/987654"))


def test_sockets_and_circles_are_refused(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for check in (files.check_writable, lambda path: files.write_bytes(path, b"")):
            with pytest.raises(UserError, match="it is neither a file, a pipe nor a character device"):
                check(tmp_path / "socket")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for check in (files.check_writable, *(lambda path, write=write: write(path, b"") for write in WRITERS)):
        with pytest.raises(UserError, match=r"cannot write .*/a: Too many levels of symbolic links"):
            check(tmp_path / "a")


def test_a_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "folder").mkdir()
    link, target = tmp_path / "link", tmp_path / "folder" / "target"
    link.symlink_to("folder/target")
    files.check_writable(link)
    assert files.create_file(link, b"one") and not files.create_file(link, b"two")
    files.write_bytes(link, b"three")
    files.replace_file(link, b"four")
    assert link.is_symlink() and target.read_bytes() == b"four" and (tmp_path / "folder" / "target.1").read_bytes() == b"three"
    assert sorted(os.listdir(tmp_path)) == ["folder", "link"]


def test_whether_a_file_can_be_written_is_known_before(tmp_path):
    files.check_writable(tmp_path / "a" / "b.json")
    assert os.listdir(tmp_path) == []
    with pytest.raises(UserError, match=r"it is a folder. Give a file name in --output\."):
        files.check_writable(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        files.check_writable(tmp_path / "file" / "x.json")


@contextmanager
def held_by_another(folder, what):
    """Another process holds the lock of a folder; its id."""
    fork = multiprocessing.get_context("fork")
    held = fork.Event()

    def hold():
        files.FolderLock(folder, what).acquire()
        held.set()
        time.sleep(600)

    child = fork.Process(target=hold)
    child.start()
    try:
        assert held.wait(60)
        yield child.pid
    finally:
        child.kill()
        child.join()


def is_locked_for_others(folder):
    fork = multiprocessing.get_context("fork")

    def try_it():
        try:
            files.FolderLock(folder, "a training").acquire()
        except UserError:
            os._exit(7)
        os._exit(0)

    child = fork.Process(target=try_it)
    child.start()
    child.join(60)
    return child.exitcode == 7


def test_a_folder_is_locked_by_one_process_and_free_when_it_dies(tmp_path):
    with held_by_another(tmp_path / "run", "a search") as process, pytest.raises(UserError) as caught:
        files.FolderLock(tmp_path / "run", "a training").acquire()
    assert f"a search already runs in {tmp_path}/run (process {process} on " in str(caught.value)
    with files.FolderLock(tmp_path / "run", "a training"):  # the lock of a dead process
        assert is_locked_for_others(tmp_path / "run")
    assert not is_locked_for_others(tmp_path / "run")


def test_a_lock_keeps_threads_of_one_process_apart(tmp_path):
    with files.FolderLock(tmp_path, "a training"):
        (tmp_path / "link").symlink_to(tmp_path)
        for same in (tmp_path, tmp_path / "link"):
            with pytest.raises(UserError, match=rf"a training already runs in .* \(this process, {os.getpid()}\)"):
                files.FolderLock(same, "a search").acquire()
        assert is_locked_for_others(tmp_path)  # closing a second descriptor would have released it
    with files.FolderLock(tmp_path, "a search"):
        pass


def test_a_lock_file_is_nothing_else(tmp_path):
    """A link would have what it points to overwritten."""
    mine = tmp_path / "mine.txt"
    mine.write_text("my own words")
    for name, make in {
        "link": lambda lock: lock.symlink_to(mine),
        "dangling": lambda lock: lock.symlink_to(tmp_path / "new.txt"),
        "hard": lambda lock: os.link(mine, lock),
        "folder": lambda lock: lock.mkdir(),
        "pipe": os.mkfifo,
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        make(folder / ".lock")
        with pytest.raises(UserError, match=r"\.lock is not a file.*; remove it, or give another folder with --output"):
            files.FolderLock(folder, "a training").acquire()
    assert mine.read_text() == "my own words" and not (tmp_path / "new.txt").exists()


def test_a_lock_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside", tmp_path / ("x" * 300), tmp_path / "a\0b"):
        with pytest.raises(UserError, match=r"cannot write .*Give another folder with --output"):
            files.FolderLock(folder, "a training").acquire()

    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files.os, "open", denied)
    with pytest.raises(UserError, match="Permission denied"):
        files.FolderLock(tmp_path, "a training").acquire()


def test_strange_words_in_a_lock_file_are_not_printed(tmp_path):
    with held_by_another(tmp_path, "a training"):
        (tmp_path / ".lock").write_bytes(b"\x1b[31m" + b"x" * 500 + b"\n\xff\x07")
        with pytest.raises(UserError) as caught:
            files.FolderLock(tmp_path, "a training").acquire()
    assert str(caught.value).isprintable()
