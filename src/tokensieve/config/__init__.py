"""The YAML files as typed models: every error is told at once, an unknown key with the nearest allowed one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokensieve.config import explain
from tokensieve.config.captions import CaptionTraining
from tokensieve.config.clip import ClipTraining
from tokensieve.config.document import ConfigErrors, Document
from tokensieve.config.learned_selector import SelectorTraining
from tokensieve.config.llava import LlavaTraining
from tokensieve.config.schema import Training
from tokensieve.config.search_space import check_space, key_path
from tokensieve.errors import UserError, did_you_mean, nearest

TASKS: dict[str, type[Training]] = {
    "clip": ClipTraining,
    "captions": CaptionTraining,
    "llava": LlavaTraining,
    "learned_selector": SelectorTraining,
}
# Sections by which a file is known that has no `task:`, those of S4 and those of S5.
PRUNING = ("method_settings", "trainer_settings", "dataset_settings", "backbone_settings")
REID = ("MODEL", "INPUT", "DATASETS", "DATALOADER", "SOLVER", "TEST")


def load(path: str | Path) -> Any:
    """Read and check a training file: a section of its task. Raises UserError, in one line, with every error in it."""
    document = Document(Path(path))
    schema = schema_of(document)
    return explain.check_document(document, schema, [*document.doubles, *check_space(document, schema)])


def schema_of(document: Document) -> type[Training]:
    """The type of a file: its task's, or, if it has the sections of S4 or S5, that of a pruning or a re-identification."""
    task = document.data.get("task")
    if task in TASKS:
        return TASKS[task]
    if task is None and any(nearest(str(key), REID) for key in document.data):
        from tokensieve.reid.config import ReidTraining

        return ReidTraining
    if task is None and any(nearest(str(key), PRUNING) for key in document.data):
        from tokensieve.config.pruning import PruningTraining

        return PruningTraining
    options = f"{', '.join(TASKS)}; or write method_settings, or MODEL"
    if "task" not in document.data:
        raise ConfigErrors(document.path, [document.error(("task",), f"missing; one of {options}")])
    wrong = f"{task!r} is not one of {options}.{did_you_mean(str(task), TASKS)}"
    raise ConfigErrors(document.path, [document.error(("task",), wrong)])


def validate(files: Iterable[str | Path]) -> int:
    """Print every error of the files, one a line as FILE:LINE: KEY: MESSAGE, or that there is none; the exit code."""
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


def _summary(config: Training) -> str:
    about = (type(config).__doc__ or "").split("`: ")[-1].removesuffix(".")
    search = config.search_settings
    if search.space:
        about += f"; {search.n_trials} trials over {', '.join(search.space)}{'' if config.searches else ' (not turned on)'}"
    return about


def check_files(path: str | Path, config: Training) -> None:
    """Mistakes for what is wrong outside the file, with the lines that name it."""
    wrong = list(config.check_files())
    if wrong:
        document = Document(Path(path))
        raise ConfigErrors(document.path, [document.error(key_path(key), told) for key, told in wrong])
