"""The loop: killed at any moment, in one process or two, a run goes on to the same bits; what it writes; what stops it."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tests.support import toy_training as toy
from tests.support.paths import PYTHONPATH, ROOT
from tests.support.processes import Started, free_port, start_two, two_processes
from tests.support.pruning_worker import settings
from tests.support.states import same
from tokensieve import UserError, config, training
from tokensieve.files import FolderLock
from tokensieve.training import checkpoint, loop

FORK = multiprocessing.get_context("fork")
LAST = f"step-{toy.STEPS:08d}"


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """What each of the many processes would load."""
    import_module("torch.utils.tensorboard")
    torch.optim.Adam(torch.nn.Linear(1, 1).parameters())


class Job:
    """A training of the toy in processes that know of each other as torchrun's do, but need not load torch again."""

    def __init__(self, folder: Path, size: int, resume: bool = False, before: Callable[[int], Any] | None = None, **variables):
        self.folder, self.said = folder, folder.with_suffix(".stderr")
        self.size, self.port, self.variables = size, free_port(), variables
        self.processes = [FORK.Process(target=self._run, args=(rank, resume, before)) for rank in range(size)]
        for process in self.processes:
            process.start()

    def _run(self, rank: int, resume: bool, before: Callable[[int], Any] | None) -> None:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        os.dup2(os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ.update(self.variables)
        if self.size > 1:
            here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size}
            here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
            os.environ.update({name: str(value) for name, value in here.items()})
        if before is not None:
            before(rank)
        code = 1
        try:
            code = toy.main(self.folder, resume)
        except SystemExit as asked:
            code = asked.code
        finally:
            os._exit(code)

    def wait(self) -> list[int]:
        """The exit codes (negative: the signal that ended it)."""
        for process in self.processes:
            process.join(180)
            assert process.exitcode is not None, "it hangs"
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        self.wait()

    def until(self, path: Path) -> None:
        end = time.monotonic() + 180
        while not path.exists():
            assert all(process.is_alive() for process in self.processes) and time.monotonic() < end, self.said.read_text()
            time.sleep(0.002)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs that were never stopped, of one process and of two."""
    folder = tmp_path_factory.mktemp("whole")

    for size in (1, 2):
        assert Job(folder / str(size), size).wait() == [0] * size, (folder / f"{size}.stderr").read_text()
    return {size: folder / str(size) for size in (1, 2)}


def assert_same(one: Path, other: Path) -> None:
    """Every bit of what a run leaves: the last states, the best ones, the exported weights, the log, the result."""
    for name in (LAST, "best"):
        for file in ("tensors.safetensors", "state.json"):
            assert (one / "checkpoints" / name / file).read_bytes() == (other / "checkpoints" / name / file).read_bytes()
    for path in one.glob("checkpoints/**/*.pt"):
        a, b = (torch.load(folder / path.relative_to(one), weights_only=True) for folder in (one, other))
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    for name in ("logs/log.jsonl", "result.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def resumed_at(folder: Path) -> int:
    """The step with which the last process began."""
    lines = [line for line in (folder / "logs" / "training.log").read_text().splitlines() if "resumed after step" in line]
    return int(lines[-1].split("after step ")[1].split()[0])


# --------------------------------------------------------------------------------------------------- killed and resumed


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("jitter", [0.0, 0.02])
def test_killed_after_a_checkpoint_it_goes_on_to_the_same_bits(tmp_path, whole, size, jitter):
    run, rng = tmp_path / "run", random.Random(jitter)
    for step in (3, 6):
        job = Job(run, size, resume=step > 3, TOY_SLEEP="0.02", TOY_HOLD="/nowhere")
        job.until(run / "checkpoints" / f"step-{step:08d}")
        time.sleep(jitter * (1 + rng.random()))
        job.kill()
    assert Job(run, size, resume=True).wait() == [0] * size, (tmp_path / "run.stderr").read_text()
    assert 0 < resumed_at(run) < toy.STEPS
    assert_same(whole[size], run)


# Each time of saving calls fsync 7 times: for two exported files, three files, the folder, and the folder above.
MOMENTS = {"the first best": 10, "exported weights": 16, "a checkpoint": 20, "the second best, in its place": 28}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_while_it_saves(tmp_path, whole, size, moment):
    """Process 0 dies between two writes; the others notice, and all goes on from the checkpoint before."""

    def fragile(rank: int) -> None:
        real, calls = checkpoint._sync, []

        def sync(path: Path) -> None:
            calls.append(path)
            if rank == 0 and len(calls) == MOMENTS[moment]:
                os.kill(os.getpid(), signal.SIGKILL)
            real(path)

        checkpoint._sync = sync

    run = tmp_path / "run"
    codes = Job(run, size, before=fragile).wait()
    assert codes[0] == -signal.SIGKILL and 0 not in codes
    assert Job(run, size, resume=True).wait() == [0] * size, (tmp_path / "run.stderr").read_text()
    assert resumed_at(run) == (6 if MOMENTS[moment] > 21 else 3)
    assert_same(whole[size], run)


@pytest.mark.parametrize("size", [1, 2])
def test_told_to_stop_all_save_and_exit_and_go_on_to_the_same_bits(tmp_path, whole, size):
    run = tmp_path / "run"
    job = Job(run, size, TOY_SLEEP="0.05", TOY_HOLD=str(tmp_path / "told"))
    job.until(run / "checkpoints" / "step-00000003")
    os.kill(job.processes[-1].pid, signal.SIGTERM)  # to one of them
    (tmp_path / "told").touch()
    assert job.wait() == [143] * size
    said = job.said.read_text()
    found, broken = checkpoint.latest(run / "checkpoints")
    assert found is not None and found.step > 3 and not broken
    assert str(found.folder) in said and "--resume" in said and "Traceback" not in said
    assert Job(run, size, resume=True).wait() == [0] * size
    assert resumed_at(run) == found.step
    assert_same(whole[size], run)


def test_evaluating_does_not_change_what_is_learned(tmp_path, whole):
    training.run(toy.config(evaluate_every=None, checkpoint_every=5), output=tmp_path / "run", quiet=True)
    once, often = (checkpoint.latest(run / "checkpoints")[0] for run in (tmp_path / "run", whole[1]))
    assert all(torch.equal(once.state["learner"]["maker"][name], w) for name, w in often.state["learner"]["maker"].items())


def test_a_run_goes_back_to_a_step_and_on_to_the_same_bits(tmp_path, whole):
    run = tmp_path / "run"
    training.run(toy.config(keep_checkpoints="all"), output=run, quiet=True)
    assert {path.name for path in run.glob("checkpoints/step-*")} == {f"step-{step:08d}" for step in (3, 6, 9, 12)}
    training.run(toy.config(keep_checkpoints="all"), resume=6, output=run, quiet=True)
    assert resumed_at(run) == 6
    assert_same(whole[1], run)
    with pytest.raises(UserError, match="has no checkpoint of step 7; there are those of the steps 3, 6, 9, 12"):
        training.run(toy.config(), resume=7, output=run, quiet=True)


def test_a_run_is_resumed_with_as_many_processes(tmp_path, whole):
    with pytest.raises(UserError, match="started with 2 processes and this is 1; resume it with 2"):
        training.run(toy.config(), resume=True, output=whole[2], quiet=True)


def test_the_layout_of_older_runs_is_resumed(tmp_path, whole):
    run = tmp_path / "run"
    loop.train(toy.ToyLearner(toy.config()), run, steps=6, checkpoint_every=3, quiet=True)
    found, _ = checkpoint.latest(run / "checkpoints")
    old = {"learner": found.state["learner"], "generators": found.state["generators"][0]}
    checkpoint.save(tmp_path / "old", 6, old)
    (run / "logs" / "log.jsonl").rename(tmp_path / "old" / "log.jsonl")
    with pytest.raises(UserError, match="holds a run already"):
        training.run(toy.config(), output=tmp_path / "old", quiet=True)
    training.run(toy.config(), resume=True, output=tmp_path / "old", quiet=True)
    final = "checkpoints/" + LAST + "/tensors.safetensors"
    assert (tmp_path / "old" / final).read_bytes() == (whole[1] / final).read_bytes()
    losses = [row for row in (whole[1] / "logs/log.jsonl").read_text().splitlines() if "evaluation" not in row]
    mended = [row for row in (tmp_path / "old/logs/log.jsonl").read_text().splitlines() if "evaluation" not in row]
    assert mended == losses and not list((tmp_path / "old").glob("step-*"))


def test_the_checkpoint_of_another_training_is_named(tmp_path):
    loop.train(Stub([1.0, 1.0]), tmp_path, steps=1, checkpoint_every=1, quiet=True)
    with pytest.raises(UserError, match=r"step-00000001 is of another training, or of another version \(KeyError"):
        training.run(toy.config(), resume=True, output=tmp_path, quiet=True)
    for state in ({}, {"generators": [3], "learner": {}}, {"generators": [], "learner": {}}, {"generators": 3}):
        checkpoint.save(tmp_path / "checkpoints", 1, state)
        with pytest.raises(UserError, match=r"another training|processes"):
            loop.train(Stub([1.0, 1.0]), tmp_path, steps=2, checkpoint_every=1, resume=True, quiet=True)


def test_a_damaged_log_does_not_end_a_resumed_run(tmp_path):
    loop.train(Stub([1.0, 2.0, 3.0]), tmp_path, steps=2, checkpoint_every=1, quiet=True)
    log = tmp_path / "logs" / "log.jsonl"
    rows = log.read_bytes()
    log.write_bytes(b'3\n{}\n[1]\n{"step": "x"}\n\xff\xfe\n' + b"[" * 100_000 + b"\n" + rows + b'{"step": 1')
    loop.train(Stub([1.0, 2.0, 3.0]), tmp_path, steps=3, checkpoint_every=1, resume=True, quiet=True)
    assert [json.loads(row)["step"] for row in log.read_text().splitlines()] == [0, 1, 2]


# ------------------------------------------------------------------------------------------------------ what is written


def test_the_last_two_and_the_best_are_kept_as_plain_state_dicts_too(whole):
    folder = whole[1] / "checkpoints"
    names = {path.name for path in folder.iterdir()}
    assert names == {"step-00000009", LAST, "best"} | {f"{part}_step_{n}.pt" for part in ("maker", "critic") for n in (9, 12)}
    rows = [json.loads(row) for row in (whole[1] / "logs" / "log.jsonl").read_text().splitlines()]
    measured = {row["step"] + 1: row["evaluation"]["distance"] for row in rows if "evaluation" in row}
    assert list(measured) == [4, 8, 12]
    best = min(measured, key=measured.__getitem__)
    found = checkpoint.load(folder / "best")
    assert found.step == best and found.state["progress"]["best"] == measured[best]
    plain = torch.load(folder / "best" / f"maker_step_{best}.pt", weights_only=True)
    assert all(torch.equal(value, plain[name]) for name, value in found.state["learner"]["maker"].items())
    assert json.loads((whole[1] / "result.json").read_text()) == {"distance": measured[12], "seen": 12}


def test_the_losses_of_two_processes_are_their_mean_and_their_generators_are_both_kept(whole):
    found, _ = checkpoint.latest(whole[2] / "checkpoints")
    one, two = (state["torch"] for state in found.state["generators"])
    assert not torch.equal(one, two)
    first = json.loads((whole[2] / "logs" / "log.jsonl").read_text().splitlines()[0])
    alone = json.loads((whole[1] / "logs" / "log.jsonl").read_text().splitlines()[0])
    assert first["maker"] != alone["maker"]  # process 0 has drawn the same as the only one


def curves(run: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "logs" / "tensorboard"))
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_curves_of_a_resumed_run_are_those_of_one_that_was_not_stopped(tmp_path, whole):
    run = tmp_path / "run"
    job = Job(run, 1, TOY_SLEEP="0.02", TOY_HOLD=str(tmp_path / "told"))
    job.until(run / "checkpoints" / "step-00000003")
    time.sleep(0.05)  # beyond it, so that something is drawn twice
    os.kill(job.processes[0].pid, signal.SIGTERM)
    (tmp_path / "told").touch()
    job.wait()
    found, _ = checkpoint.latest(run / "checkpoints")
    for path in (found.folder / "manifest.json", *run.glob(f"checkpoints/*_step_{found.step}.pt")):
        path.unlink()  # now the newest good one is older than the curves
    assert Job(run, 1, resume=True).wait() == [0]
    assert 0 < resumed_at(run) < found.step
    drawn = curves(run)
    assert drawn == curves(whole[1])
    assert set(drawn) == {"train/maker", "train/critic", "evaluation/distance", "evaluation/seen"}
    assert [step for step, _ in drawn["train/maker"]] == list(range(1, toy.STEPS + 1))
    assert [step for step, _ in drawn["evaluation/distance"]] == [4, 8, 12]


def test_the_text_log_tells_losses_evaluations_and_where_checkpoints_are(whole):
    text = (whole[1] / "logs" / "training.log").read_text()
    assert "started, 12 steps" in text and "step 7/12  maker " in text and "evaluation after step 8\n    distance  " in text
    assert f"checkpoint in {whole[1] / 'checkpoints' / LAST}" in text and "the best distance so far" in text


class Stub:
    """A learner of nothing, that returns the losses it was given."""

    def __init__(self, losses: list[float], **more: Any) -> None:
        self.losses = losses
        vars(self).update(more)

    def step(self, index: int) -> dict[str, float]:
        return {"loss": self.losses[index]}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


def test_without_an_evaluation_the_lowest_mean_loss_is_best(tmp_path):
    losses = [5.0, 5.0, 1.0, 2.0, 9.0, 0.0]
    learner = Stub(losses, monitor=("loss", "min"))
    loop.train(learner, tmp_path, steps=3, checkpoint_every=2, quiet=True)
    assert checkpoint.load(tmp_path / "checkpoints" / "best").step == 3
    loop.train(learner, tmp_path / "b", steps=6, checkpoint_every=2, quiet=True)
    assert checkpoint.load(tmp_path / "b" / "checkpoints" / "best").step == 4


@pytest.mark.parametrize("direction, best", [("max", 2), ("min", 3)])
def test_the_best_is_the_first_of_the_best_and_what_is_not_finite_never_is(tmp_path, direction, best):
    numbers = [0.3, 0.5, 0.1, 0.5, float("nan"), 0.1]
    learner = Stub([1.0] * 6, monitor=("acc", direction), evaluate=lambda done: {"acc": numbers[done - 1]})
    last = loop.train(learner, tmp_path, steps=6, checkpoint_every=6, evaluate_every=1, quiet=True)
    assert checkpoint.load(tmp_path / "checkpoints" / "best").step == best and last == {"acc": 0.1}


def test_of_equally_good_steps_the_tie_breaker_decides_also_after_a_restart(tmp_path):
    measured = [(0.5, 2.0), (0.5, 1.0), (0.4, 0.1), (0.5, 1.5), (0.5, None), (0.5, 0.9)]
    learner = Stub([1.0] * 6, monitor=("acc", "max"), tie_breaker=("loss", "min"))
    learner.evaluate = lambda done: dict(zip(("acc", "loss"), measured[done - 1], strict=True))
    for steps, best in ((4, 2), (5, 2), (6, 6)):
        loop.train(learner, tmp_path, steps=steps, checkpoint_every=1, evaluate_every=1, resume=steps > 4, quiet=True)
        assert checkpoint.load(tmp_path / "checkpoints" / "best").step == best


def test_losses_are_logged_by_their_groups_and_the_learner_introduces_itself(tmp_path, capsys):
    learner = Stub([0.25], loss_groups={"loss": "makers", "other": "critics"}, describe=lambda: ["makers: two of them"])
    learner.step = lambda index: {"loss": 0.25, "temperature": 0.5}
    loop.train(learner, tmp_path, steps=1, checkpoint_every=1)
    text = (tmp_path / "logs" / "training.log").read_text()
    assert "step 1/1  temperature 0.50000\n  makers:\n    - loss: 0.25000\n" in text and "critics" not in text
    assert text.splitlines()[1].endswith("makers: two of them") and "makers: two of them\n" in capsys.readouterr().err
    assert set(curves(tmp_path)) == {"makers/loss", "train/temperature"}
    assert json.loads((tmp_path / "logs" / "log.jsonl").read_text()) == {"step": 0, "loss": 0.25, "temperature": 0.5}


def test_a_best_folder_whose_replacement_was_not_finished_comes_back(tmp_path):
    checkpoint.save_best(tmp_path, 3, {"x": torch.ones(1)})
    (tmp_path / "best").rename(tmp_path / ".replaced-best")
    (tmp_path / ".unfinished-best").mkdir()
    checkpoint.clean_up(tmp_path)
    assert checkpoint.load(tmp_path / "best").step == 3 and [path.name for path in tmp_path.iterdir()] == ["best"]


def test_each_evaluation_is_reported_and_what_the_report_raises_ends_the_run(tmp_path):
    told: list[tuple[int, Any]] = []

    def report(step: int, numbers: Any) -> None:
        told.append((step, numbers["acc"]))
        if step == 4:
            raise InterruptedError("no promise")

    learner = Stub([1.0] * 6, evaluate=lambda done: {"acc": done / 10})
    with pytest.raises(InterruptedError, match="no promise"):
        loop.train(learner, tmp_path, steps=6, checkpoint_every=1, evaluate_every=2, quiet=True, report=report)
    assert told == [(2, 0.2), (4, 0.4)]
    found, _ = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None and found.step == 3


def test_log_every(tmp_path):
    loop.train(Stub([float(i) for i in range(7)]), tmp_path, steps=7, checkpoint_every=7, log_every=3, quiet=True)
    rows = [json.loads(row)["step"] for row in (tmp_path / "logs" / "log.jsonl").read_text().splitlines()]
    assert rows == [2, 5, 6] and [step for step, _ in curves(tmp_path)["train/loss"]] == [3, 6, 7]


# -------------------------------------------------------------------------------------------------------- what stops it


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_that_is_not_finite_in_any_process_stops_all(tmp_path, size):
    job = Job(tmp_path / "run", size, TOY_NAN="4")
    assert job.wait() == [2] * size
    said = job.said.read_text()
    good = tmp_path / "run" / "checkpoints" / "step-00000003"
    assert f"step 4: a loss is not finite{' in process 1' if size == 2 else ''} (maker nan" in said
    assert f"the last good checkpoint is {good};" in said and checkpoint.load(good).step == 3
    assert "a loss is not finite" in (tmp_path / "run" / "logs" / "training.log").read_text()


def test_a_model_that_finds_nan_itself_is_told_of_with_the_last_good_checkpoint(tmp_path, backbone):
    path = tmp_path / "pruning.yaml"
    path.write_text(yaml.safe_dump(settings(backbone, how={"checkpoint_every": 1})))
    made = config.load(path)
    how = made.trainer_settings.dl_settings
    for name in type(how.optimizers).model_fields:  # a file may not have such rates
        object.__setattr__(getattr(how.optimizers, name), "lr", 1e30)
    run = tmp_path / "run"
    with pytest.raises(UserError, match=rf"step 1: .*NaN.*last good checkpoint is {run}/checkpoints/step-00000001"):
        training.run(made, output=run, quiet=True)
    assert "step 1: " in (run / "logs/training.log").read_text()


@pytest.mark.parametrize("name", ["critic_step_7.pt", "best"])
def test_a_folder_with_weights_of_another_run_is_not_begun_in(tmp_path, name):
    other = tmp_path / "checkpoints" / name
    other.mkdir(parents=True)
    with pytest.raises(UserError, match="holds a run already"):
        loop.train(Stub([1.0]), tmp_path, steps=1, checkpoint_every=1, quiet=True)


@pytest.mark.parametrize("size", [1, 2])
def test_a_full_disk_ends_all_and_keeps_the_checkpoint_before(tmp_path, whole, size):
    state = whole[size] / "checkpoints" / LAST / "tensors.safetensors"

    def small(rank: int) -> None:
        real = checkpoint.save

        def save(run: Path, step: int, *rest: Any, **options: Any) -> Path:
            if step > 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (state.stat().st_size - 100,) * 2)
            return real(run, step, *rest, **options)

        checkpoint.save = save

    job = Job(tmp_path / "run", size, before=small)
    codes = job.wait()
    said = job.said.read_text()
    assert codes == [2] * size and "step 6: no checkpoint could be written" in said and "step-00000003, is intact" in said
    assert Job(tmp_path / "run", size, resume=True).wait() == [0] * size
    assert_same(whole[size], tmp_path / "run")


def test_when_a_process_dies_the_others_end(tmp_path):
    job = Job(tmp_path / "run", 2, TOY_SLEEP="0.05")
    job.until(tmp_path / "run" / "checkpoints" / "step-00000003")
    job.processes[1].kill()
    codes = job.wait()
    assert codes[1] == -signal.SIGKILL and codes[0] == 1
    assert checkpoint.latest(tmp_path / "run" / "checkpoints")[0] is not None


def test_fewer_processes_than_were_started_is_an_error(monkeypatch, tmp_path):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="runs in one process, but the launcher started 2"):
        loop.train(Stub([1.0]), tmp_path, steps=1, checkpoint_every=1, quiet=True)
    alone = SimpleNamespace(process_index=0, num_processes=1, local_process_index=0)
    with pytest.raises(UserError, match="started 2 processes, but they run as 1; use torchrun --nproc_per_node 2 -m"):
        loop.train(Stub([1.0], accelerator=alone), tmp_path, steps=1, checkpoint_every=1, quiet=True)
    assert not list(tmp_path.iterdir())


def test_a_second_training_in_the_same_folder_is_refused(tmp_path, backbone):
    path = tmp_path / "pruning.yaml"
    path.write_text(yaml.safe_dump(settings(backbone)))
    held = FORK.Event()

    def hold() -> None:
        FolderLock(tmp_path / "run", "a training").acquire()
        held.set()
        time.sleep(600)

    other = FORK.Process(target=hold)
    other.start()
    try:
        assert held.wait(60)
        with pytest.raises(UserError, match=rf"a training already runs in {tmp_path}/run \(process {other.pid} "):
            training.run(path, output=tmp_path / "run", quiet=True)
    finally:
        other.kill()
        other.join()
    assert [file.name for file in (tmp_path / "run").iterdir()] == [".lock"]


# ------------------------------------------------------------------------------------------------------- real launchers


def launch(words: list[str], **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH} | variables
    return subprocess.Popen(
        [sys.executable, "-m", *words], env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def torchrun(*words: str, **variables: str) -> subprocess.Popen[str]:
    there = ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    return launch([*there, *words], **variables)


def wait_for(path: Path, process: subprocess.Popen[str] | Started) -> None:
    end = time.monotonic() + 300
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)


def ranks_of(run: Path) -> list[int]:
    """The processes of the toy that write to this folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if str(run).encode() in words and not any(b"torch.distributed.run" in word for word in words):
            found.append(int(place.name))
    return found


