"""Training: `tokensieve train CONFIG`. The loop, the checkpoints, and one package for each training, which declares it.

A new folder here with a declaration in its `__init__.py` is a new training. Nothing in those files imports torch.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from tokensieve import files
from tokensieve.config import check_files, load
from tokensieve.config.registry import TRAININGS, TrainingSpec
from tokensieve.errors import UserError
from tokensieve.registry import resolve

if TYPE_CHECKING:
    from tokensieve.training.loop import Report

for _module in pkgutil.iter_modules(__path__):
    if _module.ispkg:
        importlib.import_module(f"{__name__}.{_module.name}")


def run(
    config: Any,
    resume: bool | int = False,
    output: str | Path | None = None,
    quiet: bool = False,
    report: Report | None = None,
    overrides: Mapping[str, str] | None = None,
    wandb: str | None = None,
    group: str | None = None,
) -> Path:
    """Train what a file describes, once, whatever its search_settings; returns the folder of the run.

    config: the path of the file, or what `config.load` made of it. overrides: values of keys, see `config.load`.
    The last evaluation goes to result.json; a learner that keeps the best weights writes their numbers there instead. A
    learner may have `steps`, `checkpoint_every` and `evaluate_every`, say computed from the size of its data; otherwise they
    are taken from the file. resume: from the last checkpoint, or from that of a step. report: see `loop.train`.
    wandb: the project on Weights & Biases that gets the curves too. group: the runs there that belong together.
    """
    check_launcher(os.environ)
    if isinstance(config, (str, Path)):
        path, config = config, load(config, overrides)
        check_files(path, config, overrides)
    folder = Path(output) if output is not None else config.output
    if wandb is not None:
        from tokensieve.training.tracking import import_wandb

        import_wandb()  # before anything is loaded

    import torch

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    spec = TRAININGS[config.task]
    learner = resolve(spec.learner)(config)
    accelerator = getattr(learner, "accelerator", None)
    try:
        _train(spec, learner, folder, config, resume, quiet, report, wandb, group)
    except UserError as error:
        clear_frames(error.__traceback__)  # they refer to the models
        del learner
        _leave(accelerator, together=False)
        raise
    except BaseException:
        if accelerator is not None:
            accelerator.end_training()
        raise
    del learner
    _leave(accelerator, together=True)
    return folder


def _leave(accelerator: Any, together: bool) -> None:
    """Free the models, wait for the other processes, then end: in another order gloo may abort.

    together: whether all processes come here. After an error they may not; then the wait is short.
    """
    if accelerator is None:
        return
    import torch.distributed as dist

    accelerator.free_memory()
    if together:
        accelerator.wait_for_everyone()
    elif accelerator.num_processes > 1 and dist.get_backend() == "gloo":
        with suppress(RuntimeError):
            dist.monitored_barrier(timeout=timedelta(seconds=5))
    accelerator.end_training()


def _train(
    spec: TrainingSpec,
    learner: Any,
    folder: Path,
    config: Any,
    resume: bool | int,
    quiet: bool,
    report: Report | None,
    wandb: str | None,
    group: str | None,
) -> None:
    """Train; then process 0 writes the evaluation and what was learned."""
    from tokensieve.training import checkpoint, loop, start
    from tokensieve.training.tracking import Tracker

    def learner_or_config(name: str) -> Any:
        return getattr(learner, name, None) or getattr(config, name, None)

    processes = start.processes(learner)
    keep = learner_or_config("keep_checkpoints") or checkpoint.KEPT
    lock = files.FolderLock(folder, "a training")
    processes.run_on_main(lock.acquire)
    try:
        evaluation = loop.train(
            learner,
            folder,
            steps=learner_or_config("steps"),
            checkpoint_every=learner_or_config("checkpoint_every"),
            evaluate_every=learner_or_config("evaluate_every"),
            resume=resume,
            keep_checkpoints=None if keep == "all" else keep,
            parts=partial(resolve(spec.parts), learner) if spec.parts else None,
            quiet=quiet,
            report=report,
            track=None if wandb is None else partial(Tracker, wandb, folder, config.model_dump(mode="json"), group),
        )

        def write() -> Any:
            if evaluation is not None:
                files.write_json(folder / "result.json", evaluation)
            return resolve(spec.export)(learner, folder)

        card = processes.run_on_main(write)
    finally:
        lock.release()
    if processes.is_main and not quiet:
        for split, measured in card.get("accuracy", {}).items():
            print(split, *(f"{name} {value}" for name, value in measured.items()))
        print(f"weights, card and losses in {folder}")


def check_launcher(variables: Mapping[str, str]) -> None:
    """A UserError where `accelerate launch --cpu --num_processes 2` silently started one process.

    It then leaves the address at which processes would meet, but no rank of this one.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in variables and "MASTER_ADDR" in variables
    ranks = {"RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"} & set(variables)
    if launched and not ranks:
        raise UserError(
            "accelerate launch was asked for several processes and started one (it does so on CPUs); "
            "use torchrun --nproc_per_node N -m tokensieve train CONFIG, or tokensieve train CONFIG for one"
        )
