"""The recipe of a run: the part of its file that decides the result. A run is resumed with the same recipe only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokensieve.config.section import Section
from tokensieve.errors import UserError

# Keys of any training that set how and where it runs, and do not change its result.
KEYS_OUTSIDE_RECIPE = {
    *("output", "workers", "threads", "device", "model_cache_dir", "evaluate", "val_images", "max_broken"),
    *("checkpoint_every", "keep_checkpoints"),
    *("manager_settings", "search_settings"),
}


def recipe(config: Section) -> dict[str, Any]:
    """The keys of a file that decide the result of its training."""
    decided: dict[str, Any] = json.loads(config.model_dump_json(exclude=KEYS_OUTSIDE_RECIPE))
    return decided


def check_recipe(now: Mapping[str, Any], begun: Mapping[str, Any]) -> None:
    """A UserError if a run that was started with one recipe is resumed with another."""
    changed = list(_changed(begun, now))
    if changed:
        raise UserError(
            f"the run was started with other values of {', '.join(changed)}; "
            "restore them in the configuration, or start a new run with another --output"
        )


def _changed(begun: Any, now: Any, at: str = "") -> Iterator[str]:
    """The keys whose values differ, with their sections."""
    if not (isinstance(begun, Mapping) and isinstance(now, Mapping)):
        if begun != now:
            yield at
        return
    for key in {**begun, **now}:
        yield from _changed(begun.get(key), now.get(key), f"{at}.{key}" if at else key)
