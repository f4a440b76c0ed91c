"""Signals at random moments: the command ends with their code, and the same command again gives the numbers of a whole run."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import yaml

from tests.hostile.attack import Attack
from tests.support import forked_workers, reid_worker
from tests.support.pictures import picture
from tests.support.processes import Started, python

CODES = {signal.SIGINT: (130, -signal.SIGINT), signal.SIGTERM: (143, -signal.SIGTERM), signal.SIGKILL: (-signal.SIGKILL,)}
BEGUN = ".begun"  # a file that shows that the process is ready for signals
PATIENCE = 20  # seconds; a reading process looks for its parent every five
CLIP = {
    "task": "clip",
    "output": "unused",
    "threads": 1,
    "checkpoint_every": 2,
    "evaluate": False,
    "optimizer": {"lr": 1e-3, "warmup": 2},
    "phases": [{"steps": 4, "batch": 4, "canvas": 24, "level": [0, 1]}, {"steps": 4, "batch": 4, "canvas": 56}],
}


def use_defaults() -> None:
    """Before tokensieve begins, a signal is not its business."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Path(BEGUN).touch()


@dataclass(frozen=True)
class Job:
    """A command that can be stopped and started again."""

    words: tuple[str, ...]
    again: tuple[str, ...]  # words to add when it is started again
    compare: Callable[[Path, Path], bool]  # whether two folders in which it ran have the same results
    write: Callable[[Path], object] = os.path.exists  # writes what the command reads
    prepare: Callable[[], object] = use_defaults  # called in its process


# -------------------------------------------------------------------------------------------------------------------- jobs


def eval_job(flags: str, *again: str) -> Job:
    plans = ("--plan", "none", "--compare", "anchor:60", "random:30", "--output", "out/{plan}.json")
    return Job(("eval", *flags.split(), *plans, "--limit", "12", "--batch_size", "4", "--quiet"), again, same_metrics)


def same_metrics(one: Path, other: Path) -> bool:
    kept = ("plan", "tokens_in", "tokens_out", "layers")

    def read(folder: Path) -> list[object]:
        """What a run found, each once: a run that was stopped late and started again has two files for a plan."""
        rows = [json.loads(path.read_text()) for path in sorted(folder.glob("out/*.json"))]
        found = [(row["metrics"], [row["reduction"][name] for name in kept], row["run"]["n_samples"]) for row in rows]
        return sorted({json.dumps(each) for each in found})

    return read(one) == read(other)


def train_job(write: Callable[[Path], object]) -> Job:
    return Job(("train", "file.yaml", "--output", "run", "--quiet"), ("--resume",), partial(same_training, run="run"), write)


def write_clip(workers: int, folder: Path) -> None:
    (folder / "file.yaml").write_text(yaml.safe_dump(CLIP | {"workers": workers}))


def write_reid(sections: dict[str, object], folder: Path) -> None:
    reid_worker.write_root(folder)
    made = reid_worker.settings(folder, how={"MAX_EPOCHS": 2, "EVAL_PERIOD": 1})
    (folder / "file.yaml").write_text(yaml.safe_dump(made | sections))


def same_training(one: Path, other: Path, run: str) -> bool:
    """The last state of a training, its log and what it has learned, to the bit."""
    last = max(path.name for path in (one / run / "checkpoints").glob("step-*"))
    names = [f"checkpoints/{last}/tensors.safetensors", "logs/log.jsonl"]
    names += [path.name for path in (one / run).glob("*.safetensors")]
    return all((one / run / name).read_bytes() == (other / run / name).read_bytes() for name in names)


def write_images(folder: Path) -> None:
    (folder / "images").mkdir()
    for number in range(8):
        picture(number % 6, number).save(folder / "images" / f"{number}.png")


def same_plans(one: Path, other: Path) -> bool:
    """What was measured twice has the same distances; times decide what is tried."""
    found, again = (json.loads((folder / "tune" / "tune.json").read_text()) for folder in (one, other))
    distances = {row["plan"]: row["distance"] for row in found["trials"]}
    both = [row for row in again["trials"] if row["plan"] in distances]
    return found["is_measured"] and again["is_measured"] and all(row["distance"] == distances[row["plan"]] for row in both)


def use_forked_workers() -> None:
    use_defaults()
    forked_workers.use()


