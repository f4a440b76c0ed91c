"""`tokensieve leaderboard`: show the rows, add files of rows, make the page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tokensieve import files
from tokensieve.errors import UserError, short
from tokensieve.leaderboard import curves, page
from tokensieve.leaderboard.markdown import number, scale, title
from tokensieve.leaderboard.rows import Row, add_files, read_folder
from tokensieve.measuring import terminal


def run(args: argparse.Namespace) -> Any:
    """One of show, add and page; what it found, for --json."""
    if args.action == "add":
        if not args.files:
            raise UserError("leaderboard add: name the files of rows to add, such as results/*.json")
        new, known = add_files(args.files, args.folder)
        if not args.quiet:
            print(f"{new} rows added to {args.folder}, {known} were there already")
        return {"added": new, "known": known}
    if args.files:
        raise UserError(f"leaderboard {args.action} takes no files; --folder names the folder that they are in")
    rows, skipped = read_folder(args.folder)
    if not rows:
        raise UserError(
            f"{short(args.folder, 200)} has no row; benchmarks/leaderboard.sh makes them, leaderboard add adds them"
        )
    if args.action == "show" and args.as_json:
        return {"rows": rows, "skipped": skipped}
    if args.action == "show":
        for part in curves.boards(rows).values():
            print_board(part)
        if skipped:
            print(f"{len(skipped)} entries say what a model cannot carry out; docs/leaderboard.md lists them")
        return None
    path = Path(args.output)
    files.check_writable(path)
    files.replace_file(path, page.build(rows).encode(errors="replace"))
    if not args.quiet and not files.is_stream(path):
        print(path)
    return {"file": str(path)}


def print_board(rows: list[Row]) -> None:
    """The rows of one task and model, the best at twice the speed first."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    times, found = scale(rows[0]), curves.curves(rows)
    at_two = {key: curves.read_off(points, curves.TARGET) for key, points in found.items()}

    def order(row: Row) -> tuple[bool, float, str, float]:
        value = at_two[row["method"], row["placement"]]
        return value is None, -(value or 0.0), row["method"], -row["tokens_left"]

    table = Table(
        title=f"{title(rows)}; full model {number(rows[0]['score_none'], times)}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0),
    )
    table.add_column("plan", overflow="fold", min_width=12)
    table.add_column("place")
    for head in ("tokens", "score", "difference", "speed-up", "at 2x"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in sorted(rows, key=order):
        table.add_row(
            row["plan"],
            row["placement"],
            f"{row['tokens_in']:g} > {row['tokens_left']:g}",
            number(row["score"], times),
            f"{number(row['difference'], times)} ± {number(row['difference_stderr'], times)}",
            f"{curves.speedup(row):.2f}x",
            number(at_two[row["method"], row["placement"]], times),
        )
    terminal.print_table(table)
