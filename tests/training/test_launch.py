"""The processes that a file asks for: how many, on which GPUs, and what is said where they are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

from tests.support.paths import PYTHONPATH
from tests.support.pruning_worker import settings
from tokensieve.cli import main
from tokensieve.config.search import Manager
from tokensieve.training import checkpoint, launch


@pytest.mark.parametrize(
    "manager, gpus, chosen, note",
    [
        ({"available_gpus": (0, 1, 2, 3), "gpus_per_subtask": 2}, "0123", "01", "training in 2 processes on GPU 0, 1"),
        ({"available_gpus": (2, 3), "gpus_per_subtask": 2}, "0123", "23", "training in 2 processes on GPU 2, 3"),
        ({"gpus_per_subtask": 2}, "01", "01", "training in 2 processes on GPU 0, 1"),
        ({"available_gpus": (1,)}, "01", "1", "training in 1 process on GPU 1"),
        (  # CUDA_VISIBLE_DEVICES=1,2,3
            {"available_gpus": (0, 1, 2, 3), "gpus_per_subtask": 4},
            "123",
            "123",
            "manager_settings.available_gpus: [3] not there; training in 3 processes on GPU 1, 2, 3",
        ),
        (
            {"available_gpus": (0, 1, 2, 3), "gpus_per_subtask": 2},
            "",
            "",
            "manager_settings.available_gpus: [0, 1, 2, 3] not there; training in one process",
        ),
    ],
)
def test_the_gpus_of_a_training(manager, gpus, chosen, note):
    assert launch.choose_gpus(Manager(**manager), list(gpus)) == launch.Choice(tuple(chosen), note)


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """The commands that would take the place of this process."""
    commands: list = []
    monkeypatch.setattr(launch, "_replace_process", commands.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("tokensieve.training.run", lambda *_, **named: commands.append(named) or tmp_path)
    return commands


def written(tmp_path, **manager):
    path = tmp_path / "file.yaml"
    made = settings("sieve-llava-8", method={"target_merge_tokens": 98}, manager_settings=manager)
    made["trainer_settings"]["dl_settings"]["device"] = None
    path.write_text(yaml.safe_dump(made))
    return str(path)


def test_the_same_command_runs_in_as_many_processes(tmp_path, launched, monkeypatch):
    path = written(tmp_path, available_gpus=[0, 1, 2, 3], gpus_per_subtask=2)
    monkeypatch.setattr(launch, "cuda_devices", lambda: ["4", "5", "6"])
    flags = ["--output", "o", "--quiet", "--resume", "3"]
    main(["train", path, "method_settings.adv_loss_weight", "0", *flags, "--data", "embedded"])
    command, _ = launched
    values = {"dataset_settings={name: embedded}", "method_settings.adv_loss_weight=0"}
    words = command[command.index("tokensieve") - 1 :]
    assert words[:4] == ["-m", "tokensieve", "train", path] and {*words[4:6]} == values and words[6:] == flags
    assert "--nproc-per-node=2" in command and os.environ["CUDA_VISIBLE_DEVICES"] == "4,5"


def test_where_nothing_is_asked_for_or_there_it_is_one_process(tmp_path, launched, monkeypatch, capsys):
    monkeypatch.setattr(launch, "cuda_devices", lambda: [])
    main(["train", written(tmp_path, available_gpus=[0, 1], gpus_per_subtask=2)])
    assert capsys.readouterr().err == "manager_settings.available_gpus: [0, 1] not there; training in one process\n"
    monkeypatch.setattr(launch, "cuda_devices", lambda: ["0", "1"])
    main(["train", written(tmp_path)])
    main(["train", written(tmp_path, gpus_per_subtask=2), "trainer_settings.dl_settings.device", "cpu"])
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    main(["train", written(tmp_path, gpus_per_subtask=2)])
    assert len(launched) == 4 and all(isinstance(one, dict) for one in launched) and not capsys.readouterr().err


def test_devices_are_those_that_cuda_sees(monkeypatch):
    import torch

    for visible, count, names in (("1,2,3", 3, ["1", "2", "3"]), ("1,2,3", 0, []), ("", 2, ["0", "1"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(torch, "cuda", SimpleNamespace(device_count=lambda count=count: count))
        assert launch.cuda_devices() == names


START = """
import sys
from tokensieve.cli import main
from tokensieve.training import launch
launch.cuda_devices = lambda: ["0", "1"]
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_two_processes_are_started_and_train(tmp_path, backbone):
    """On the CPU, since the devices that are said to be there are not."""
    run, path = tmp_path / "run", tmp_path / "file.yaml"
    manager = {"available_gpus": [0, 1, 2, 3], "gpus_per_subtask": 2}
    made = settings(backbone, run, how={"batch_size": 2, "max_steps": 1, "threads": 1}, manager_settings=manager)
    made["trainer_settings"]["dl_settings"]["device"] = None
    path.write_text(yaml.safe_dump(made))
    done = subprocess.run(
        [sys.executable, "-c", START, "train", str(path), "--quiet"],
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "available_gpus: [2, 3] not there; training in 2 processes on GPU 0, 1" in done.stderr
    saved, _ = checkpoint.latest(run / "checkpoints")
    assert len(saved.state["generators"]) == 2 and saved.state["learner"]["recipe"]["processes"] == 2
    assert json.loads((run / "result.json").read_text())["step"] == 1
