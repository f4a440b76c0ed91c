"""Files of the leaderboard: what a row holds, how files are checked, and how they are merged.

A file is {"format": "tokensieve-leaderboard", "version": 1, "rows": [...], "skipped": [...]}. A row is one plan on one task;
`skipped` says which methods a model cannot carry out, and why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokensieve import files
from tokensieve.errors import UserError, describe_value, short

FORMAT, VERSION = "tokensieve-leaderboard", 1
LIBRARIES = ("tokensieve", "torch")  # whose versions every row states
Row = dict[str, Any]

TEXTS = ("task", "dataset", "model", "method", "plan", "placement", "metric", "clock")
COUNTS = ("samples", "batch_size", "threads", "rounds")
NUMBERS = ("tokens_in", "tokens_left", "score", "score_none", "difference", "difference_stderr", "gflops", "gflops_none")
RATIOS = ("time_ratio", "time_ratio_low", "time_ratio_high")  # the plan's time / that of the full model: median, quartiles
OPTIONAL = ("budget", "oracle_ratio")  # numbers that may be null: the authors' own budget, no oracle
KEY = ("task", "dataset", "model", "method", "placement", "budget", "samples")  # what makes another row
SHARES = 1e-6  # how far the difference may be from score - score_none
CLOCKS = ("cpu", "wall")


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row is about: two rows with the same key must be the same row."""
    return tuple(row[name] for name in KEY)


def name_of(row: Mapping[str, Any]) -> str:
    """A row in messages."""
    return ", ".join(short(row.get(name), 60) for name in ("task", "model", "plan", "placement"))


def check_row(row: Any, source: str) -> Row:
    """The row; a UserError that says what is wrong with it."""
    if not isinstance(row, dict):
        raise UserError(f"{source}: a row is a JSON object, not {describe_value(row)}")

    def wrong(name: str, what: str) -> UserError:
        missing = "is missing" if name not in row else f"is {short(row[name], 60)}"
        return UserError(f"{source}: {name} {missing}; it is {what}")

    for name in TEXTS:
        if not isinstance(row.get(name), str) or not row[name].strip():
            raise wrong(name, "a text")
    source = f"{source} ({name_of(row)})"
    for name in COUNTS:
        if type(row.get(name)) is not int or row[name] < 1:
            raise wrong(name, "a whole number of at least 1")
    for name in (*NUMBERS, *RATIOS, *OPTIONAL):
        if name in OPTIONAL and name in row and row[name] is None:
            continue
        if type(row.get(name)) not in (int, float) or not math.isfinite(row[name]):
            raise wrong(name, "a finite number" + (", or null" if name in OPTIONAL else ""))
    for name in (*RATIOS, "gflops", "gflops_none"):
        if row[name] <= 0:
            raise wrong(name, "above 0")
    if row["budget"] is not None and not 0 < row["budget"] <= 1:
        raise wrong("budget", "the share of tokens left at the end, above 0 and at most 1, or null")
    if not 0 < row["tokens_left"] <= row["tokens_in"]:
        raise wrong("tokens_left", "above 0 and at most tokens_in")
    if row["difference_stderr"] < 0:
        raise wrong("difference_stderr", "at least 0")
    if abs(row["score"] - row["score_none"] - row["difference"]) > SHARES * max(1.0, abs(row["score"])):
        raise wrong("difference", f"score - score_none, {row['score'] - row['score_none']:.6g}")
    if not row["time_ratio_low"] <= row["time_ratio"] <= row["time_ratio_high"]:
        raise wrong("time_ratio", "between time_ratio_low and time_ratio_high")
    if row["clock"] not in CLOCKS:
        raise wrong("clock", " or ".join(CLOCKS))
    seeds = row.get("seeds")
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int for seed in seeds):
        raise wrong("seeds", "a list of the seeds that the score is the mean of, such as [0]")
    if len(set(seeds)) < len(seeds):
        raise wrong("seeds", "a list without repetitions")
    versions = row.get("versions")
    if not isinstance(versions, dict) or not all(isinstance(versions.get(name), str) for name in LIBRARIES):
        raise wrong("versions", f"an object with the versions of {' and '.join(LIBRARIES)}")
    if not isinstance(row.get("control"), bool):
        raise wrong("control", "true for a control, else false")
    return row


