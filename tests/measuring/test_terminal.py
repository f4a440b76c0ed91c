"""Tables are printed whole, whatever the terminal is."""

from __future__ import annotations

import os
import sys

import pytest
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tokensieve.measuring.terminal import print_table

CELLS = ["[/]model[red]:heart:", "0.87500 ± 0.11690", "196 -> 100"]


def table() -> Table:
    made = Table(title="a title of several words", box=SIMPLE_HEAD, padding=0)
    made.add_column("plan", overflow="fold", min_width=12)
    made.add_column("accuracy", justify="right", no_wrap=True)
    made.add_column("tokens")
    made.add_row(*CELLS)
    return made


@pytest.mark.parametrize("columns", ["1", "20", "0", "-3", "x", "80", "500"])
def test_no_number_is_cut_and_names_are_printed_as_they_are(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "dumb")
    print_table(table())
    printed = capsys.readouterr().out
    assert CELLS[1] in printed and CELLS[2] in printed and "…" not in printed
    first = "".join(line.split("  ")[0].strip() if "0.875" not in line else line[:13].strip() for line in printed.splitlines())
    assert CELLS[0] in first.replace(" ", "") or CELLS[0] in printed


def test_a_table_that_fits_is_not_wider_than_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "46")  # 12 + 17 + 10 and four borders, and three more
    print_table(table())
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 46


def test_a_reader_that_went_away_is_a_broken_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        with pytest.raises(BrokenPipeError):
            print_table(table())
        os.dup2(os.open(os.devnull, os.O_WRONLY), gone.fileno())  # so that closing it does not complain
