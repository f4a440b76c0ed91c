"""YAML files of trainings as typed models. All errors of a file are reported at once, each with its line and the nearest key.

The type of a file comes from the declarations of trainings (registry.py). pydantic and yaml are imported when a file is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve.config.registry import TRAININGS, TrainingSpec
from tokensieve.errors import UserError, did_you_mean, nearest
from tokensieve.registry import resolve

if TYPE_CHECKING:
    from tokensieve.config.document import Document
    from tokensieve.config.schema import Training


def load(path: str | Path, overrides: Mapping[str, str] | None = None, *, searching: bool = False) -> Any:
    """Read and check a training file: an instance of its training's schema. Raises ConfigErrors with everything wrong in it.

    overrides: values by the path of their key, as in "SOLVER.BASE_LR"; each is read as YAML and replaces that of the file.
    searching: for a search, also if the file does not turn one on. A search without a space gets that of the training.
    """
    from tokensieve.config import explain
    from tokensieve.config.document import Document
    from tokensieve.config.search_space import check_space, fill_space, is_search, key_path

    document = Document(Path(path))
    for key, text in (overrides or {}).items():
        document.override(key_path(key), _read_value(text))
    schema: type[Training] = resolve(training_of(document).schema)
    if searching or is_search(document):
        fill_space(document, schema)
    return explain.check_document(document, schema, [*document.duplicates, *check_space(document, schema)])


def _read_value(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return text


def training_of(document: Document) -> TrainingSpec:
    """The training of a file: the one that `task:` names or, without `task:`, the one that has most of the file's sections."""
    from tokensieve.config.document import ConfigErrors

    task = document.data.get("task")
    specs = sorted(TRAININGS.values(), key=lambda spec: spec.name)
    by_task = {spec.name: spec for spec in specs if not spec.sections}
    by_sections = [spec for spec in specs if spec.sections]
    if task in by_task:
        return by_task[task]
    if task is None and by_sections:
        best = max(by_sections, key=lambda spec: _count_sections(document, spec))
        if any(_count_sections(document, best)):
            return best
    options = "; or write ".join([", ".join(by_task), ", or ".join(spec.sections[0] for spec in by_sections)])
    problem = f"{task!r} is not one of {options}.{did_you_mean(str(task), by_task)}"
    if "task" not in document.data:
        problem = f"missing; one of {options}"
    raise ConfigErrors(document.path, [document.error(("task",), problem)])


def _count_sections(document: Document, spec: TrainingSpec) -> tuple[int, int]:
    """How many keys of a file are sections of a training, and how many are or nearly are."""
    keys = [str(key) for key in document.data]
    return sum(key in spec.sections for key in keys), sum(nearest(key, spec.sections) is not None for key in keys)


def validate(files: Iterable[str | Path]) -> int:
    """Print every error of the files, one a line as FILE:LINE: KEY: MESSAGE, or that there is none; the exit code."""
    from tokensieve.config.document import ConfigErrors

    code = 0
    for file in files:
        try:
            config = load(file)
            check_files(file, config)
            notes = list(config.notes())
        except UserError as error:
            code = 2
            print("\n".join(error.lines) if isinstance(error, ConfigErrors) else error)
        else:
            print(f"{file}: ok: {_summary(config)}")
            for note in notes:
                print(f"{file}: note: {note}")
    return code


def _summary(config: Any) -> str:
    summary, search = TRAININGS[config.task].summary, config.search_settings
    if search.space:
        summary += f"; {search.n_trials} trials over {', '.join(search.space)}{'' if config.searches else ' (not turned on)'}"
    return summary


def check_files(path: str | Path, config: Training) -> None:
    """Check what the file refers to, such as data on the disk. Raises ConfigErrors with the lines that refer to it."""
    from tokensieve.config.document import ConfigErrors, Document
    from tokensieve.config.search_space import key_path

    problems = list(config.check_files())
    if problems:
        document = Document(Path(path))
        raise ConfigErrors(document.path, [document.error(key_path(key), message) for key, message in problems])