def check_skipped(entry: Any, source: str) -> Row:
    """An entry of `skipped`; a UserError that says what is wrong with it."""
    if not isinstance(entry, dict) or not all(isinstance(entry.get(n), str) for n in ("task", "model", "method", "reason")):
        raise UserError(f"{source}: an entry of skipped has the texts task, model, method and reason")
    return entry


def read_file(path: str | Path) -> tuple[list[Row], list[Row]]:
    """The rows and the skipped entries of a file, checked."""
    found, name = files.read_json(path), short(path, 200)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UserError(f'{name} is no file of the leaderboard: it has no "format": "{FORMAT}"')
    if found.get("version") != VERSION:
        raise UserError(f"{name} has version {short(found.get('version'))} of the format; this tokensieve reads {VERSION}")
    rows, skipped = found.get("rows"), found.get("skipped", [])
    if not isinstance(rows, list) or not isinstance(skipped, list):
        raise UserError(f"{name}: rows and skipped are lists")
    checked = [check_row(row, f"{name}, row {number}") for number, row in enumerate(rows, start=1)]
    return checked, [check_skipped(entry, name) for entry in skipped]


def file_value(rows: Sequence[Row], skipped: Sequence[Row]) -> dict[str, Any]:
    """The content of a file."""
    return {"format": FORMAT, "version": VERSION, "rows": list(rows), "skipped": list(skipped)}


def merge(parts: Iterable[tuple[str, Sequence[Row]]]) -> list[Row]:
    """All rows once. Rows with the same key must be equal; a UserError names those that are not."""
    found: dict[tuple[Any, ...], tuple[str, Row]] = {}
    for source, rows in parts:
        for row in rows:
            key = key_of(row)
            if key not in found:
                found[key] = (source, row)
            elif found[key][1] != row:
                differ = [name for name in row.keys() | found[key][1].keys() if row.get(name) != found[key][1].get(name)]
                raise UserError(
                    f"{name_of(row)}: {short(found[key][0], 120)} and {short(source, 120)} disagree in "
                    f"{', '.join(sorted(differ)[:4])}; keep one of them"
                )
    return [row for _, row in found.values()]


def merge_skipped(entries: Iterable[Row]) -> list[Row]:
    """Every entry once."""
    return list({tuple(sorted((name, str(value)) for name, value in entry.items())): entry for entry in entries}.values())


def folder_files(folder: str | Path) -> list[Path]:
    """The files of a leaderboard; a UserError if there is no such folder."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"{short(path, 200)} is no folder of leaderboard files; --folder names one")
    return sorted(path.glob("*.json"))


def read_folder(folder: str | Path) -> tuple[list[Row], list[Row]]:
    """The rows and the skipped entries of all files of a folder."""
    parts = [(str(path), read_file(path)) for path in folder_files(folder)]
    rows = merge((path, rows) for path, (rows, _) in parts)
    return rows, merge_skipped(entry for _, (_, skipped) in parts for entry in skipped)


def file_name(task: str, model: str, method: str) -> str:
    """The file of a method on a task and a model."""
    return files.slug(f"{task}_{model}_{method}.json".replace(" ", "-"))


def add_files(paths: Sequence[str], folder: str | Path) -> tuple[int, int]:
    """Adds the rows of files to a folder, all or none; how many are new, and how many were there already."""
    target = Path(folder)
    here = [(str(path), read_file(path)) for path in folder_files(target)] if target.exists() else []
    new = [(path, read_file(path)) for path in paths]
    known = {key_of(row) for _, (rows, _) in here for row in rows}
    rows = merge([(path, rows) for path, (rows, _) in (*here, *new)])
    skipped = merge_skipped(entry for _, (_, entries) in (*here, *new) for entry in entries)
    added = [row for row in rows if key_of(row) not in known]
    groups: dict[str, tuple[list[Row], list[Row]]] = {}
    touched = {file_name(row["task"], row["model"], row["method"]) for row in added}
    touched |= {file_name(e["task"], e["model"], e["method"]) for _, (_, entries) in new for e in entries}
    for part, entries in enumerate((rows, skipped)):
        for entry in entries:
            name = file_name(entry["task"], entry["model"], entry["method"])
            groups.setdefault(name, ([], []))[part].append(entry)
    target.mkdir(parents=True, exist_ok=True)
    for name in sorted(touched):
        files.write_bytes(target / name, files.json_bytes(file_value(*groups[name])))
    return len(added), sum(len(part) for _, (part, _) in new) - len(added)
