"""The start of a run: its processes, and the checkpoint to resume from."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tokensieve import distributed
from tokensieve.distributed import Processes
from tokensieve.errors import UserError
from tokensieve.parts.checkpoints import CHECKPOINTS, step_folders
from tokensieve.training import checkpoint
from tokensieve.training.log import FOLDER, ROWS, truncate_log

LOG = f"{FOLDER}/{ROWS}"


def processes(learner: Any) -> Processes:
    """The processes of this training, which must be as many as the launcher started."""
    accelerator = getattr(learner, "accelerator", None)
    joined = Processes()
    if accelerator is not None:
        joined = Processes(accelerator.process_index, accelerator.num_processes, accelerator.local_process_index)
    started = distributed.from_environment(os.environ).size
    if joined.size == started:
        return joined
    if accelerator is None:
        raise UserError(f"this training runs in one process, but the launcher started {started}; use tokensieve train alone")
    raise UserError(
        f"the launcher started {started} processes, but they run as {joined.size}; "
        f"use torchrun --nproc_per_node {started} -m tokensieve train CONFIG"
    )


def find_checkpoint(run: Path, resume: bool | int) -> checkpoint.Checkpoint | None:
    """The checkpoint to start from: the newest good one, or that of the step `resume`. The folder of the run is prepared.

    A UserError if it cannot be started or resumed.
    """
    folder = run / CHECKPOINTS
    try:
        for subfolder in (folder, run / FOLDER):
            subfolder.mkdir(parents=True, exist_ok=True)
        if resume is not False:
            _move_old_files(run)
        checkpoint.clean_up(folder)
    except OSError as error:
        raise UserError(f"{str(run)!r} cannot be written to ({error.strerror}); give another folder with --output") from None
    if not isinstance(resume, bool):
        chosen = checkpoint.at_step(folder, resume)
        truncate_log(run, chosen.step)
        return chosen
    newest, broken = checkpoint.latest(folder)
    if not resume and (newest or broken or step_folders(run) or checkpoint.other_files(folder)):
        raise UserError(f"{run} holds a run already; add --resume to continue it, or give another folder with --output")
    for problem in broken:
        print(f"skipped a broken checkpoint: {problem}", file=sys.stderr)
    if broken and newest is None:
        raise UserError(f"no intact checkpoint in {run}; start again with another folder (--output)")
    truncate_log(run, newest.step if newest else 0)
    return newest


def _move_old_files(run: Path) -> None:
    """Move checkpoints and log of a run of version 0.1, which were in its folder itself, to where they belong now."""
    for old in step_folders(run).values():
        old.rename(run / CHECKPOINTS / old.name)
    if (run / ROWS).exists():
        (run / ROWS).rename(run / FOLDER / ROWS)
