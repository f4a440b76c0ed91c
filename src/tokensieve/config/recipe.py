"""TODO docstring."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokensieve.config.section import Section
from tokensieve.errors import UserError

# Keys of any task that say how and where the work is done, and do not change what comes out of it.
KEYS_OUTSIDE_RECIPE = {
    *("output", "workers", "threads", "device", "model_cache_dir", "checkpoint_every", "evaluate", "val_images"),
    *("manager_settings", "search_settings"),
}


def recipe(config: Section) -> dict[str, Any]:
    """What decides the result of a training: all of its file but the circumstances."""
    decided: dict[str, Any] = json.loads(config.model_dump_json(exclude=KEYS_OUTSIDE_RECIPE))
    return decided


def check_recipe(now: Mapping[str, Any], begun: Mapping[str, Any]) -> None:
    """A UserError if a run that was begun with one recipe is to be resumed with another."""
    changed = list(_changed(begun, now))
    if changed:
        raise UserError(
            f"the run was begun with other values of {', '.join(changed)}; "
            "restore them in the configuration, or begin a new run with another --output"
        )


def _changed(begun: Any, now: Any, at: str = "") -> Iterator[str]:
    """The keys whose values differ, with their sections."""
    if not (isinstance(begun, Mapping) and isinstance(now, Mapping)):
        if begun != now:
            yield at
        return
    for key in {**begun, **now}:
        yield from _changed(begun.get(key), now.get(key), f"{at}.{key}" if at else key)
