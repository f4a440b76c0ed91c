"""Ctrl-C and SIGTERM during a training."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from tokensieve.distributed import Processes


class Signals:
    """Records the first Ctrl-C or SIGTERM, so that the current step is finished and saved; a second one exits at once.

    A launcher and a cluster may both forward one signal, so with several processes a second one counts only after a while.
    """

    def __init__(self, processes: Processes) -> None:
        self.caught = 0
        self._when = 0.0
        self._patience = 2.0 if processes.size > 1 else 0.0
        self._before: dict[int, Any] = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if not self.caught:
            self.caught, self._when = number, time.monotonic()
        elif time.monotonic() - self._when >= self._patience:
            os._exit(128 + number)

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():  # signal handlers work only there
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