def whole_search(one: Path, other: Path) -> bool:
    """Every trial is complete, and one of them is trained again to the same bits."""
    with (other / "search" / "trials.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["trial"], row["state"]) for row in rows] == [("0", "complete"), ("1", "complete")], rows
    assert (other / "search" / "best.yaml").exists()
    train = ["train", "search/trials/1/config.yaml", "--output", "again/trials/1", "--quiet"]
    process = python(["-m", "tokensieve", *train], other)
    assert process.wait() == 0, process.said
    return same_training(other / "again", other / "search", "trials/1")


SEARCH = {
    "manager_settings": {"mode": "optuna", "n_workers": 2},
    "search_settings": {
        "enable": True,
        "n_trials": 2,
        "objectives": [{"name": "mAP", "direction": "maximize"}],
        "space": {"SOLVER.BASE_LR": {"low": 1e-4, "high": 1e-2}},
    },
}
TUNE = "tune --model_type timm --model test_vit --images images --trials 4 --limit 8 --batch_size 4 --budget_minutes 0.001"
JOBS = {
    "eval": eval_job("--num_workers 0"),
    "eval with workers": eval_job("--num_workers 2"),
    "eval of what is missing": eval_job("--num_workers 1", "--skip_existing"),
    "probe": eval_job("--num_workers 0 --task linear_probe --fewshot_epochs 2 --feature_root features"),
    "train": train_job(partial(write_clip, 0)),
    "train with a worker": train_job(partial(write_clip, 1)),
    "train reid": train_job(partial(write_reid, {})),
}
LONG_JOBS = {
    "tune": Job(
        (*TUNE.split(), "--keep", "20", "--methods", "cover,grid", "--output", "tune", "--quiet"), (), same_plans, write_images
    ),
    "search": Job(
        ("search", "file.yaml", "--output", "search", "--quiet"),
        (),
        whole_search,
        partial(write_reid, SEARCH),
        use_forked_workers,
    ),
}


# ------------------------------------------------------------------------------------------------------------------- tries


def start(job: Job, folder: Path, *more: str) -> Started:
    if not any(folder.iterdir()):
        job.write(folder)
    return python(["-m", "tokensieve", *job.words, *more], folder, job.prepare)


@cache
def whole(job: Job) -> tuple[float, Path]:
    """The seconds that a job takes, and the folder in which it ran. It stays until this process ends."""
    kept = tempfile.TemporaryDirectory()
    folder = Path(kept.name)
    KEPT.append(kept)
    started = time.monotonic()
    process = start(job, folder)
    assert process.wait() == 0, process.said
    return time.monotonic() - started, folder


KEPT: list[tempfile.TemporaryDirectory[str]] = []


def signalled(process: Started, rng: random.Random, seconds: float) -> tuple[int, int]:
    """Sends a signal at a random moment, to the process or to its group; the signal and the exit code."""
    while process.poll() is None and not (process.folder / BEGUN).exists():
        time.sleep(0.005)
    (process.folder / BEGUN).unlink(missing_ok=True)
    time.sleep(rng.uniform(0, 1.1 * seconds))
    number = rng.choice(list(CODES))
    if process.poll() is None:
        send = rng.choice((os.kill, os.killpg))
        try:
            send(process.pid, number)
        except ProcessLookupError:
            assert send is os.killpg  # it has no group of its own yet
            with contextlib.suppress(ProcessLookupError):  # or it has just ended
                os.kill(process.pid, number)
    return number, process.wait(90)


def check_files(folder: Path) -> None:
    """No file that can be seen is half written."""
    for path in folder.rglob("[!.]*.json"):
        json.loads(path.read_text())


def members(session: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


def check_orphans(process: Started, folder: Path) -> None:
    """No process of the command is left, nor one of the workers of a search."""
    pids = folder / "pids"
    sessions = [process.pid, *map(int, pids.read_text().split() if pids.exists() else ())]
    end = time.monotonic() + PATIENCE
    while left := [member for session in sessions for member in members(session)]:
        assert time.monotonic() < end, f"the processes {left} are left"
        time.sleep(0.05)


def stop_and_go_on(rng: random.Random, folder: Path, jobs: dict[str, Job]) -> None:
    name = rng.choice(sorted(jobs))
    job = jobs[name]
    seconds, unstopped = whole(job)
    for count in range(rng.choice((1, 1, 2, 3))):
        process = start(job, folder, *(job.again if count else ()))
        number, code = signalled(process, rng, seconds)
        assert code in (0, *CODES[number]), f"{name}, signal {number}: exit code {code}: {process.said[-1500:]}"
        assert "Traceback" not in process.said and "Exception ignored" not in process.said, process.said[-1500:]
        check_orphans(process, folder)
        check_files(folder)
        left = list(folder.rglob("*.tmp"))
        assert number == signal.SIGKILL or not left, f"{name}, signal {number}: {left}"
        for path in left:
            path.unlink()
        if "stopped after step" in process.said:
            saved = process.said.split("checkpoint in ")[1].split(";")[0]
            assert code in (130, 143) and (folder / saved / "manifest.json").exists() and "--resume" in process.said
    process = start(job, folder, *job.again)
    assert process.wait(90) == 0, f"{name}, again: {process.said[-1500:]}"
    assert "Traceback" not in process.said
    assert job.compare(unstopped, folder), f"{name}: other results than those of a run that was not stopped"


ATTACKS = (
    Attack(
        "signals",
        "SIGINT, SIGTERM and SIGKILL at random moments of evaluations and trainings, which then go on",
        partial(stop_and_go_on, jobs=JOBS),
        per_thousand=10,
        short=3,
        seconds=200,
        is_slow=True,
    ),
    Attack(
        "signals in searches",
        "the same for tune and search",
        partial(stop_and_go_on, jobs=LONG_JOBS),
        per_thousand=3,
        short=1,
        seconds=400,
        is_slow=True,
    ),
)
