"""What a bench leaves: a JSON file with the rows, the machine and the versions; tables; a warning on a busy machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokensieve import files, provenance
from tokensieve.measuring.break_even import pays_from
from tokensieve.measuring.clock import describe_machine
from tokensieve.measuring.tables import print_break_even, print_notes, print_pays_from

Rows = Sequence[Mapping[str, Any]]


def check_output(output: str | None) -> None:
    """A UserError, before anything is measured, if the file cannot be written."""
    if output is not None:
        files.check_writable(Path(output))


def publish(
    rows: Rows, output: str | None, quiet: bool, print_rows: Callable[[Rows], None], break_even: Sequence[Mapping[str, Any]]
) -> None:
    """Writes the rows of one model as JSON, and prints them."""
    machine = describe_machine(rows)
    pays = pays_from(rows)
    write(output, {"rows": rows, "pays_from_batch": pays, "break_even": break_even, "machine": machine})
    if not quiet:
        print_rows(rows)
        print_notes(rows)
        print_pays_from(pays, rows)
        print_break_even(break_even)
    warn(machine)


def write(output: str | None, result: Mapping[str, Any], goes_on: bool = False) -> None:
    """Writes a result with the versions that made it; a file of that name is kept, unless this one goes on with it."""
    if output is not None:
        store = files.write_bytes if goes_on else files.replace_file
        store(Path(output), files.json_bytes({**result, "versions": provenance.versions()}))


def warn(machine: Mapping[str, Any]) -> None:
    """One line if other programs disturbed the measurement."""
    if machine["warning"]:
        print(f"tokensieve: {machine['warning']}", file=sys.stderr)
