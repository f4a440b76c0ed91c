"""A result is one JSON file: written whole or not at all, never in place of another run's; many of them make one CSV.

Names follow clip_benchmark (`{dataset}_{pretrained}_{model}_{language}_{task}.json`), with `{plan}` in addition.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokensieve
from tokensieve.errors import UserError, did_you_mean

DEFAULT_OUTPUT = "{dataset}_{pretrained}_{model}_{language}_{task}.json"

# The CSV's columns: first clip_benchmark's, metrics in the order of its tasks, then what we add. Others follow, sorted.
HEAD = ("dataset", "model", "pretrained", "task", "language", "model_fullname")
METRICS = (
    *("acc1", "acc5", "mean_per_class_recall", "mean_average_precision"),
    *("image_retrieval_recall@1", "text_retrieval_recall@1", "image_retrieval_recall@5", "text_retrieval_recall@5"),
    *("image_retrieval_recall@10", "text_retrieval_recall@10", "image_acc", "text_acc", "acc"),
    *("lp_acc1", "lp_acc5", "lp_mean_per_class_recall", "weight_decay", "epochs", "seed", "fewshot_k", "normalized"),
    *("vqa_score", "exact_match"),
    *("mAP", "rank_1", "rank_5", "rank_10", "cmc"),
    *("Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "METEOR", "ROUGE_L", "CIDEr", "SPICE"),
)
REDUCTION = (
    "plan",
    "applied",
    "reason",
    "layers",
    "tokens_in",
    "tokens_out",
    "token_fusion",
    "token_fusion_weight",
    "gflops",
    "gflops_full",
    "gflops_llm",
    "gflops_llm_full",
    "images_per_second",
    "images_per_second_full",
    "seconds_per_question",
    "seconds_per_question_full",
    "notes",
)
LAYER = ("layer", "tokens_in", "tokens_out")  # what the result says of each cut
LARGEST = 1e100  # a number beyond it was not measured


# ------------------------------------------------------------------------------------------------------------- values


def sane(value: Any) -> Any:
    """The same value as JSON can say it: numbers that are not finite become null, tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): sane(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [sane(item) for item in value]
    return value


def digest(value: Any) -> str:
    """A short fingerprint of anything JSON can say."""
    text = json.dumps(sane(value), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def stamp(file: str | Path) -> tuple[int, ...]:
    """Size and time of a file, nothing if it is not there: what changes when its content does, without reading it."""
    try:
        about = os.stat(file)
    except OSError:
        return ()
    return about.st_size, about.st_mtime_ns


def versions() -> dict[str, str]:
    """What made a result."""
    import open_clip
    import timm
    import torch
    import transformers

    libraries = {"torch": torch, "open_clip": open_clip, "timm": timm, "transformers": transformers}
    return {"tokensieve": tokensieve.__version__} | {name: library.__version__ for name, library in libraries.items()}


@functools.cache
def code_version() -> str:
    """The version, and a fingerprint of the package's source, so that edited code is another version."""
    sources = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        sources.update(path.relative_to(folder).as_posix().encode())
        sources.update(path.read_bytes())
    return f"{tokensieve.__version__}+{sources.hexdigest()[:12]}"


# -------------------------------------------------------------------------------------------------------------- names


def slug(plan: str) -> str:
    """A plan's text as a part of a file name, readable, and different for different plans.

    >>> slug("anchor@6(k=10,m=50,alpha=0.5)"), slug("tome@*:-8")
    ('anchor@6_k10_m50_alpha0.5', 'tome@all--8')
    """
    words = {"(": "_", ")": "", "=": "", ",": "_", ":": "-", "*": "all", "%": "pct", " ": "", "/": "_", "\\": "_"}
    return "".join(words.get(letter, letter) for letter in plan)


def result_path(template: str, *, plan: str, several_plans: bool, **names: str) -> Path:
    """The file of one result: the template filled in; the plan goes before the suffix if nothing else tells plans apart."""
    if template.endswith(("/", os.sep)) or Path(template).is_dir():
        template = os.path.join(template, DEFAULT_OUTPUT)
    if several_plans and "{plan" not in template:
        stem, suffix = os.path.splitext(template)
        template = f"{stem}_{{plan}}{suffix}"
    return Path(fill(template, "--output", plan=slug(plan), **names))


def fill(template: str, flag: str, **names: str) -> str:
    """A file name template filled in; what is not a name of ours is an error that lists them."""
    try:
        return template.format(**names)
    except KeyError as error:
        name = str(error.args[0])
        allowed = " ".join("{" + known + "}" for known in names)
        raise UserError(f"{flag} has {{{name}}}; it may hold {allowed}.{did_you_mean(name, names)}") from error
    except (ValueError, IndexError, AttributeError) as error:
        raise UserError(f"{flag} {template!r} is not a template: {error}. Write {{{{ and }}}} for braces.") from error


# -------------------------------------------------------------------------------------------------------------- files


def check_writable(path: Path, flag: str = "--output") -> None:
    """Fail now, with one line, if a file could not be written there later. Nothing is made yet."""
    try:
        if path.is_dir():
            raise UserError(f"cannot write {path}: it is a folder. Give a file name in {flag}.")
        nearest = next(folder for folder in path.resolve().parents if folder.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}. Give another {flag}.") from error


def write_text(path: Path, text: str) -> None:
    """Write to a temporary file beside it, then rename: the file is there whole, or the old one is untouched."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """`write_text` for bytes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".tmp")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes it private; a result is an ordinary file
        os.replace(temporary, path)
    except OSError as error:
        os.unlink(temporary)
        raise UserError(f"cannot write {path}: {error.strerror}.") from error
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: Path, value: Any) -> None:
    """`write_text` for anything JSON can say, and numbers that are not finite as null."""
    write_text(path, json.dumps(sane(value), indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write one result; a file there that holds another run is kept under the next free number, and that is said."""
    if path.exists() and stored_key(path) != result["run"]["key"]:
        move_aside(path)
    write_json(path, result)


def stored_key(path: Path) -> str | None:
    """The key of the run that made a result file; None if there is no such file or it is not one of ours."""
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    run = stored.get("run") if isinstance(stored, dict) else None
    return run.get("key") if isinstance(run, dict) else None


def move_aside(path: Path) -> Path:
    """Rename a file to NAME.1, NAME.2, ... and say so."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    os.rename(path, aside)
    print(f"tokensieve: {path} held something else; kept as {aside}", file=sys.stderr)
    return aside


# ---------------------------------------------------------------------------------------------------------------- CSV


def build_csv(files: Sequence[str], output: str) -> int:
    """Fold result files (and folders of them) into one CSV with its columns in a fixed order; the number of rows."""
    rows = [_row(result) for result in read(files)]
    path = Path(output)
    check_writable(path)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=columns(rows), restval="")
    writer.writeheader()
    writer.writerows(rows)
    content = text.getvalue()
    if path.exists() and path.read_bytes() != content.encode():
        move_aside(path)
    write_text(path, content)
    return len(rows)


def columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """All columns of these rows: known ones in their order, then the others sorted."""
    present = {name for row in rows for name in row}
    known = [*HEAD, *(name for metric in METRICS for name in (metric, f"{metric}_stderr")), *REDUCTION]
    others = sorted(present.difference(known), key=lambda name: (name.startswith("run_"), name))
    return [name for name in known if name in present] + others


def read(files: Sequence[str]) -> list[dict[str, Any]]:
    """The results in these files and folders; what is no result is an error, in a folder a remark."""
    found: list[dict[str, Any]] = []
    for path in map(Path, files):
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            try:
                found.append(_result(file))
            except UserError as error:
                if not path.is_dir():
                    raise
                print(f"tokensieve: left out: {error}", file=sys.stderr)
    if not found:
        raise UserError(f"no result in {', '.join(files)}. Make one with: tokensieve eval")
    return found


def _result(path: Path) -> dict[str, Any]:
    try:
        result = sane(json.loads(path.read_text()))
        json.dumps(result, ensure_ascii=False).encode()  # halves of letters cannot be written
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}.") from error
    needed = ("dataset", "model", "pretrained", "metrics")
    missing = [name for name in needed if name not in result] if isinstance(result, dict) else list(needed)
    if missing or not isinstance(result["metrics"], dict):
        raise UserError(f"{path} is not a result of eval: it has no {', '.join(missing) or 'metrics by name'}.")
    whole: dict[str, Any] = result
    if wrong := _wrong(whole):
        raise UserError(f"{path} is not a result of eval: {wrong}.")
    return whole


def _wrong(result: Mapping[str, Any]) -> str | None:
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
        if isinstance(value, (int, float)) and abs(value) > LARGEST:
            return f"its {name!r} is no measurement: it is beyond {LARGEST:g}"
    return None


def _row(result: Mapping[str, Any]) -> dict[str, Any]:
    """One result as one flat row: metrics, clip_benchmark's keys, `reduction` by its names, `run` as run_*."""
    row: dict[str, Any] = dict(result["metrics"])
    row.update({name: value for name, value in result.items() if name not in ("metrics", "reduction", "run")})
    row["model_fullname"] = f"{result['model']} {result['pretrained']}"
    done = dict(result.get("reduction") or {})
    if "layers" in done:
        done["layers"] = " ".join(f"{cut['layer']}:{cut['tokens_in']}->{cut['tokens_out']}" for cut in done["layers"])
    if "notes" in done:
        done["notes"] = "; ".join(done["notes"])
    row.update(done)
    row.update({f"run_{name}": value for name, value in (result.get("run") or {}).items()})
    return {name: _cell(value) for name, value in row.items()}


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value
