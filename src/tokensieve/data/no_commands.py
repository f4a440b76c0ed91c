"""No shell: code of other packages runs here without being able to start a program.

clip_benchmark fetches many of its data sets by shell commands with the user's folder in them. Inside `no_commands` such a
command is an error that tells what it would have been.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_refusing = threading.local()
_lock = threading.RLock()
_users = 0
_stock: dict[str, Any] = {}


class CommandError(OSError):
    """A program that would have been started."""


@contextmanager
def no_commands() -> Iterator[None]:
    """os.system, os.popen and subprocess raise a CommandError in this thread."""
    global _users
    with _lock:
        if not _users:
            _stock.update({"system": os.system, "popen": os.popen, "Popen": subprocess.Popen})
            os.system, os.popen = _guard(os.system), _guard(os.popen)
            subprocess.Popen = _guarded_class(subprocess.Popen)  # type: ignore[misc]
        _users += 1
    outer = getattr(_refusing, "value", False)
    _refusing.value = True
    try:
        yield
    finally:
        _refusing.value = outer
        with _lock:
            _users -= 1
            if not _users:
                os.system, os.popen, subprocess.Popen = _stock["system"], _stock["popen"], _stock["Popen"]  # type: ignore[misc]


def _guard(stock: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(command: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_refusing, "value", False):
            raise CommandError(_text(command))
        return stock(command, *args, **kwargs)

    return guarded


def _guarded_class(stock: Any) -> Any:
    class Popen(stock):
        def __init__(self, command: Any, *args: Any, **kwargs: Any) -> None:
            if getattr(_refusing, "value", False):
                raise CommandError(_text(command))
            super().__init__(command, *args, **kwargs)

    return Popen


def _text(command: Any) -> str:
    text = command if isinstance(command, str) else " ".join(map(str, command))
    return f"the program {text.removeprefix('which ')}" if text.startswith("which ") else text
