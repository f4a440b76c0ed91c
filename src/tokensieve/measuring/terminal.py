"""Printing tables on standard output, whatever it is connected to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Column, Table

FOLDED = 8  # characters of a line that a folded column has at least


def print_table(table: Table) -> None:
    """Print a table. In a narrow terminal columns that fold get narrower; no number is ever cut, the lines are longer then.

    Its texts are printed as they are: names of models and files may have brackets in them.
    """
    from rich.console import Console

    class Terminal(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich would exit with 1; this is the BrokenPipeError that it caught

    console = Terminal(markup=False, emoji=False)
    console.width = max(console.width, _least_width(table))
    console.print(table)


def fits(table: Table) -> bool:
    """Whether a table fits the terminal without folding a text."""
    from rich.console import Console

    console = Console(markup=False, emoji=False)
    return console.measure(table, options=console.options.update(width=10_000)).maximum <= console.width


def _least_width(table: Table) -> int:
    _, right, _, left = table.padding
    borders = len(table.columns) - 1 + 2 * table.show_edge if table.box else 0
    return sum(_least_column_width(column) + left + right for column in table.columns) + borders


def _least_column_width(column: Column) -> int:
    from rich.cells import cell_len

    if column.width is not None:
        return column.width
    lines = [line for text in (column.header, *column.cells) for line in str(text).splitlines()]
    natural = max(map(cell_len, lines), default=0)
    if column.max_width is not None:  # what is longer goes to the next line
        natural = min(natural, column.max_width)
    return min(natural, column.min_width or FOLDED) if column.overflow == "fold" else natural
