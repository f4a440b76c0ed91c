"""Python processes of one job: started by torchrun as a user would, or from a process that has imported the libraries.

Importing torch, open_clip and transformers takes each new process about six seconds of a core. A test that is about what a
process computes, and not about how it is launched, saves that time with `python`, `one_process` and `two_processes`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["open_clip", "transformers", "timm", "accelerate", "tokensieve.cli"])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more


def torchrun(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    return subprocess.run(
        [*launcher, *words], cwd=folder, env=environment(**variables), capture_output=True, text=True, timeout=300
    )


def alone(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)


@dataclass
class Started:
    """A process that runs `python WORDS`; what it prints is in two files."""

    words: list[str]  # a script or -m MODULE, and its arguments
    folder: Path
    variables: dict[str, str]
    log: Path  # what it says on stderr; stdout is beside it
    prepare: Callable[[], object] | None = None  # called in the process, before the words are run
    process: BaseProcess = field(init=False)

    def __post_init__(self) -> None:
        self.process = SERVER.Process(target=_run, args=(self.words, self.folder, self.variables, self.log, self.prepare))
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    @property
    def printed(self) -> str:
        return _printed(self.log).read_text() if self.log.exists() else ""

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, seconds: float = 300) -> int:
        """The exit code (negative: the signal that ended it)."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"it hangs: {self.said}")
        return self.process.exitcode


def _printed(log: Path) -> Path:
    return log.with_suffix(".out")


def _run(words: list[str], folder: Path, variables: dict[str, str], log: Path, prepare: Callable[[], object] | None) -> None:
    import torch

    multiprocessing.set_start_method("fork", force=True)  # as in a process of its own
    os.setsid()
    os.chdir(folder)
    os.environ.update(environment(**variables))
    for stream, file in ((1, _printed(log)), (2, log)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def python(words: list[str], folder: Path, prepare: Callable[[], object] | None = None, **variables: str) -> Started:
    """`python WORDS` in this folder. prepare: called in the process before; it has to be importable by its name."""
    return Started(words, folder, variables, folder / f"said-{free_port()}.log", prepare)


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def one_process(words: list[str], folder: Path) -> Done:
    started = python(words, folder)
    return Done(started.wait(), started.printed, started.said)


def start_two(words: list[str], folder: Path, **variables: str) -> list[Started]:
    """As torchrun starts them, without torchrun."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [python(words, folder, RANK=str(rank), LOCAL_RANK=str(rank), **shared, **variables) for rank in (0, 1)]


def two_processes(words: list[str], folder: Path, **variables: str) -> Done:
    """What they printed, and the exit code of the one that failed."""
    ranks = start_two(words, folder, **variables)
    codes = [rank.wait() for rank in ranks]
    return Done(max(codes, key=abs), "\n".join(rank.printed for rank in ranks), "\n".join(rank.said for rank in ranks))
