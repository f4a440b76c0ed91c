"""YAML files of trainings as typed models. All errors of a file are reported at once, each with its line and the nearest key.

The type of a file comes from the declarations of trainings (registry.py). pydantic and yaml are imported when a file is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve.config import shipped
from tokensieve.config.registry import TRAININGS, TrainingSpec
from tokensieve.errors import UserError, did_you_mean, nearest, one_line, short
from tokensieve.registry import resolve

if TYPE_CHECKING:
    from tokensieve.config.document import Document
    from tokensieve.config.schema import Training

MAX_KEY, MAX_PARTS = 200, 10  # letters and parts of the path of a key on the command line


def load(path: str | Path, overrides: Mapping[str, str] | None = None, *, searching: bool = False) -> Any:
    """Read and check a training file: an instance of its training's schema. Raises ConfigErrors with everything wrong in it.

    overrides: values by the path of their key, as in "SOLVER.BASE_LR"; each is read as YAML and replaces that of the file.
    searching: for a search, also if the file does not turn one on. A search without a space gets that of the training.
    """
    from tokensieve.config import explain
    from tokensieve.config.search_space import check_space, fill_space, is_search

    document = read(path, overrides)
    schema: type[Training] = resolve(training_of(document).schema)
    if searching or is_search(document):
        fill_space(document, schema)
    return explain.check_document(document, schema, check_space(document, schema))


def read(path: str | Path, overrides: Mapping[str, str] | None = None) -> Document:
    """The values of a file, or of a shipped one by its name (shipped.py), with those of the command line. Checks no key."""
    from tokensieve.config.document import Document, key_path

    document = Document(shipped.find(path))
    for key, text in (overrides or {}).items():
        _check_key(key)
        document.override(key_path(key), text)
    return document


def _check_key(key: str) -> None:
    """A UserError if a word of the command line cannot be the path of a key."""
    parts = key.split(".")
    if not all(part.isidentifier() or part.isdigit() for part in parts) or len(parts) > MAX_PARTS or len(key) > MAX_KEY:
        raise UserError(f"{short(key)!r} is not a key; after the file comes KEY=VALUE, such as SOLVER.SEED=2")


def training_of(document: Document) -> TrainingSpec:
    """The training of a file: the one that `task:` names or, without `task:`, the one that has most of the file's sections."""
    from tokensieve.config.document import ConfigErrors

    task = document.data.get("task")
    specs = sorted(TRAININGS.values(), key=lambda spec: spec.name)
    by_task = {spec.name: spec for spec in specs if not spec.sections}
    by_sections = [spec for spec in specs if spec.sections]
    if isinstance(task, str) and task in by_task:
        return by_task[task]
    if task is None and by_sections:
        best = max(by_sections, key=lambda spec: _count_sections(document, spec))
        if any(_count_sections(document, best)):
            return best
    options = "; or write ".join([", ".join(by_task), ", or ".join(spec.sections[0] for spec in by_sections)])
    if "task" in document.data:
        shown = short(repr(task), 60)
        error = document.error(("task",), f"{shown} is not one of {options}.{did_you_mean(short(task), by_task)}")
    else:
        error = document.missing(("task",), f"missing; one of {options}")
    raise ConfigErrors(document.path, [*document.errors(), error])


def _count_sections(document: Document, spec: TrainingSpec) -> tuple[int, int]:
    """How many keys of a file are sections of a training, and how many are or nearly are."""
    keys = list(document.data)
    return sum(key in spec.sections for key in keys), sum(nearest(key, spec.sections) is not None for key in keys[:100])


@dataclass(frozen=True)
class Checked:
    """What `tokensieve validate` finds out about a file."""

    file: str
    summary: str  # what it trains; empty if it has errors
    errors: tuple[str, ...]  # FILE:LINE: KEY: MESSAGE
    notes: tuple[str, ...]


def validate(path: str | Path, overrides: Mapping[str, str] | None = None) -> Checked:
    """Every error of a file, that of what it refers to included. overrides: see `load`."""
    from tokensieve.config.document import ConfigErrors

    name = short(path, 300)
    try:
        config = load(path, overrides)
        check_files(path, config, overrides)
        return Checked(name, _summary(config), (), tuple(short(note, 1000) for note in config.notes()))
    except ConfigErrors as error:
        return Checked(name, "", tuple(error.lines), ())
    except UserError as error:
        return Checked(name, "", (one_line(error),), ())


def _summary(config: Any) -> str:
    summary, search = TRAININGS[config.task].summary, config.search_settings
    if search.space:
        names, state = short(", ".join(search.space), 500), "" if config.searches else " (not turned on)"
        summary += f"; {search.n_trials} trials over {names}{state}"
    return summary


def check_files(path: str | Path, config: Training, overrides: Mapping[str, str] | None = None) -> None:
    """Check what the file refers to, such as data on the disk. Raises ConfigErrors with the lines that refer to it."""
    from tokensieve.config.document import ConfigErrors, key_path

    problems = list(config.check_files())
    if problems:
        document = read(path, overrides)
        raise ConfigErrors(document.path, [document.error(key_path(key), message) for key, message in problems])
