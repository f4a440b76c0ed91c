"""Training: `tokensieve train CONFIG`. The loop, the checkpoints, and one file for each thing that is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokensieve import config as configuration


def run(config_path: str | Path, resume: bool = False, output: str | Path | None = None, quiet: bool = False) -> Path:
    """Train what the file describes and write the result to its output folder, which is returned."""
    config = configuration.load(config_path)
    folder = Path(output) if output is not None else config.output

    import torch

    from tokensieve.training import captions, clip, loop, selector

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    tasks: dict[str, Any] = {
        "clip": (clip.ClipLearner, clip.export),
        "captions": (captions.CaptionLearner, captions.export),
        "learned_selector": (selector.SelectorLearner, selector.export),
    }
    learn, export = tasks[config.task]
    learner = learn(config)
    loop.train(learner, folder, steps=config.steps, checkpoint_every=config.checkpoint_every, resume=resume, quiet=quiet)
    card = export(learner, folder)
    if not quiet:
        for split, measured in card["accuracy"].items():
            print(split, *(f"{name} {value}" for name, value in measured.items()))
        print(f"weights, card and losses in {folder}")
    return folder
