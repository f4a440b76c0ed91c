"""What reading a file of weights must never do: run its code, or need much memory."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_MEMORY = 600_000_000  # bytes that a try may add to the most this process ever had
MARK = Path(tempfile.gettempdir()) / f"tokensieve-was-here-{os.getpid()}"


class Evil:
    """What a pickle would run."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(MARK),)


def check_limits(call: Callable[[], None]) -> None:
    """Runs the try; it must not run code of a file, or need much memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    call()
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert more < MAX_MEMORY, f"{more:,} bytes of memory"
    assert not MARK.exists(), "code of a file was run"
