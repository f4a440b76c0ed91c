"""Training: `tokensieve train CONFIG`. The loop, the checkpoints, and one file for each thing that is learned."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tokensieve import config as configuration
from tokensieve.errors import UserError

Report = Callable[[int, Mapping[str, float]], None]

# The module of each task and its learner; its function `export(learner, folder)` writes what was learned and returns the card.
TASKS = {
    "clip": ("tokensieve.training.clip", "ClipLearner"),
    "captions": ("tokensieve.training.captions", "CaptionLearner"),
    "llava": ("tokensieve.training.llava", "LlavaLearner"),
    "learned_selector": ("tokensieve.training.selector", "SelectorLearner"),
    "pruning": ("tokensieve.training.pruning", "PruningLearner"),
    "reid": ("tokensieve.training.reid", "ReidLearner"),
}


def run(
    config: Any,
    resume: bool = False,
    output: str | Path | None = None,
    quiet: bool = False,
    report: Report | None = None,
) -> Path:
    """Train or search what the file (or a section of it that was read already) describes; the folder where all of it is.

    The last evaluation goes to result.json; a learner that keeps the best weights instead writes there what those reach. One
    that counts its steps itself, say from the size of its data, has `steps`, and may have `checkpoint_every` and
    `evaluate_every`; else the section says them. report: see `loop.train`.
    """
    check_launcher(os.environ)
    if isinstance(config, (str, Path)):
        path, config = config, configuration.load(config)
        if config.searches:
            from tokensieve import search

            return search.run(path, output, quiet)
        configuration.check_outside(path, config)
    folder = Path(output) if output is not None else config.output

    import torch

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    place, name = TASKS[config.task]
    module = import_module(place)
    learner = getattr(module, name)(config)
    accelerator = getattr(learner, "accelerator", None)
    try:
        _train(module, learner, folder, config, resume, quiet, report)
        del learner
        if accelerator is not None:  # the models go, then all wait, then they part: in another order gloo may abort
            accelerator.free_memory()
            accelerator.wait_for_everyone()
    finally:
        if accelerator is not None:
            accelerator.end_training()
    return folder


def _train(
    module: ModuleType, learner: Any, folder: Path, config: Any, resume: bool, quiet: bool, report: Report | None
) -> None:
    """Train, then let process 0 write the evaluation and what was learned."""
    from tokensieve import results
    from tokensieve.training import loop

    def said(name: str) -> Any:
        return getattr(learner, name, None) or getattr(config, name, None)

    world = loop.processes(learner)
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
            results.write_json(folder / "result.json", evaluation)
        return module.export(learner, folder)

    card = world.lead(write)
    if world.leads and not quiet:
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
