"""Disks that are full or read-only, for one process: by a limit on the size of files, or as a mount that only it sees."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from functools import cache
from pathlib import Path

NEW_NAMESPACE, READ_ONLY, BIND, REMOUNT, PRIVATE = 0x20000, 1, 4096, 32, (1 << 18) | 16384


def limit_files(size: int) -> None:
    """No file of this process gets larger."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def mount_small(folder: Path, size: int) -> None:
    """The folder is a disk with room for its files and `size` bytes more, for this process.

    Nobody else sees what is written there. So the command runs in a fork, and what it leaves is copied to FOLDER.after.
    """
    aside = folder.with_suffix(".before")
    shutil.copytree(folder, aside, symlinks=True)
    room = -(-(size + _used(folder)) // 4096) * 4096 + 4096
    _enter_namespace()
    _mount(b"tmpfs", folder, b"tmpfs", 0, f"size={room}")
    shutil.copytree(aside, folder, symlinks=True, dirs_exist_ok=True)
    shutil.rmtree(aside)
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        shutil.copytree(folder, folder.with_suffix(".after"), symlinks=True)
        os._exit(abs(os.waitstatus_to_exitcode(status)))


def mount_read_only(folder: Path) -> None:
    """The folder cannot be written, for this process."""
    _enter_namespace()
    _mount(str(folder).encode(), folder, b"", BIND)
    _mount(b"none", folder, b"", BIND | REMOUNT | READ_ONLY)


@cache
def can_mount() -> bool:
    """Whether this user may mount."""
    child = os.fork()
    if not child:
        try:
            _enter_namespace()
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _used(folder: Path) -> int:
    """Bytes of the files below a folder, in whole pages, with one for each entry."""
    return sum(-(-path.lstat().st_size // 4096) * 4096 + 4096 for path in folder.rglob("*"))


def _enter_namespace() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NAMESPACE):
        raise OSError(ctypes.get_errno(), "cannot enter a namespace of mounts")
    _mount(b"none", Path("/"), b"", PRIVATE)


def _mount(source: bytes, target: Path, kind: bytes, flags: int, options: str = "") -> None:
    if ctypes.CDLL(None, use_errno=True).mount(source, str(target).encode(), kind, flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"cannot mount {target}")
