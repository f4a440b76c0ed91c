"""Files are written whole or not at all; what is replaced is kept; templates and names."""

import json
import multiprocessing
import os
import stat
import time

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
    for bad in ("{", "{0}", "{a.b}", "}"):
        with pytest.raises(UserError, match="is not a template"):
            files.format_template(bad, "--output", a="x")


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


def test_whether_a_file_can_be_written_is_known_before(tmp_path):
    files.check_writable(tmp_path / "a" / "b.json")
    assert os.listdir(tmp_path) == []
    with pytest.raises(UserError, match=r"it is a folder. Give a file name in --output\."):
        files.check_writable(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        files.check_writable(tmp_path / "file" / "x.json")


def test_a_folder_is_locked_by_one_process_and_free_when_it_dies(tmp_path):
    fork = multiprocessing.get_context("fork")
    held = fork.Event()

    def hold():
        files.FolderLock(tmp_path / "run", "a training").acquire()
        held.set()
        time.sleep(600)

    child = fork.Process(target=hold)
    child.start()
    try:
        assert held.wait(60)
        with pytest.raises(UserError, match=rf"a training already runs in {tmp_path}/run \(process {child.pid} on "):
            files.FolderLock(tmp_path / "run", "a training").acquire()
    finally:
        child.kill()
        child.join()
    lock = files.FolderLock(tmp_path / "run", "a training")
    lock.acquire()  # the lock of a dead process
    lock.release()
