"""Standard input, output and error of the command, whatever they are connected to."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

from tokensieve.errors import printable

NAMES = ("standard input", "standard output", "standard error")


class Output(io.FileIO):
    """A descriptor that is written, and what the system said when it could not be. Libraries may have passed over it."""

    problem: OSError | None = None

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            self.problem = error
            raise


_outputs: list[Output] = []


def prepare() -> None:
    """Open streams that are closed, print letters that a stream does not know as escapes, and remember errors.

    In a process without standard output (`tokensieve ... >&-`) the next file that is opened would take its place.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdout, sys.stderr = _open(1, sys.stdout), _open(2, sys.stderr)


def _open(number: int, stream: Any) -> Any:
    if stream is None:
        stream = os.fdopen(number, "w", closefd=False)
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    _outputs.append(Output(number, "w", closefd=False))
    return io.TextIOWrapper(
        io.BufferedWriter(_outputs[-1]),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def say(text: str) -> None:
    """Print a message on standard error, if that can be written. Names in it cannot steer the terminal."""
    with contextlib.suppress(OSError):
        print("\n".join(map(printable, text.split("\n"))), file=sys.stderr, flush=True)


def are_broken() -> bool:
    """Whether standard output or error could not be written."""
    return any(output.problem for output in _outputs)


def finish(code: int | str | None) -> int:
    """Write what is left in the buffers; the exit code. 141: the reader of our output went away (`tokensieve methods | head`).

    code: as sys.exit takes it.
    """
    if isinstance(code, str):
        say(code)
    code = code if isinstance(code, int) else 0 if code is None else 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    for output in _outputs:
        if output.problem is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())  # Python tries again at its end, and would complain
            gone = isinstance(output.problem, BrokenPipeError)
            if not gone:
                say(f"tokensieve: error: {NAMES[output.fileno()]} cannot be written: {output.problem.strerror}")
            code = code or (141 if gone else 1)
    return code
