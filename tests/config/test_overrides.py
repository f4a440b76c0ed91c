"""Keys of a file on the command line: read and checked like the file, by train, validate and search alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokensieve import config
from tokensieve.cli import main
from tokensieve.cli.overrides import read_overrides, split_files
from tokensieve.errors import UserError

TEXT = """task: clip
output: out
phases:
  - {steps: 300, batch: 4, canvas: 56}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "file.yaml"
    path.write_text(TEXT)
    return str(path)


def test_words_are_values_by_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_overrides(["a.b=1", "c", "2", "d=", "e=x=y", "f", "plan=cover(k=1)"]) == {
        "a.b": "1",
        "c": "2",
        "d": "",
        "e": "x=y",
        "f": "plan=cover(k=1)",
    }
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.yaml").touch()
    assert split_files(["one.yaml", "x=1", "a=b.yaml", "./y=2.yaml"]) == (["one.yaml", "a=b.yaml", "./y=2.yaml"], {"x": "1"})
    with pytest.raises(UserError, match="a is given twice, with 1 and with 2"):
        read_overrides(["a=1", "a=2"])
    with pytest.raises(UserError, match="b has no value; after the file comes KEY=VALUE"):
        read_overrides(["a=1", "b"])


def test_values_have_the_types_of_the_file(file: str) -> None:
    made = config.load(file, read_overrides(["optimizer.lr=1e-3", "phases.0.steps=500", "evaluate=no", "threads=null"]))
    assert (made.optimizer.lr, made.phases[0].steps, made.evaluate, made.threads) == (1e-3, 500, False, None)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("optimizer.rl=1", "optimizer.rl (command line): unknown key; allowed are lr, floor, warmup, weight_decay, clip."),
        ("optimzer.lr=1", "optimzer (command line): unknown key"),
        ("phases.0.stpes=1", "phases.0.stpes (command line): unknown key; allowed are steps, "),
        ("optimizer.lr=fast", "optimizer.lr (command line): "),
        ("phases.0.steps=-1", "phases.0.steps (command line): "),
        ("phases.0.canvas=57", "phases.0.canvas (command line): "),
        ("phases.9.steps=1", "phases.9.steps: "),
        ("seed=[1", "seed (command line): "),
        ("task=clap", "task (command line): 'clap' is not one of"),
    ],
)
def test_mistakes_name_the_key_of_the_command_line(file: str, word: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", file, word]) == 2
    assert says in capsys.readouterr().out
    for command in ("train", "search"):
        assert main([command, file, word, "--quiet"]) == 2
        said = capsys.readouterr().err
        assert says in said and said.count("\n") == 1 and f"line 1: {says}" not in said
    assert not Path("out").exists()


def test_a_near_key_is_suggested(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    for word, near in (("optimzer.lr=1", "optimizer"), ("phases.0.stpes=1", "steps"), ("optimizer.warmpu=1", "warmup")):
        assert main(["validate", file, word]) == 2
        assert f"Did you mean {near!r}?" in capsys.readouterr().out
    assert main(["validate", file, "budget=1"]) == 2
    assert "Did you mean" not in capsys.readouterr().out


def test_validate_says_what_holds_with_the_values(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", file, "seed=3", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["file"] == file and found["errors"] == [] and found["summary"]
    assert main(["validate", file, "seed=x", "--json"]) == 2
    (found,) = json.loads(capsys.readouterr().out)
    assert len(found["errors"]) == 1 and "seed (command line)" in found["errors"][0]
    assert main(["validate", file, "--quiet"]) == 0 and capsys.readouterr().out == ""
    assert main(["validate", "seed=3"]) == 2 and "which FILE?" in capsys.readouterr().err


def test_trials_of_a_search_have_the_values(file: str, tmp_path: Path) -> None:
    from tokensieve.search.workers import Searching

    Path(file).write_text(TEXT + "search_settings: {space: {optimizer.lr: {low: 1e-4, high: 1e-2}}}\n")
    searching = Searching(file, tmp_path / "out", True, {"seed": "7", "phases.0.steps": "400"})
    assert searching.data["seed"] == 7 and searching.data["phases"][0]["steps"] == 400 and searching.name == "file"
