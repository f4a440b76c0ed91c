"""Reading small files safely. Writing files: names from templates, whole or not at all, backups of what is replaced."""

from __future__ import annotations

import errno
import filecmp
import hashlib
import json
import os
import re
import socket
import stat
import string
import sys
import tempfile
import threading
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NoReturn

from tokensieve.errors import UserError, WriteError, did_you_mean, one_line, short
from tokensieve.provenance import to_json_value

MAX_TEXT = 1 << 26  # bytes of a text file that is read whole
MAX_NAME = 240  # bytes of a file name from a template; most file systems allow 255, and the key of a run may follow
MAX_SUFFIX = 20  # bytes of the end of a file name that are kept if it is cut
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # how a cell begins that spreadsheets run
DESCRIPTOR = re.compile(r"/dev/(stdout|stderr)|/(?:dev|proc/self)/fd/([0-9]{1,9})")


class UnreadableFile(UserError):
    """A file that cannot be read, and why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"cannot read {name}: {reason}")
        self.name, self.reason = name, reason

    def __reduce__(self) -> tuple[type[UnreadableFile], tuple[str, str]]:
        return UnreadableFile, (self.name, self.reason)


@contextmanager
def open_regular(path: str | Path, max_bytes: int | None = None) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file for reading, and its size; UnreadableFile if it is none, or is larger. Never waits for a pipe."""
    name = short(path, 200)
    with ExitStack() as stack:
        try:
            no_wait = getattr(os, "O_NONBLOCK", 0)
            file = stack.enter_context(open(path, "rb", opener=lambda file, flags: os.open(file, flags | no_wait)))
            about = os.fstat(file.fileno())
        except ValueError as error:  # NUL in the name
            raise UnreadableFile(name, str(error)) from error
        except OSError as error:
            raise UnreadableFile(name, str(error.strerror)) from error
        if not stat.S_ISREG(about.st_mode):
            raise UnreadableFile(name, "it is not a regular file")
        if max_bytes is not None and about.st_size > max_bytes:
            raise UnreadableFile(name, f"it has {about.st_size:,} bytes, more than {max_bytes:,}")
        try:
            yield file, about.st_size
        except OSError as error:
            raise UnreadableFile(name, str(error.strerror)) from error


def read_bytes(path: str | Path, max_bytes: int = MAX_TEXT) -> bytes:
    """The content of a regular file; a UserError if it cannot be read, or is larger."""
    with open_regular(path, max_bytes) as (file, size):
        return file.read(size)


def read_text(path: str | Path, max_bytes: int = MAX_TEXT) -> str:
    """`read_bytes` as text in UTF-8, with or without a byte order mark."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{short(path, 200)} is not text in UTF-8 ({one_line(error, 100)})") from None


def read_json(path: str | Path, max_bytes: int = MAX_TEXT) -> Any:
    """The JSON value in a file; a UserError if there is none."""
    return parse_json(read_text(path, max_bytes), short(path, 200))


def parse_json(text: str, source: str) -> Any:
    """The JSON value of a text; a UserError if it is none. source: where it comes from, for messages."""
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError(f"{source} is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{source} is not JSON: {one_line(error, 100)}") from None


def slug(plan: str) -> str:
    """The text of a plan as part of a file name: readable, and different for different plans.

    >>> slug("anchor@6(k=10,m=50,alpha=0.5)"), slug("tome@*:-8")
    ('anchor@6_k10_m50_alpha0.5', 'tome@all--8')
    """
    words = {"(": "_", ")": "", "=": "", ",": "_", ":": "-", "*": "all", "%": "pct", " ": "", "/": "_", "\\": "_"}
    return "".join(words.get(letter, letter) for letter in plan)


def format_template(template: str, flag: str, **names: str) -> str:
    """Fills in a template. Only `{name}` with one of these names is allowed, without a format; `{{` and `}}` are braces."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        said = f"{flag} {short(template, 100)!r} is not a template: {error}. Write {{{{ and }}}} for braces."
        raise UserError(said) from error
    filled = ""
    for text, name, form, conversion in parts:
        filled += text
        if name in names and not form and not conversion:
            filled += names[name]
        elif name is not None:
            allowed = " ".join("{" + known + "}" for known in names)
            if name.isidentifier() and not form and not conversion:
                raise UserError(f"{flag} has {{{short(name)}}}; allowed are {allowed}.{did_you_mean(name, names)}")
            raise UserError(f"{flag} {short(template, 100)!r} is not a template: allowed are {allowed}, as they stand here.")
    return filled


def output_path(template: str, flag: str, **names: str) -> Path:
    """The file that a template names. A part that is longer than file systems allow is cut, and ends in a hash of all of it."""
    filled = format_template(template, flag, **names)
    check_name(filled, flag)
    return Path(*map(_fit_name, Path(filled).parts))


