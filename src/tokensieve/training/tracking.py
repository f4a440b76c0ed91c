"""Curves of a run on Weights & Biases, beside those for TensorBoard: `tokensieve train FILE --wandb PROJECT`.

WANDB_MODE=offline writes them to the run's folder alone. A resumed run goes on with its curves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokensieve.errors import UserError, one_line
from tokensieve.installation.packages import naming_extras
from tokensieve.provenance import digest

PROJECT, PROJECT_GROUP = "TOKENSIEVE_WANDB", "TOKENSIEVE_WANDB_GROUP"  # environment variables for the trials of a search


def import_wandb() -> Any:
    """Weights & Biases, or a UserError with the command that installs it."""
    with naming_extras():
        import wandb  # type: ignore[import-not-found, unused-ignore]
    return wandb


class Tracker:
    """A run on Weights & Biases.

    Args:
        project: the name of the project there.
        folder: of the run; its name is that of the run there, its path decides which run is resumed.
        settings: what the run is trained with.
        group: the study that a trial belongs to.
    """

    def __init__(self, project: str, folder: Path, settings: Mapping[str, Any], group: str | None = None) -> None:
        wandb = import_wandb()
        try:
            self.run = wandb.init(
                project=project,
                group=group,
                name=folder.name,
                id=digest([project, os.path.realpath(folder)])[:16],
                resume="allow",
                dir=str(folder),
                config=dict(settings),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except Exception as error:  # its own errors, and those of the network
            raise UserError(
                f"--wandb: Weights & Biases does not take the run ({one_line(error, 200)}); log in with wandb login, or set "
                "WANDB_MODE=offline"
            ) from error

    def log(self, done: int, numbers: Mapping[str, float]) -> None:
        """Numbers after so many steps, by the names of their curves."""
        self.run.log(dict(numbers), step=done)

    def close(self, failed: bool) -> None:
        """End the run. What could not be sent is in its folder."""
        self.run.finish(exit_code=int(failed))
