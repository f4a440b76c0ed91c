"""Result files: one JSON file for each run of a plan, written whole or not at all, never in place of another.

Names follow clip_benchmark (`{dataset}_{pretrained}_{model}_{language}_{task}.json`), with `{plan}` in addition. A run whose
name is taken adds its key to the name (docs/decisions/0022-one-file-per-run.md).
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from tokensieve.errors import UserError, one_line, short
from tokensieve.files import create_file, is_stream, json_bytes, json_lines, output_path, read_json, slug, write_bytes
from tokensieve.provenance import to_json_value

DEFAULT_OUTPUT = "{dataset}_{pretrained}_{model}_{language}_{task}.json"
RANKINGS = "rankings.json"  # what `eval --images` writes into a run folder; no result
LAYER = ("layer", "tokens_in", "tokens_out")  # the keys of each cut in a result
MAX_NUMBER = 1e100  # a number beyond it was not measured
KEY = 8  # letters of a run's key in a file name
LAST_TIME = 253_402_300_000.0  # seconds; the year 9999
# NAME.json, NAME_KEY.json, NAME_KEY-2.json, and NAME.json.1, where earlier versions moved the file of another run.
RESULT_NAME = re.compile(rf"(.*?)(_[0-9a-f]{{{KEY}}}(?:-([0-9]+))?)?(\.json)(?:\.[0-9]+)?", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Stored:
    """A result and the file that holds it."""

    path: Path
    result: dict[str, Any]

    @property
    def run(self) -> dict[str, Any]:
        return self.result.get("run") or {}

    @property
    def key(self) -> str | None:
        """The key of its settings; None if it is not a result of eval."""
        key = self.run.get("key")
        return key if isinstance(key, str) else None

    @cached_property
    def order(self) -> tuple[float, int, int, str]:
        """Greater for a newer result: by its time, then by the time, the number and the name of its file."""
        try:
            changed = self.path.stat().st_mtime_ns
        except OSError:
            changed = 0
        try:
            made = datetime.fromisoformat(self.run["time"])
            seconds = (made if made.tzinfo else made.replace(tzinfo=timezone.utc)).timestamp()
        except (KeyError, TypeError, ValueError, OverflowError):  # an earlier version, or damaged
            seconds = changed / 1e9
        name = RESULT_NAME.fullmatch(self.path.name)
        number = int(name[3] or 1) if name and name[2] else 0
        return seconds, changed, number, self.path.name


def result_path(template: str, *, plan: str, several_plans: bool, **names: str) -> Path:
    """The file of one result: the template filled in; the plan goes before the suffix if nothing else tells plans apart."""
    if template.endswith(("/", os.sep)) or os.path.isdir(template):
        template = os.path.join(template, DEFAULT_OUTPUT)
    if several_plans and "{plan}" not in template and not is_stream(Path(template)):
        stem, suffix = os.path.splitext(template)
        template = f"{stem}_{{plan}}{suffix}"
    return output_path(template, "--output", plan=slug(plan), **names)


def write_result(path: Path, result: Mapping[str, Any], predictions: Sequence[Mapping[str, Any]] | None = None) -> Path:
    """Writes one result to a new file: `path`, or if that is taken the first free one of NAME_KEY.json, NAME_KEY-2.json, ...

    Returns the file. A device or a pipe is written to as it is. Predictions go to a new file beside it (`predictions_path`).
    """
    content = json_bytes(result)
    if is_stream(path):
        write_bytes(path, content)
        return path
    written = create_new(path, result["run"]["key"], content)
    if predictions is not None and not create_file(predictions_path(written), json_lines(predictions)):
        raise UserError(
            f"{short(predictions_path(written), 200)} was made by another program; the predictions are not written."
        )
    return written


def create_new(path: Path, key: str, content: bytes) -> Path:
    """Writes a new file under the first free name of a run with this key; the file."""
    written = next(name for name in _names(path, key) if not _is_taken(name) and create_file(name, content))
    if written != path:
        print(f"tokensieve: {short(path, 200)} is taken; this result is in {short(written, 200)}", file=sys.stderr)
    return written


def _names(path: Path, key: str) -> Iterator[Path]:
    yield path
    yield path.with_stem(f"{path.stem}_{key[:KEY]}")
    yield from (path.with_stem(f"{path.stem}_{key[:KEY]}-{number}") for number in count(2))


def predictions_path(result: Path) -> Path:
    """The file of a result's predictions, which is no result itself."""
    return result.with_name(f"{result.stem}.predictions.jsonl")


def _is_taken(path: Path) -> bool:
    return os.path.exists(path) or os.path.exists(predictions_path(path))