@pytest.mark.slow
def test_torchrun_killed_whole_and_resumed(tmp_path, whole):
    run = tmp_path / "run"
    process = torchrun("tests/support/toy_training.py", str(run), TOY_SLEEP="0.1", TOY_HOLD="/nowhere")
    wait_for(run / "checkpoints" / "step-00000003", process)
    for rank in ranks_of(run):
        os.kill(rank, signal.SIGKILL)
    process.communicate(timeout=300)
    assert process.returncode != 0
    process = torchrun("tests/support/toy_training.py", str(run), "--resume")
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert 0 < resumed_at(run) < toy.STEPS and "Traceback" not in said
    assert_same(whole[2], run)


@pytest.mark.slow
def test_the_pruners_of_a_vlm_trained_by_two_processes_killed_and_resumed(tmp_path, backbone):
    ends = []
    for name in ("whole", "killed"):
        run = tmp_path / name
        path = tmp_path / f"{name}.yaml"
        how = {"batch_size": 2, "max_steps": 9, "epochs": 3, "threads": 1, "num_workers": 1, "evaluate_every": 4}
        path.write_text(yaml.safe_dump(settings(backbone, run, how=how)))
        command = ["-m", "tokensieve", "train", str(path), "--output", str(run), "--quiet"]
        if name == "killed":
            ranks = start_two(command, tmp_path)
            wait_for(run / "checkpoints" / "step-00000003", ranks[0])
            for rank in ranks:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
            command = [*command, "--resume"]
        done = two_processes(command, tmp_path)
        assert done.returncode == 0, done.stderr
        found, _ = checkpoint.latest(run / "checkpoints")
        ends.append(found.state["learner"] | {"seconds": 0})
        result = json.loads((run / "result.json").read_text())
        ends[-1]["accuracies"] = {key: value for key, value in result.items() if key.startswith("accuracy")}
    assert 0 < resumed_at(run) < found.step == 9
    assert same(*ends)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGINT])
