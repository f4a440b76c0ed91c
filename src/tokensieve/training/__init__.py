"""Training: `tokensieve train CONFIG`. The loop, the checkpoints, and one file for each thing that is learned."""

from __future__ import annotations

from pathlib import Path

from tokensieve import config as configuration


def run(config_path: str | Path, resume: bool = False, output: str | Path | None = None, quiet: bool = False) -> Path:
    """Train what the file describes and write the result to its output folder, which is returned."""
    config = configuration.load(config_path)
    folder = Path(output) if output is not None else config.output

    import torch

    from tokensieve.training import clip, loop

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    learner = clip.ClipLearner(config)
    loop.train(learner, folder, steps=config.steps, checkpoint_every=config.checkpoint_every, resume=resume, quiet=quiet)
    card = clip.export(learner, folder)
    if not quiet:
        for name, measured in card["accuracy"].items():
            print(f"{name:13} acc1 {measured['acc1']:.4f} +- {measured['stderr']:.4f}  (n={measured['n']})")
        print(f"weights, card and losses in {folder}")
    return folder