def find_run(path: Path, key: str, with_predictions: bool = False) -> Stored | None:
    """The newest result with the settings of that key among the files in which runs of this name are.

    with_predictions: only of those that have their predictions beside them.
    """
    stem, suffix, mark = map(re.escape, (path.stem, path.suffix, key[:KEY]))
    wanted = re.compile(rf"{stem}(_{mark}(-[0-9]+)?)?{suffix}|{stem}{suffix}\.[0-9]+")
    found = []
    for name in _list_folder(path.parent):
        if wanted.fullmatch(name):
            try:
                found.append(_read_result(path.with_name(name)))
            except UserError:
                continue
    alike = [stored for stored in found if stored.key == key]
    if with_predictions:
        alike = [stored for stored in alike if os.path.exists(predictions_path(stored.path))]
    return max(alike, key=lambda stored: stored.order, default=None)


def time_after(earlier: Stored | None) -> str:
    """The time (UTC) for a new result: now, or just after an earlier result of the same settings if the clock was set back."""
    now = time.time()
    if earlier is not None and now <= earlier.order[0] < LAST_TIME:
        now = earlier.order[0] + 1e-6
    return datetime.fromtimestamp(now, timezone.utc).isoformat(timespec="microseconds")


def read_results(files: Sequence[str]) -> list[dict[str, Any]]:
    """The results in these files and folders. A file that is no result is an error, in a folder a message.

    In each that has a key, run.newest says whether it is the newest of those with the same key.
    """
    found: dict[str, Stored] = {}  # by the real path, so that a file which is named twice is one result
    for path in map(Path, files):
        is_folder = os.path.isdir(path)
        for file in _files_in(path) if is_folder else [path]:
            try:
                stored = _read_result(file)
                found.setdefault(os.path.realpath(file), stored)
            except UserError as error:
                if not is_folder:
                    raise
                print(f"tokensieve: left out: {error}", file=sys.stderr)
    if not found:
        raise UserError(f"no result in {short(', '.join(files), 200)}. Make one with: tokensieve eval")
    _say_what_is_not_read([path for path in map(Path, files) if not os.path.isdir(path)], set(found))
    _mark_newest(list(found.values()))
    return [stored.result for stored in found.values()]


def _list_folder(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _files_in(folder: Path) -> list[Path]:
    return [folder / name for name in _list_folder(folder) if RESULT_NAME.fullmatch(name) and plain_name(name) != RANKINGS]


def _say_what_is_not_read(named: Sequence[Path], read: set[str]) -> None:
    """Says which other runs of the files that were named lie beside them."""
    for folder in dict.fromkeys(path.parent for path in named):
        families = {plain_name(path.name) for path in named if path.parent == folder}
        others = [path for path in _files_in(folder) if plain_name(path.name) in families]
        unread = [path.name for path in others if os.path.realpath(path) not in read]
        if unread:
            more = f" and {len(unread) - 3} more" if len(unread) > 3 else ""
            print(
                f"tokensieve: not read: {short(', '.join(unread[:3]), 300)}{more}, other runs of the same name. "
                f"To read all, give the folder {short(folder, 200)}.",
                file=sys.stderr,
            )


def plain_name(name: str) -> str:
    """The name of a result file without the key of its run."""
    found = RESULT_NAME.fullmatch(name)
    return f"{found[1]}{found[4]}" if found else name


def _mark_newest(found: Sequence[Stored]) -> None:
    newest: dict[str, Stored] = {}
    for stored in found:
        if stored.key is not None and (stored.key not in newest or stored.order > newest[stored.key].order):
            newest[stored.key] = stored
    for stored in found:
        if stored.key is not None:
            stored.run["newest"] = newest[stored.key] is stored


def _read_result(path: Path) -> Stored:
    name = short(path, 200)
    try:
        result = to_json_value(read_json(path))
        json.dumps(result, ensure_ascii=False).encode()  # halves of letters cannot be written
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not JSON: {one_line(error, 100)}.") from error
    needed = ("dataset", "model", "pretrained", "metrics")
    missing = [name for name in needed if name not in result] if isinstance(result, dict) else list(needed)
    if missing or not isinstance(result["metrics"], dict):
        raise UserError(f"{name} is not a result of eval: it has no {', '.join(missing) or 'metrics by name'}.")
    whole: dict[str, Any] = result
    if wrong := _find_problem(whole):
        raise UserError(f"{name} is not a result of eval: {wrong}.")
    return Stored(path, whole)


def _find_problem(result: Mapping[str, Any]) -> str | None:
    """What is not as eval writes it, in the parts that a result of clip_benchmark does not have, or in its numbers."""
    for name in ("reduction", "run"):
        if not isinstance(result.get(name), dict | None):
            return f"its {name} is a {type(result[name]).__name__}, not values by name"
    done = result.get("reduction") or {}
    layers, notes = done.get("layers", []), done.get("notes", [])
    if not isinstance(layers, list) or not all(isinstance(cut, dict) and set(LAYER) <= set(cut) for cut in layers):
        return f"its layers are not a list of cuts, each with {', '.join(LAYER)}"
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        return "its notes are not a list of texts"
    for name, value in [*result["metrics"].items(), *done.items()]:
        if isinstance(value, (int, float)) and abs(value) > MAX_NUMBER:
            return f"its {short(name)!r} is no measurement: it is beyond {MAX_NUMBER:g}"
    return None
