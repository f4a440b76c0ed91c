"""Search: `tokensieve search CONFIG` and `tokensieve train` of files with a search turned on."""

from __future__ import annotations

import os
from pathlib import Path

from tokensieve import config, files, training
from tokensieve.errors import UserError
from tokensieve.search import results
from tokensieve.search.study import last_reason, storage_name, translate_storage_errors
from tokensieve.search.workers import Searching


def run(path: str | Path, output: str | Path | None = None, quiet: bool = False) -> Path:
    """Run or continue the search that a file describes; returns the folder with all trials and the best files."""
    training.check_launcher(os.environ)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a search starts the processes of its trials itself; run tokensieve search without torchrun")
    path = Path(path)
    folder = Path(output) if output is not None else config.load(path).output
    searching = Searching(path, folder, quiet)
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
