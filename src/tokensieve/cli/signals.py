"""Ctrl-C and SIGTERM end a command with 130 and 143, without a traceback."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

IMPORTING = "<frozen importlib._bootstrap"  # how the file names of the code begin that imports modules


class Signals:
    """Inside it, SIGINT raises KeyboardInterrupt, and SIGTERM raises SystemExit(143). One that was ignored stays so.

    Args:
        is_program: this process is the command, and may be ended. While a module is imported it is ended at once: there is
            nothing to save then, and an exception would leave a library half imported, or be taken for a problem of it.
    """

    def __init__(self, is_program: bool) -> None:
        self.caught = 0
        self.is_program = is_program
        self._before: dict[int, Any] = {}
        self._unraisable = sys.unraisablehook

    def _send_again(self, problem: Any) -> None:
        """Python drops an exception that is raised while it forks or frees an object; then the signal comes again."""
        if self.caught and issubclass(problem.exc_type, (KeyboardInterrupt, SystemExit)):
            threading.Timer(0.01, os.kill, (os.getpid(), self.caught)).start()
        else:
            self._unraisable(problem)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.caught = number
        if self.is_program and _is_importing(frame):
            os.write(2, b"tokensieve: interrupted\n")
            os._exit(128 + number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # signal handlers work only there
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
            sys.unraisablehook = self._send_again
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._unraisable
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if self.is_program else handler)  # nothing is left to do but to end


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith(IMPORTING):
        frame = frame.f_back
    return frame is not None
