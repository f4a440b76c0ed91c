"""`eval --run_folder`: one folder with the results of a run, its arguments, and a log of what it printed."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from tokensieve import provenance
from tokensieve.files import check_writable, create_file

ARGUMENTS, LOG = "arguments.yaml", "log.txt"


@contextmanager
def recorded(folder: str | None, args: argparse.Namespace) -> Iterator[None]:
    """Writes the arguments to the first free one of arguments.yaml, arguments-2.yaml, ..., and appends to log.txt what is
    printed inside the block, without progress bars. folder: None records nothing."""
    if folder is None:
        yield
        return
    log = Path(folder) / LOG
    check_writable(log, "--run_folder")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["tokensieve", *args.typed])
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    about = {"command": command, "time": started, "versions": provenance.versions(), "arguments": _plain(vars(args))}
    _write_arguments(log.parent, about)
    with open(log, "a", encoding="utf-8", errors="backslashreplace") as file:
        file.write(f"{started} {command}\n")
        with redirect_stdout(_Tee(sys.stdout, file)), redirect_stderr(_Tee(sys.stderr, file)):
            try:
                yield
            except BaseException as error:
                said = f"error: {error}" if isinstance(error, Exception) else "interrupted"  # by SIGINT or SIGTERM
                file.write(f"tokensieve: {said}\n")  # it is printed outside
                raise


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in provenance.to_json_value(arguments).items() if name not in ("command", "typed")}


def _write_arguments(folder: Path, about: dict[str, Any]) -> None:
    import yaml

    content = yaml.safe_dump(about, sort_keys=False, allow_unicode=True).encode()
    names = (folder / (ARGUMENTS if number == 1 else f"arguments-{number}.yaml") for number in count(1))
    next(name for name in names if not name.exists() and create_file(name, content))


class _Tee:
    """A stream that also goes to a file; progress bars, which draw over their line, do not."""

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self.stream, self.file = stream, file

    def write(self, text: str) -> int:
        if "\r" not in text:
            self.file.write(text)
        return self.stream.write(text)

    def flush(self) -> None:
        self.file.flush()
        self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
