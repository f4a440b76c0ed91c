"""Reading small files safely. Writing files: names from templates, whole or not at all, backups of what is replaced."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

from tokensieve.errors import UserError, did_you_mean, one_line, short
from tokensieve.provenance import to_json_value

MAX_TEXT = 1 << 26  # bytes of a text file that is read whole


def read_bytes(path: str | Path, max_bytes: int = MAX_TEXT) -> bytes:
    """The content of a regular file; a UserError if it cannot be read, or is larger. Never waits for a pipe or a device."""
    name = short(path, 200)
    try:
        with open(path, "rb", opener=lambda file, flags: os.open(file, flags | getattr(os, "O_NONBLOCK", 0))) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise UserError(f"cannot read {name}: it is not a regular file")
            if about.st_size > max_bytes:
                raise UserError(f"cannot read {name}: it has {about.st_size:,} bytes, more than {max_bytes:,}")
            return file.read(max_bytes)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror}") from error
    except ValueError as error:  # NUL in the name
        raise UserError(f"cannot read {name}: {error}") from error


def read_text(path: str | Path, max_bytes: int = MAX_TEXT) -> str:
    """`read_bytes` as text in UTF-8, with or without a byte order mark."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{short(path, 200)} is not text in UTF-8 ({one_line(error, 100)})") from None


def read_json(path: str | Path, max_bytes: int = MAX_TEXT) -> Any:
    """The JSON value in a file; a UserError if there is none."""
    text = read_text(path, max_bytes)
    try:
        return json.loads(text)
    except RecursionError:
        raise UserError(f"{short(path, 200)} is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise UserError(f"{short(path, 200)} is not JSON: {one_line(error, 100)}") from None


def slug(plan: str) -> str:
    """The text of a plan as part of a file name: readable, and different for different plans.

    >>> slug("anchor@6(k=10,m=50,alpha=0.5)"), slug("tome@*:-8")
    ('anchor@6_k10_m50_alpha0.5', 'tome@all--8')
    """
    words = {"(": "_", ")": "", "=": "", ",": "_", ":": "-", "*": "all", "%": "pct", " ": "", "/": "_", "\\": "_"}
    return "".join(words.get(letter, letter) for letter in plan)


def format_template(template: str, flag: str, **names: str) -> str:
    """Fills in a template of file names; an unknown name in braces is an error that lists the allowed ones."""
    try:
        return template.format(**names)
    except KeyError as error:
        name = str(error.args[0])
        allowed = " ".join("{" + known + "}" for known in names)
        raise UserError(f"{flag} has {{{name}}}; allowed are {allowed}.{did_you_mean(name, names)}") from error
    except (ValueError, IndexError, AttributeError) as error:
        raise UserError(f"{flag} {template!r} is not a template: {error}. Write {{{{ and }}}} for braces.") from error


def read_lines(path: str, flag: str, what: str = "name") -> list[str]:
    """The lines of a text file that a flag names."""
    try:
        return read_text(Path(path).expanduser()).splitlines()
    except UserError as error:
        raise UserError(f"{flag} is a text file with one {what} a line: {error}.") from error


def check_writable(path: Path, flag: str = "--output") -> None:
    """Raises a UserError if a file cannot be written there. Creates nothing."""
    try:
        if path.is_dir():
            raise UserError(f"cannot write {path}: it is a folder. Give a file name in {flag}.")
        nearest = next(folder for folder in path.resolve().parents if folder.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}. Give another {flag}.") from error


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all: to a temporary file beside it, which is then renamed."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """`write_text` for bytes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".tmp")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes it private
        os.replace(temporary, path)
    except OSError as error:
        os.unlink(temporary)
        raise UserError(f"cannot write {path}: {error.strerror}.") from error
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: Path, value: Any) -> None:
    """`write_text` for a JSON value; numbers that are not finite become null."""
    write_text(path, json.dumps(to_json_value(value), indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file; if there is one with other content, that is backed up first."""
    if path.exists() and path.read_bytes() != content:
        back_up(path)
    write_bytes(path, content)


def back_up(path: Path) -> Path:
    """Renames a file to NAME.1, NAME.2, ... and prints the new name."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    os.rename(path, aside)
    print(f"tokensieve: {path} had other content; kept as {aside}", file=sys.stderr)
    return aside


class FolderLock:
    """One process at a time works in a folder. The lock of a process that died is free: the system releases it.

    (A record lock, not flock: processes that are forked while it is held do not hold it.)
    """

    def __init__(self, folder: Path, what: str) -> None:
        self.path, self.what = folder / ".lock", what
        self.descriptor: int | None = None

    def acquire(self) -> None:
        """A UserError that names the process which holds it."""
        try:
            import fcntl
        except ImportError:  # Windows has no such locks
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UserError(f"cannot write {self.path.parent}: {error.strerror}. Give another folder with --output.") from None
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system without locks
            raise UserError(
                f"{self.what} already runs in {self.path.parent} ({holder}); wait for it, or give another folder with --output"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        self.descriptor = descriptor

    def release(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
