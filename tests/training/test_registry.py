"""Declarations of trainings: ours are complete, and one that a user's file declares is validated, trained and searched."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokensieve import cli, config, plugins
from tokensieve.config.registry import TRAININGS, TrainingSpec
from tokensieve.config.schema import Training
from tokensieve.errors import UserError
from tokensieve.registry import resolve

OURS = ("captions", "clip", "learned_selector", "llava", "llava_video", "pruning", "reid")

PLUGIN = '''
"""A line is fitted through the origin."""
from pathlib import Path
from typing import Literal

from tokensieve import files
from tokensieve.config.registry import TRAININGS, TrainingSpec
from tokensieve.config.schema import Training
from tokensieve.config.search import Objective, Search


class LineSearch(Search):
    objectives: tuple[Objective, ...] = (Objective(name="distance", direction="minimize"),)


class LineTraining(Training):
    task: Literal["line"]
    output: Path
    goal: float = 2.0
    lr: float = 0.5
    steps: int = 4
    checkpoint_every: int = 2
    threads: None = None
    search_settings: LineSearch = LineSearch()


class LineLearner:
    def __init__(self, config):
        self.config, self.slope = config, 0.0

    def step(self, index):
        self.slope += self.config.lr * (self.config.goal - self.slope)
        return {"distance": abs(self.config.goal - self.slope)}

    def evaluate(self, done):
        return {"distance": abs(self.config.goal - self.slope)}

    def state(self):
        return {"slope": self.slope}

    def restore(self, state):
        self.slope = state["slope"]


def export(learner, folder):
    files.write_json(folder / "line.json", {"slope": learner.slope})
    return {}


TRAININGS.add(
    TrainingSpec(
        "line",
        "a line learns its slope",
        schema=f"{__name__}:LineTraining",
        learner=f"{__name__}:LineLearner",
        export=f"{__name__}:export",
    )
)
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that declares the training `line`, loaded for one test."""
    assert "line" not in TRAININGS
    path = tmp_path / "line_training.py"
    path.write_text(PLUGIN)
    for owner, name in ((TRAININGS, "_declared"), (TRAININGS, "_origins"), (plugins, "_loaded"), (plugins, "_hashes")):
        monkeypatch.setattr(owner, name, dict(getattr(owner, name)))
    module = plugins.load_plugin(path)
    yield path
    del sys.modules[module.__name__]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "line.yaml"
    path.write_text(f"task: line\noutput: {tmp_path / 'run'}\nlr: 0.5\n")
    return path


@pytest.mark.parametrize("name", OURS)
def test_what_a_declaration_names_exists(name: str) -> None:
    spec = TRAININGS[name]
    schema = resolve(spec.schema)
    assert issubclass(schema, Training) and schema.output_key in schema.model_fields
    assert set(spec.sections) <= set(schema.model_fields)
    assert ("task" in schema.model_fields) != bool(spec.sections)
    assert all(callable(getattr(resolve(spec.learner), method)) for method in ("step", "state", "restore"))
    assert callable(resolve(spec.export)) and spec.summary[0].islower() and not spec.summary.endswith(".")


def test_declarations_import_no_torch_and_no_pydantic() -> None:
    heavy = "[name for name in ('torch', 'numpy', 'pydantic', 'yaml', 'PIL', 'matplotlib') if name in sys.modules]"
    code = f"import sys; from tokensieve.config.registry import TRAININGS; print(sorted(TRAININGS)); print({heavy})"
    names, loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert names == str(list(OURS)) and loaded == "[]"


def test_two_trainings_of_one_name() -> None:
    with pytest.raises(UserError, match="a training named 'clip' is registered already"):
        TRAININGS.add(TrainingSpec("clip", "", "", "", ""))


def test_a_plug_in_is_validated(plugin: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: ok: a line learns its slope\n"
    file.write_text(file.read_text().replace("lr: 0.5", "rl: 0.5"))
    assert cli.main(["validate", str(file)]) == 2
    assert f"{file}:3: rl: unknown key; allowed are" in capsys.readouterr().out
    file.write_text("task: lin\n")
    assert cli.main(["validate", str(file)]) == 2
    assert "Did you mean 'line'?" in capsys.readouterr().out


def test_a_plug_in_is_trained_and_resumed(plugin: Path, file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli.main(["train", str(file), "--quiet"]) == 0
    assert json.loads((run / "line.json").read_text()) == {"slope": 1.875}
    assert json.loads((run / "result.json").read_text())["distance"] == pytest.approx(0.125)
    file.write_text(file.read_text() + "steps: 5\n")
    assert cli.main(["train", str(file), "--quiet", "--resume"]) == 0
    assert json.loads((run / "line.json").read_text()) == {"slope": 1.9375}


@pytest.mark.slow
def test_a_plug_in_is_searched_by_processes_that_load_it(plugin: Path, file: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    space = "{lr: {choices: [0.25, 0.5]}}"
    file.write_text(file.read_text() + f"search_settings: {{enable: true, n_trials: 2, space: {space}}}\n")
    assert cli.main(["train", str(file), "--quiet"]) == 0
    best = config.load(tmp_path / "run" / "best.yaml")
    assert best.task == "line" and not best.searches
    assert len((tmp_path / "run" / "trials.csv").read_text().splitlines()) == 3