def test_torchrun_leaves_no_orphans(tmp_path, how):
    """A process that is killed or no longer answers ends the job; Ctrl-C saves and ends it."""
    run = tmp_path / "run"
    process = torchrun("tests/support/toy_training.py", str(run), TOY_SLEEP="0.1", TOY_STEPS="10000", TOY_TIMEOUT="10")
    wait_for(run / "checkpoints" / "step-00000003", process)
    before = ranks_of(run)
    assert len(before) == 2
    os.kill(process.pid if how == signal.SIGINT else max(before), how)
    _, said = process.communicate(timeout=300)
    assert process.returncode != 0 and not ranks_of(run)
    found, broken = checkpoint.latest(run / "checkpoints")
    assert found is not None and not broken
    if how == signal.SIGINT:
        assert "continue with --resume" in said


@pytest.mark.slow
def test_a_launcher_that_starts_one_process_silently_is_told(tmp_path):
    words = ["--cpu", "--num_processes", "2", "-m", "tokensieve", "train", "configs/embedded_clip.yaml"]
    process = launch(["accelerate.commands.launch", *words, "--output", str(tmp_path / "run")])
    _, said = process.communicate(timeout=300)
    assert process.returncode != 0 and "accelerate launch was asked for several processes and started one" in said
    assert "torchrun --nproc_per_node" in said and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "variables, fine",
    [
        ({}, True),
        ({"MASTER_ADDR": "a"}, True),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, True),  # accelerate launch --num_processes 1
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "a"}, False),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "a", "RANK": "0", "WORLD_SIZE": "2"}, True),
    ],
)
def test_launchers(variables, fine):
    if fine:
        training.check_launcher(variables)
    else:
        with pytest.raises(UserError, match="started one"):
            training.check_launcher(variables)


@pytest.mark.slow
def test_a_training_for_one_process_refuses_two(tmp_path):
    process = torchrun("-m", "tokensieve", "train", "configs/learned_selector.yaml", "--output", str(tmp_path / "run"))
    _, said = process.communicate(timeout=300)
    assert process.returncode != 0 and "this training runs in one process, but the launcher started 2" in said
    assert not (tmp_path / "run").exists()
