"""Standard input, output and error of the command, whatever they are connected to."""

from __future__ import annotations

import contextlib
import io
import os
import sys

from tokensieve.errors import printable

NAMES = ("standard output", "standard error")


def prepare() -> None:
    """Open streams that are closed, and print letters that a stream does not know as escapes.

    In a process without standard output (`tokensieve ... >&-`) the next file that is opened would take its place.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Print a message on standard error, if that can be written. Names in it cannot steer the terminal."""
    with contextlib.suppress(OSError):
        print("\n".join(map(printable, text.split("\n"))), file=sys.stderr, flush=True)


def can_write() -> bool:
    """Whether standard output and error can be written."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        return False
    return True


def finish(code: int | str | None) -> int:
    """Write what is left in the buffers; the exit code. Python would otherwise try again at its end, and complain.

    code: as sys.exit takes it.
    """
    if isinstance(code, str):
        say(code)
    code = code if isinstance(code, int) else 0 if code is None else 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if not isinstance(error, BrokenPipeError):
                say(f"tokensieve: error: {NAMES[stream is sys.stderr]} cannot be written: {error.strerror}")
            code = code or (141 if isinstance(error, BrokenPipeError) else 1)
    return code
