"""Curves on Weights & Biases, with a module that stands in for it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import accelerate  # noqa: F401  # before there is a module that stands in for wandb, for which it would look
import pytest

from tests.support.toy_training import STEPS, config
from tokensieve import training
from tokensieve.errors import UserError


class Run:
    def __init__(self, **options: Any) -> None:
        self.options, self.rows, self.ended = options, [], None

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.rows.append((step, numbers))

    def finish(self, exit_code: int) -> None:
        self.ended = exit_code


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    made: list[Run] = []

    def init(**options: Any) -> Run:
        made.append(Run(**options))
        return made[-1]

    stub = ModuleType("wandb")
    vars(stub).update(init=init, Settings=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    return made


def toy(**values: object) -> SimpleNamespace:
    made = config(**values)
    made.model_dump = lambda mode: {"task": "toy"}
    return made


def test_losses_and_evaluations_are_drawn(runs: list[Run], tmp_path: Path) -> None:
    training.run(toy(), output=tmp_path / "first", quiet=True, wandb="project", group="study")
    (run,) = runs
    assert (run.options["project"], run.options["group"], run.options["name"]) == ("project", "study", "first")
    assert run.options["config"] == {"task": "toy"} and run.ended == 0
    steps = [step for step, numbers in run.rows if any(name.startswith("train/") for name in numbers)]
    assert steps == list(range(1, STEPS + 1))
    assert any(name.startswith("evaluation/") for _, numbers in run.rows for name in numbers)


def test_a_resumed_run_goes_on_with_its_curves(runs: list[Run], tmp_path: Path) -> None:
    for resume in (False, True):
        training.run(toy(), resume, output=tmp_path / "run", quiet=True, wandb="project")
    training.run(toy(), output=tmp_path / "other", quiet=True, wandb="project")
    first, again, other = (run.options["id"] for run in runs)
    assert first == again != other


def test_a_run_that_cannot_start_has_no_curves(runs: list[Run], tmp_path: Path) -> None:
    training.run(toy(), output=tmp_path, quiet=True)
    with pytest.raises(UserError, match="holds a run already"):
        training.run(toy(), output=tmp_path, quiet=True, wandb="project")
    assert not runs


def test_what_it_refuses_is_one_line(runs: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> Run:
        raise RuntimeError("no API key\nconfigured")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(UserError, match=r"--wandb: .*no API key configured.*WANDB_MODE=offline") as told:
        training.run(toy(), output=tmp_path, quiet=True, wandb="project")
    assert "\n" not in str(told.value)


def test_without_the_package_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r'pip install "tokensieve\[wandb\]"'):
        training.run(toy(), output=tmp_path, quiet=True, wandb="project")
    assert not list(tmp_path.iterdir())
