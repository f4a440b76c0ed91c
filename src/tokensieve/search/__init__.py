"""TODO docstring."""

from __future__ import annotations

import os
from pathlib import Path

from tokensieve import config
from tokensieve.errors import UserError
from tokensieve.search.workers import Searching


def run(path: str | Path, output: str | Path | None = None, quiet: bool = False) -> Path:
    """Search what the file describes, or go on with it; the folder with all trials and the best files."""
    from tokensieve.search import results

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("a search starts the processes of its trials itself; start it without torchrun, as tokensieve search")
    path = Path(path)
    folder = Path(output) if output is not None else config.load(path).output
    searching = Searching(path, folder, quiet)
    mode, enable = searching.config.manager_settings.mode, searching.search.enable
    if enable and mode == "single":
        searching.say("this is a search: search_settings.enable: true wins over manager_settings.mode: single")
    elif mode == "optuna" and not enable and "enable" in searching.search.model_fields_set:
        searching.say("this is a search: manager_settings.mode: optuna wins over search_settings.enable: false")
    try:
        searching.go()
    except (KeyboardInterrupt, SystemExit):
        searching.say(f"stopped; the same command goes on with the study in {folder}")
        raise
    finally:
        found = results.write(searching.study, searching.data, searching.search, folder)
    if not found:
        raise UserError(f"no trial was completed; see {folder / 'trials.csv'} for the reasons")
    if not quiet:
        results.show(searching.study, searching.search, folder)
    return folder
