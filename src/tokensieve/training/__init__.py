"""Training: `tokensieve train CONFIG`. The loop, the checkpoints, and one file for each thing that is learned."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from tokensieve.config import check_files, load
from tokensieve.errors import UserError

if TYPE_CHECKING:
    from tokensieve.training.loop import Report


# Of each task: its learner, and the function `export(learner, folder)` that writes what was learned and returns the card.
TASKS = {
    "clip": ("tokensieve.embedded.recipes.clip:ClipLearner", "tokensieve.embedded.recipes.clip:export"),
    "captions": ("tokensieve.embedded.recipes.captions:CaptionLearner", "tokensieve.embedded.recipes.captions:export"),
    "llava": ("tokensieve.embedded.recipes.llava:LlavaLearner", "tokensieve.embedded.recipes.llava:export"),
    "learned_selector": ("tokensieve.training.learned_selector:SelectorLearner", "tokensieve.training.learned_selector:export"),
    "pruning": ("tokensieve.training.pruning.learner:PruningLearner", "tokensieve.training.pruning.export:export"),
    "reid": ("tokensieve.reid.training:ReidLearner", "tokensieve.reid.export:export"),
}


def run(
    config: Any,
    resume: bool = False,
    output: str | Path | None = None,
    quiet: bool = False,
    report: Report | None = None,
) -> Path:
    """Train what the file (or a section of it that was read already) describes; the folder where all of it is.

    The last evaluation goes to result.json; a learner that keeps the best weights instead writes there what those reach. One
    that counts its steps itself, say from the size of its data, has `steps`, and may have `checkpoint_every` and
    `evaluate_every`; else the section says them. report: see `loop.train`.
    """
    check_launcher(os.environ)
    if isinstance(config, (str, Path)):
        path, config = config, load(config)
        check_files(path, config)
    folder = Path(output) if output is not None else config.output

    import torch

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    make_learner, export = (resolve_name(name) for name in TASKS[config.task])
    learner = make_learner(config)
    accelerator = getattr(learner, "accelerator", None)
    try:
        _train(export, learner, folder, config, resume, quiet, report)
        del learner
        if accelerator is not None:  # the models go, then all wait, then they part: in another order gloo may abort
            accelerator.free_memory()
            accelerator.wait_for_everyone()
    finally:
        if accelerator is not None:
            accelerator.end_training()
    return folder


def _train(
    export: Callable[[Any, Path], Any],
    learner: Any,
    folder: Path,
    config: Any,
    resume: bool,
    quiet: bool,
    report: Report | None,
) -> None:
    """Train, then let process 0 write the evaluation and what was learned."""
    from tokensieve import files
    from tokensieve.training import loop, start

    def said(name: str) -> Any:
        return getattr(learner, name, None) or getattr(config, name, None)

    world = start.processes(learner)
    evaluation = loop.train(
        learner,
        folder,
        steps=said("steps"),
        checkpoint_every=said("checkpoint_every"),
        evaluate_every=said("evaluate_every"),
        resume=resume,
        quiet=quiet,
        report=report,
    )

    def write() -> Any:
        if evaluation is not None:
            files.write_json(folder / "result.json", evaluation)
        return export(learner, folder)

    card = world.run_on_main(write)
    if world.is_main and not quiet:
        for split, measured in card.get("accuracy", {}).items():
            print(split, *(f"{name} {value}" for name, value in measured.items()))
        print(f"weights, card and losses in {folder}")


def check_launcher(variables: Mapping[str, str]) -> None:
    """A UserError where `accelerate launch --cpu --num_processes 2` started one process without saying so.

    It then leaves the address at which processes would meet, but no number of this one.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in variables and "MASTER_ADDR" in variables
    numbered = {"RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"} & set(variables)
    if launched and not numbered:
        raise UserError(
            "accelerate launch was asked for several processes and started one (it does so on CPUs); "
            "use torchrun --nproc_per_node N -m tokensieve train CONFIG, or tokensieve train CONFIG for one"
        )
