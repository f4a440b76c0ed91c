"""Result files: one JSON file for each plan, written whole or not at all, never in place of another run's.

Names follow clip_benchmark (`{dataset}_{pretrained}_{model}_{language}_{task}.json`), with `{plan}` in addition.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokensieve.errors import UserError, one_line
from tokensieve.files import back_up, format_template, read_json, slug, write_json
from tokensieve.provenance import to_json_value

DEFAULT_OUTPUT = "{dataset}_{pretrained}_{model}_{language}_{task}.json"
LAYER = ("layer", "tokens_in", "tokens_out")  # the keys of each cut in a result
MAX_NUMBER = 1e100  # a number beyond it was not measured


def result_path(template: str, *, plan: str, several_plans: bool, **names: str) -> Path:
    """The file of one result: the template filled in; the plan goes before the suffix if nothing else tells plans apart."""
    if template.endswith(("/", os.sep)) or Path(template).is_dir():
        template = os.path.join(template, DEFAULT_OUTPUT)
    if several_plans and "{plan" not in template:
        stem, suffix = os.path.splitext(template)
        template = f"{stem}_{{plan}}{suffix}"
    return Path(format_template(template, "--output", plan=slug(plan), **names))


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write one result. A file there that holds another run is kept under the next free number, with a message."""
    if path.exists() and stored_key(path) != result["run"]["key"]:
        back_up(path)
    write_json(path, result)


def stored_key(path: Path) -> str | None:
    """The key of the run that made a result file; None if there is no such file or it is not one of ours."""
    try:
        stored = read_json(path)
    except UserError:
        return None
    run = stored.get("run") if isinstance(stored, dict) else None
    return run.get("key") if isinstance(run, dict) else None


def read_results(files: Sequence[str]) -> list[dict[str, Any]]:
    """The results in these files and folders. A file that is no result is an error, in a folder a message."""
    found: list[dict[str, Any]] = []
    for path in map(Path, files):
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            try:
                found.append(_read_result(file))
            except UserError as error:
                if not path.is_dir():
                    raise
                print(f"tokensieve: left out: {error}", file=sys.stderr)
    if not found:
        raise UserError(f"no result in {', '.join(files)}. Make one with: tokensieve eval")
    return found


def _read_result(path: Path) -> dict[str, Any]:
    try:
        result = to_json_value(read_json(path))
        json.dumps(result, ensure_ascii=False).encode()  # halves of letters cannot be written
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {one_line(error, 100)}.") from error
    needed = ("dataset", "model", "pretrained", "metrics")
    missing = [name for name in needed if name not in result] if isinstance(result, dict) else list(needed)
    if missing or not isinstance(result["metrics"], dict):
        raise UserError(f"{path} is not a result of eval: it has no {', '.join(missing) or 'metrics by name'}.")
    whole: dict[str, Any] = result
    if wrong := _find_problem(whole):
        raise UserError(f"{path} is not a result of eval: {wrong}.")
    return whole


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
            return f"its {name!r} is no measurement: it is beyond {MAX_NUMBER:g}"
    return None
