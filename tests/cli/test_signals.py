"""Signals end a command with their code and without a traceback, whatever runs at that moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tokensieve import cli
from tokensieve.cli import main

NUMBERS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int | str | None]:
    """The exit code of a command that does this."""

    def run(work: Callable[[], object]) -> int | str | None:
        monkeypatch.setattr(cli, "dispatch", lambda args: (work() and 0) or 0)
        try:
            return main(["methods"])
        except SystemExit as end:
            return end.code

    return run


KILLED = """
import os, time
try:
    os.kill(os.getpid(), {number})
    time.sleep(60)
except BaseException:
    raise ImportError("not so fast")
"""


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("start", ["-m tokensieve", "-m tokensieve.train", "-c from tokensieve.cli import main; main()"])
def test_while_a_module_is_imported(number: int, start: str, tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text("try:\n    import killed\nexcept ImportError:\n    pass\n")
    (tmp_path / "killed.py").write_text(KILLED.format(number=number))
    command = [sys.executable, *start.split(maxsplit=1), "--plugin", str(tmp_path / "plugin.py")]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (128 + number, "tokensieve: interrupted\n")


@pytest.mark.parametrize("number", NUMBERS)
def test_what_a_library_makes_of_the_exception_is_no_unexpected_error(command, number, capsys) -> None:
    def work() -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        except BaseException:
            raise ImportError("cannot load module more than once") from None

    assert command(work) == 128 + number
    assert capsys.readouterr().err == "tokensieve: interrupted\n"


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_that_python_drops_comes_again(command, number, capsys) -> None:
    class Freed:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)
            time.sleep(1)

    def work() -> None:
        Freed()
        time.sleep(60)

    assert command(work) == 128 + number
    assert "Traceback" not in capsys.readouterr().err


def test_a_signal_that_is_ignored_stays_so_and_handlers_come_back(command) -> None:
    hook, before = sys.unraisablehook, signal.getsignal(signal.SIGTERM)
    own = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert command(lambda: os.kill(os.getpid(), signal.SIGINT)) == 0
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, own)
    assert sys.unraisablehook is hook and signal.getsignal(signal.SIGTERM) == before