def check_name(path: str | Path, flag: str = "--output") -> None:
    """Raises a UserError if a file name has control characters, line ends, or characters that cannot be written."""
    bad = next((letter for letter in str(path) if unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")), None)
    if bad is not None:
        raise UserError(f"cannot write {short(path, 200)!r}: its name has the character {bad!a}. Give another {flag}.")


def _fit_name(name: str) -> str:
    if len(name.encode()) <= MAX_NAME:
        return name
    stem, suffix = os.path.splitext(name)
    if len(suffix.encode()) > MAX_SUFFIX:
        stem, suffix = name, ""
    end = f"-{hashlib.sha256(name.encode()).hexdigest()[:12]}{suffix}"
    return stem.encode()[: MAX_NAME - len(end.encode())].decode(errors="ignore") + end


def read_lines(path: str, flag: str, what: str = "name") -> list[str]:
    """The lines of a text file that a flag names."""
    try:
        return read_text(Path(path).expanduser()).splitlines()
    except UserError as error:
        raise UserError(f"{flag} is a text file with one {what} a line: {error}.") from error


def is_stream(path: Path) -> bool:
    """Whether it is a device, a pipe or a descriptor of this process: written to as it is, never moved or replaced."""
    if DESCRIPTOR.fullmatch(str(path)):
        return True
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def check_writable(path: Path, flag: str = "--output") -> None:
    """Raises a UserError if a file cannot be written there. Creates nothing."""
    check_name(path, flag)
    name = short(path, 200)
    try:
        if path.is_dir():
            raise UserError(f"cannot write {name}: it is a folder. Give a file name in {flag}.")
        if is_stream(path):
            _check_stream(path)
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        _follow(path)
        nearest = next(folder for folder in Path(os.path.realpath(path)).parents if folder.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise UserError(f"cannot write {name}: {error.strerror}. Give another {flag}.") from error


def write_text(path: Path, text: str) -> None:
    """`write_bytes` for a text."""
    with _named_errors(path):
        content = text.encode()
    write_bytes(path, content)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all: to a temporary file beside it, which then takes its place.

    A link stays and its target is written. A device or a pipe is written to as it is.
    """
    with _named_errors(path):
        if is_stream(path):
            _write_stream(path, content)
            return
        target = _follow(path)
        with _temporary_file(target, content) as temporary:
            os.replace(temporary, target)


def write_json(path: Path, value: Any) -> None:
    """`write_bytes` for a JSON value."""
    write_bytes(path, json_bytes(value))


def json_bytes(value: Any) -> bytes:
    """The value as a JSON file: numbers that are not finite become null, halves of letters a question mark."""
    text = json.dumps(to_json_value(value), indent=1, allow_nan=False, ensure_ascii=False)
    return f"{text}\n".encode(errors="replace")


def json_lines(values: Iterable[Any]) -> bytes:
    """The values as a file of JSON lines, with numbers and letters as in `json_bytes`."""
    lines = (json.dumps(to_json_value(value), allow_nan=False, ensure_ascii=False) for value in values)
    return "".join(f"{line}\n" for line in lines).encode(errors="replace")


def csv_cell(value: Any) -> Any:
    """A value for a CSV file. A text that a spreadsheet would run as a formula gets an apostrophe; numbers stay as they are."""
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def create_file(path: Path, content: bytes) -> bool:
    """Writes a file whole, if there is none of that name; whether there was none. Of several writers at once, one succeeds."""
    with _named_errors(path):
        target = _follow(path)
        with _temporary_file(target, content) as temporary:
            return _place(temporary, target)


def replace_file(path: Path, content: bytes) -> None:
    """`write_bytes`, but a file with other content is kept as NAME.1, NAME.2, ..., and its new name is printed."""
    with _named_errors(path):
        if is_stream(path):
            _write_stream(path, content)
            return
        target = _follow(path)
        with _temporary_file(target, content) as temporary:
            while not _place(temporary, target):
                if _is_same(temporary, target):
                    return
                aside = _move_aside(target)
                if aside is not None:
                    print(f"tokensieve: {short(path, 200)} had other content; kept as {short(aside, 200)}", file=sys.stderr)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Errors of the system as errors that name the file."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise WriteError(f"cannot write {short(path, 200)}: {error.strerror}.") from error
    except ValueError as error:  # NUL in the name, or halves of letters
        raise UserError(f"cannot write {short(path, 200)}: {one_line(error, 100)}.") from error


@contextmanager
def _temporary_file(path: Path, content: bytes) -> Iterator[Path]:
    """A new file beside `path` with this content, for taking its place; it is removed if it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.urandom(8).hex()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _follow(path: Path) -> Path:
    """Where a link leads, there or not; the path itself if it is none."""
    if path.is_symlink():
        with suppress(FileNotFoundError):
            os.stat(path)  # links in a circle are an error
        return Path(os.path.realpath(path))
    return path


def _place(temporary: Path, path: Path) -> bool:
    """Gives a file its name, if there is none of that name; whether there was none."""
    try:
        os.link(temporary, path)
        return True
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        return _rename(temporary, path)


def _rename(old: Path, new: Path) -> bool:
    """Renames a file, if there is none of the new name; whether there was none."""
    try:
        new.open("xb").close()
    except FileExistsError:
        return False
    try:
        os.replace(old, new)
    except OSError:
        new.unlink()
        raise
    return True


def _is_same(one: Path, other: Path) -> bool:
    try:
        return filecmp.cmp(one, other, shallow=False)
    except OSError:  # it is gone, or cannot be read
        return False


def _move_aside(path: Path) -> Path | None:
    """Renames a file to the first free one of NAME.1, NAME.2, ...; None if another process has moved it."""
    number = 1
    try:
        while not _rename(path, aside := path.with_name(f"{path.name}.{number}")):
            number += 1
    except FileNotFoundError:
        return None
    return aside


def _write_stream(path: Path, content: bytes) -> None:
    """Writes to a device, a pipe or a descriptor. A pipe without a reader is an error."""
    _check_stream(path)
    if found := DESCRIPTOR.fullmatch(str(path)):
        sys.stdout.flush()  # what was printed comes first
        descriptor = os.dup({"stdout": 1, "stderr": 2}.get(found[1]) or int(found[2]))
    else:
        try:
            descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            raise UserError(f"cannot write {short(path, 200)}: no process reads this pipe.") from None
        if hasattr(os, "O_NONBLOCK"):
            os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def _check_stream(path: Path) -> None:
    mode = os.stat(path).st_mode
    if not (DESCRIPTOR.fullmatch(str(path)) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        raise UserError(f"cannot write {short(path, 200)}: it is neither a file, a pipe nor a character device.")


class FolderLock:
    """One process at a time, and one thread of it, works in a folder. The lock of a process that died is free.

    (A record lock, not flock: processes that are forked while it is held do not hold it. Record locks do not keep the threads
    of a process apart, and closing any descriptor of the file gives them up, so those that this process holds are listed.)
    """

    _held: ClassVar[dict[tuple[int, int], tuple[int, str]]] = {}  # device and inode of the file: process, and what runs there
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, folder: Path, what: str) -> None:
        self.path, self.what = folder / ".lock", what
        self.descriptor: int | None = None
        self._file = (0, 0)

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """A UserError that names the process which holds it."""
        try:
            import fcntl
        except ImportError:  # Windows has no such locks
            return
        with self._guard:
            self._check_threads()
            descriptor = self._open()
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                told = os.read(descriptor, 200).decode(errors="replace")
                os.close(descriptor)
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    print(f"tokensieve: {self.path.parent} cannot be locked: let nothing else run in it", file=sys.stderr)
                    return
                what, _, holder = told.partition("\n")
                self._refuse(*((what, holder) if holder else (self.what, "another process")))
            me = f"process {os.getpid()} on {socket.gethostname()}"
            with suppress(OSError):  # a full disk: the lock is held, without a name
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{self.what}\n{me}".encode(), 0)
            self.descriptor = descriptor
            about = os.fstat(descriptor)
            self._file = about.st_dev, about.st_ino
            self._held[self._file] = os.getpid(), self.what

    def release(self) -> None:
        with self._guard:
            if self.descriptor is not None:
                self._held.pop(self._file, None)
                os.close(self.descriptor)
                self.descriptor = None

    def _check_threads(self) -> None:
        """A UserError if this process holds the lock."""
        try:
            about = os.lstat(self.path)
        except (OSError, ValueError):  # there is none, or there cannot be one
            return
        process, what = self._held.get((about.st_dev, about.st_ino), (0, ""))
        if process == os.getpid():
            self._refuse(what, f"this process, {process}")

    def _open(self) -> int:
        """The lock file, which is nothing else than that: a link would have what it points to overwritten."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except (OSError, ValueError) as error:
            if os.path.islink(self.path) or os.path.isdir(self.path):
                raise UserError(f"{self.path} is not a file; remove it, or give another folder with --output") from None
            reason = error.strerror if isinstance(error, OSError) else error
            folder = short(self.path.parent, 200)
            raise UserError(f"cannot write {folder}: {reason}. Give another folder with --output.") from None
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
            os.close(descriptor)
            raise UserError(f"{self.path} is not a file of its own; remove it, or give another folder with --output")
        return descriptor

    def _refuse(self, what: str, holder: str) -> NoReturn:
        raise UserError(
            f"{short(what)} already runs in {short(self.path.parent, 200)} ({short(holder, 120)}); wait for it, or give "
            "another folder with --output"
        ) from None
