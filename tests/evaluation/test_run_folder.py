"""`eval --run_folder`, and where results go without it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from tests.support.evaluation import NAME, Run
from tokensieve.cli import main
from tokensieve.evaluation.run_folder import recorded

FEW = ["--limit", "4", "--batch_size", "4", "--num_workers", "0"]


def test_a_run_folder_has_results_arguments_and_what_was_printed(run: Run, tmp_path: Path) -> None:
    done = run("--plan", "random:6", "--run_folder", "runs/a", quiet=False)
    folder = tmp_path / "runs" / "a"
    assert sorted(path.name for path in folder.iterdir()) == ["arguments.yaml", f"{NAME}.json", "log.txt"]
    told = yaml.safe_load((folder / "arguments.yaml").read_text())
    assert told["arguments"]["plan"] == "random:6" and told["arguments"]["batch_size"] == 8 and told["versions"]["torch"]
    log = (folder / "log.txt").read_text()
    assert "24 -> 6" in log and "img/s" not in log and all(line in log for line in done.out.splitlines())
    run("--plan", "random:5", "--run_folder", "runs/a")
    assert (folder / "arguments-2.yaml").exists() and (folder / "log.txt").read_text().startswith(log)
    assert "give one of them" in run("--run_folder", "a", "--output", "b.json", expect=2).err


def test_without_names_one_plan_and_several_go_to_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untrained: None
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "--plan", "random:6", *FEW]) == 0
    assert main(["eval", "--plan", "none", "--compare", "random:6", *FEW]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["results"]
    assert len(list((tmp_path / "results").glob("embedded_*_zeroshot_classification*.json"))) == 3


def test_an_interrupt_is_logged(tmp_path: Path) -> None:
    args = Namespace(typed=["eval", "--limit", "4"], limit=4)
    with pytest.raises(KeyboardInterrupt), recorded(str(tmp_path), args):
        raise KeyboardInterrupt
    log = (tmp_path / "log.txt").read_text()
    assert "tokensieve eval --limit 4" in log and log.endswith("tokensieve: interrupted\n")
    assert yaml.safe_load((tmp_path / "arguments.yaml").read_text())["arguments"] == {"limit": 4}
