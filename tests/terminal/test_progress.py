"""Progress bars tell what is done and the time left, on terminals only."""

from __future__ import annotations

import sys

import pytest

from tokensieve.cli import main
from tokensieve.cli.registry import COMMANDS, Command
from tokensieve.terminal import progress


def count() -> None:
    for _ in progress.bar(range(3), desc="counting", unit="step"):
        pass


def test_there_are_bars_on_terminals_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    count()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    count()
    said = capsys.readouterr()
    assert said.out == "" and "counting" in said.err and "3/3 [" in said.err and "step/s" in said.err
    with progress.hidden():
        count()
        with progress.hidden(False):  # what is inside cannot show what is hidden outside
            count()
    list(progress.bar(range(3), quiet=True))
    assert capsys.readouterr().err == ""


def test_quiet_hides_the_bars_of_every_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    COMMANDS.add(Command("counts", "x", "x", lambda parser: None, lambda args: count()), origin=__name__)
    try:
        assert main(["counts", "--quiet"]) == 0 and capsys.readouterr().err == ""
        assert main(["counts"]) == 0 and "3/3" in capsys.readouterr().err
    finally:
        COMMANDS.remove("counts")
