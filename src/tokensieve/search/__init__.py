"""Search: `tokensieve search CONFIG` and `tokensieve train` of files with a search turned on."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokensieve import config, files, training
from tokensieve.errors import UserError
from tokensieve.search import results
from tokensieve.search.study import last_reason, storage_name, translate_storage_errors
from tokensieve.search.workers import Searching


def run(
    path: str | Path,
    output: str | Path | None = None,
    quiet: bool = False,
    overrides: Mapping[str, str] | None = None,
    wandb: str | None = None,
) -> Path:
    """Run or continue the search that a file describes; returns the folder with all trials and the best files.

    overrides: values of keys, see `config.load`. They are part of the study: the same ones go on with it.
    wandb: the project on Weights & Biases that gets the curves of the trials, as a group.
    """
    training.check_launcher(os.environ)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a search starts the processes of its trials itself; run tokensieve search without torchrun")
    folder = Path(output) if output is not None else config.load(path, overrides).output
    searching = Searching(path, folder, quiet, overrides, wandb)
    database = storage_name(searching.config.manager_settings, folder)
    with files.FolderLock(folder, "a search"), translate_storage_errors(database):
        searching.open()
        any_complete = _search(searching, folder)
    if not any_complete:
        raise UserError(
            f"no trial was completed, the last because: {last_reason(searching.study)}; see {folder / 'trials.csv'}"
        )
    if not quiet:
        results.show(searching.study, searching.search, folder)
    return folder


def summary(folder: Path) -> dict[str, Any]:
    """The folder of a search, its best files and all trials, as JSON."""
    with (folder / "trials.csv").open(encoding="utf-8", newline="") as table:
        trials = [{name: _number_or_text(text) for name, text in row.items()} for row in csv.DictReader(table)]
    return {"folder": str(folder), "best": sorted(path.name for path in folder.glob("best*.yaml")), "trials": trials}


def _number_or_text(text: str) -> float | str | None:
    try:
        return float(text)
    except ValueError:
        return text or None


def _search(searching: Searching, folder: Path) -> bool:
    """Run the trials that are left and write the results, however it ends. Whether a trial was completed."""
    mode, enable = searching.config.manager_settings.mode, searching.search.enable
    if enable and mode == "single":
        searching.print("this is a search: search_settings.enable: true overrides manager_settings.mode: single")
    elif mode == "optuna" and not enable and "enable" in searching.search.model_fields_set:
        searching.print("this is a search: manager_settings.mode: optuna overrides search_settings.enable: false")
    try:
        searching.run()
    except (KeyboardInterrupt, SystemExit):
        searching.print(f"stopped; run the same command again to continue the study in {folder}")
        raise
    finally:
        any_complete = results.write(searching.study, searching.data, searching.search, searching.schema.output_key, folder)
    return any_complete
