"""Several processes give the numbers of one, exactly; one that dies or hangs ends the job."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.processes import free_port, one_process, python, torchrun, two_processes
from tokensieve.distributed import Processes, _first_host, from_environment
from tokensieve.errors import UserError


def test_torchrun_is_noticed() -> None:
    assert from_environment({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == Processes(1, 4, 1)


def test_a_step_of_slurm_is_noticed_and_a_batch_script_is_not() -> None:
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
    assert from_environment(script) == Processes()
    step = script | {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "6"}
    assert from_environment(step) == Processes(5, 6, 1)


def test_other_launchers_are_believed_when_asked() -> None:
    mpi = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert from_environment(mpi) == Processes()
    assert from_environment(mpi, distributed=True) == Processes(2, 3, 0)
    assert from_environment({}, distributed=True) == Processes()


@pytest.mark.parametrize("variables", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_nonsense_from_the_launcher_is_an_error(variables: dict[str, str]) -> None:
    with pytest.raises(UserError):
        from_environment(variables)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node[03-07,11],gpu2", "node03"), ("gpu2,gpu5", "gpu2"), ("single", "single"), ("a-b[1,4]", "a-b1")],
)
def test_the_first_host_of_a_list(hosts: str, first: str) -> None:
    assert _first_host({"SLURM_STEP_NODELIST": hosts}) == first


def test_alone_everything_stays_here() -> None:
    here = Processes()
    assert here.gather(3) == [3] and here.broadcast("x") == "x" and here.is_main
    with here.main_first():
        pass


SCRIPT = """
import os, sys, time
import open_clip
import torch
torch.set_num_threads(1)
open_clip.add_model_config({config!r})
from tokensieve.cli import main
from tokensieve.distributed import Processes
fault, gather = os.environ.get("FAULT"), Processes.gather
def faulty(processes, value):
    if processes.rank == 1:
        if fault == "die":
            os._exit(7)
        time.sleep(600)
    return gather(processes, value)
if fault:
    Processes.gather = faulty
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def command(tiny_clip: SimpleNamespace, tmp_path: Path) -> list[str]:
    config = str(Path(tiny_clip.weights).parent / f"{tiny_clip.name}.json")
    (tmp_path / "run.py").write_text(SCRIPT.format(config=config))
    return [str(tmp_path / "run.py"), "eval", "--quiet", "--model", tiny_clip.name, "--pretrained", tiny_clip.weights]


def numbers(folder: Path) -> dict[str, tuple[Any, ...]]:
    """What must not depend on the number of processes, by file name."""
    read = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {
        name: (row["metrics"], row["reduction"]["layers"], row["run"]["n_samples"], row["run"]["n_skipped"], row["run"]["key"])
        for name, row in read.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("data", ["stream", "folder"])
def test_two_processes_give_the_numbers_of_one(
    command: list[str], shards: Path, faces: Path, tmp_path: Path, data: str
) -> None:
    named = ["--dataset", "wds/c", "--dataset_root", str(shards)] if data == "stream" else []
    named = named or ["--dataset", "fer2013", "--dataset_root", str(faces)]
    plans = ["--plan", "none", "--compare", "random:6", "anchor(k=2,m=4,rest=merge)", "--batch_size", "4", "--num_workers", "1"]
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    first = one_process([*command, *named, *plans, "--output", f"{one}/"], tmp_path)
    assert first.returncode == 0, first.stderr
    second = two_processes([*command, *named, *plans, "--output", f"{two}/", "--save_clf", f"{two}/classifier.pt"], tmp_path)
    assert second.returncode == 0, second.stderr
    assert len(numbers(one)) == 3
    assert numbers(two) == numbers(one)
    processes = {json.loads(path.read_text())["run"]["processes"] for path in two.glob("*.json")}
    assert processes == {2}
    assert (two / "classifier.pt").is_file() and not list(two.glob("*.1"))  # one process wrote, once


@pytest.mark.slow
def test_torchrun_with_the_module_on_the_embedded_data(tmp_path: Path) -> None:
    words = [
        "-m",
        "tokensieve",
        "eval",
        "--quiet",
        "--limit",
        "96",
        "--batch_size",
        "16",
        "--num_workers",
        "0",
        "--plan",
        "random:32",
    ]
    done = torchrun([*words, "--output", "two.json"], tmp_path)
    assert done.returncode == 0, done.stderr
    done = one_process([*words, "--output", "one.json"], tmp_path)
    assert done.returncode == 0, done.stderr
    found = numbers(tmp_path)
    assert found["one.json"] == found["two.json"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["die", "hang"])
def test_a_process_that_is_lost_ends_the_job(command: list[str], shards: Path, tmp_path: Path, fault: str) -> None:
    """Started as srun would: nobody watches over the processes but they themselves."""
    words = [*command, "--dataset", "wds/c", "--dataset_root", str(shards), "--num_workers", "0", "--timeout", "20"]
    shared = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(free_port()), "MASTER_PORT": str(free_port()), "FAULT": fault}
    ranks = [python(words, tmp_path, SLURM_PROCID=str(rank), **shared) for rank in (0, 1)]
    started = time.monotonic()
    try:
        code, said = ranks[0].wait(), ranks[0].said
    finally:
        ranks[1].process.kill()
    assert code == 1, said
    assert "another process of this job ended or did not answer in time" in said and "Traceback" not in said
    assert time.monotonic() - started < 300  # it sleeps for 600
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.slow
def test_a_process_that_dies_under_torchrun_ends_the_job(command: list[str], shards: Path, tmp_path: Path) -> None:
    done = torchrun(
        [*command, "--dataset", "wds/c", "--dataset_root", str(shards), "--num_workers", "0"], tmp_path, FAULT="die"
    )
    assert done.returncode != 0
    assert not list(tmp_path.glob("*.json"))
