"""TODO docstring."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tokensieve import distributed
from tokensieve.distributed import Processes
from tokensieve.errors import UserError
from tokensieve.training import checkpoint
from tokensieve.training.log import FOLDER, ROWS, truncate_log

CHECKPOINTS = "checkpoints"
LOG = f"{FOLDER}/{ROWS}"


def processes(learner: Any) -> Processes:
    """The processes of this training, which must be as many as the launcher started."""
    accelerator = getattr(learner, "accelerator", None)
    known = Processes()
    if accelerator is not None:
        known = Processes(accelerator.process_index, accelerator.num_processes, accelerator.local_process_index)
    started = distributed.from_environment(os.environ).size
    if known.size == started:
        return known
    if accelerator is None:
        raise UserError(f"this training runs in one process, but the launcher started {started}; use tokensieve train alone")
    raise UserError(
        f"the launcher started {started} processes, but they run as {known.size}; "
        f"use torchrun --nproc_per_node {started} -m tokensieve train CONFIG"
    )


def find_checkpoint(run: Path, resume: bool) -> checkpoint.Checkpoint | None:
    """The newest good checkpoint to go on from; the folder is made ready. A UserError if it cannot be begun or resumed."""
    folder = run / CHECKPOINTS
    try:
        for place in (folder, run / FOLDER):
            place.mkdir(parents=True, exist_ok=True)
        if resume:
            _move_in(run)
        checkpoint.clean_up(folder)
    except OSError as error:
        raise UserError(f"{str(run)!r} cannot be written to ({error.strerror}); give another folder with --output") from None
    found, broken = checkpoint.latest(folder)
    if not resume and (found or broken or any(run.glob("step-*")) or checkpoint.other_files(folder)):
        raise UserError(f"{run} holds a run already; add --resume to continue it, or give another folder with --output")
    for harm in broken:
        print(f"passed over a broken checkpoint: {harm}", file=sys.stderr)
    if broken and found is None:
        raise UserError(f"no whole checkpoint in {run}; start again with another folder (--output)")
    truncate_log(run, found.step if found else 0)
    return found


def _move_in(run: Path) -> None:
    """A run of 0.1 had its checkpoints and its log right in its folder; they go where they are looked for now."""
    for old in run.glob("step-*"):
        old.rename(run / CHECKPOINTS / old.name)
    if (run / ROWS).exists():
        (run / ROWS).rename(run / FOLDER / ROWS)
