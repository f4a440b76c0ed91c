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
    times, found = scale(rows[0]), curves.curves(rows)
    at_two = {key: curves.read_off(points, curves.TARGET) for key, points in found.items()}

    def order(row: Row) -> tuple[bool, float, str, float]:
        value = at_two[row["method"], row["placement"]]
        return value is None, -(value or 0.0), row["method"], -row["tokens_left"]

    print(f"\n{title(rows)}; full model {number(rows[0]['score_none'], times)}")
    print(f"  {'plan':44} {'place':8} {'tokens':>11} {'score':>6} {'difference':>13} {'speed-up':>8} {'at 2x':>6}")
    for row in sorted(rows, key=order):
        gap = f"{number(row['difference'], times)} ± {number(row['difference_stderr'], times)}"
        tokens = f"{row['tokens_in']:g} > {row['tokens_left']:g}"
        reached = number(at_two[row["method"], row["placement"]], times)
        cells = f"{tokens:>11} {number(row['score'], times):>6} {gap:>13} {curves.speedup(row):7.2f}x {reached:>6}"
        print(f"  {row['plan']:44} {row['placement']:8} {cells}")
