"""Starting the processes of a training: as many as the file has GPUs for, through torchrun.

`manager_settings.gpus_per_subtask: 2` trains in two processes on the first two of `available_gpus` that CUDA sees. The
numbers count the devices of CUDA_VISIBLE_DEVICES, if it is set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from tokensieve import distributed
from tokensieve.config.schema import Training
from tokensieve.config.search import Manager


@dataclass(frozen=True)
class Choice:
    """The GPUs of a training, by their names for CUDA_VISIBLE_DEVICES, and a line that says so; none: one process."""

    gpus: tuple[str, ...]
    note: str


def choose_gpus(manager: Manager, gpus: Sequence[str]) -> Choice:
    """The GPUs that a file asks for, as far as they are there. gpus: the names of those that CUDA sees."""
    listed = manager.available_gpus or tuple(range(manager.gpus_per_subtask))
    there = [number for number in listed if number < len(gpus)]
    chosen = tuple(gpus[number] for number in there[: manager.gpus_per_subtask])
    if not chosen:
        return Choice((), f"manager_settings.available_gpus: {list(listed)} not there; training in one process")
    where = f"training in {len(chosen)} process{'es' if len(chosen) > 1 else ''} on GPU {', '.join(chosen)}"
    missing = [number for number in listed if number not in there]
    if missing:
        where = f"manager_settings.available_gpus: {missing} not there; {where}"
    return Choice(chosen, where)


def cuda_devices() -> list[str]:
    """The GPUs that this process sees, by their names for CUDA_VISIBLE_DEVICES."""
    import torch

    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    count = torch.cuda.device_count()
    return names[:count] or [str(i) for i in range(count)]


def torchrun(processes: int) -> list[str]:
    """The command that runs what follows it in so many processes of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]


def start_processes(config: Training, words: Sequence[str]) -> None:
    """Use the GPUs that the file asks for: in this process, or in processes that take its place and do not return here.

    words: the words of the command `tokensieve` that trains the file. Does nothing where a launcher has started this process,
    or the file asks for no GPU or for another device.
    """
    manager, device = config.manager_settings, getattr(config, "device", None)
    if distributed.from_environment(os.environ).size > 1 or (device is not None and device != "cuda"):
        return
    if not manager.available_gpus and manager.gpus_per_subtask == 1:
        return
    choice = choose_gpus(manager, cuda_devices())
    print(choice.note, file=sys.stderr, flush=True)
    if choice.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(choice.gpus)
    if len(choice.gpus) > 1:
        _replace_process([*torchrun(len(choice.gpus)), "-m", "tokensieve", *words])


def _replace_process(command: Sequence[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(command[0], list(command))
