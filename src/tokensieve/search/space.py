"""Values of a trial: drawn from the search space, written into a copy of the file, read from its result."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve.config.document import key_path
from tokensieve.config.search import Dimension, Objective
from tokensieve.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import optuna


def suggest(trial: optuna.Trial, key: str, dimension: Dimension, kind: type[int] | type[float] | None) -> Any:
    """The value that Optuna suggests for a key."""
    if dimension.choices is not None:
        stored = {storable(choice): choice for choice in dimension.choices}
        return stored[trial.suggest_categorical(key, list(stored))]
    low, high, step = dimension.low, dimension.high, dimension.step
    assert low is not None and high is not None
    if kind is int:
        return trial.suggest_int(key, int(low), int(high), step=int(step or 1), log=dimension.log)
    value = trial.suggest_float(key, float(low), float(high), step=step, log=dimension.log)
    return float(f"{value:.12g}")  # 0.3, not 0.30000000000000004


def storable(choice: Any) -> Any:
    """A choice as a database can store it."""
    return choice if choice is None or isinstance(choice, (bool, int, float, str)) else json.dumps(choice)


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """The last words of each path, as few as make it unique: merge_ratio, token_merger.lr."""
    paths = [key.split(".") for key in keys]
    names = {}
    for path in paths:
        counts = range(1, len(path) + 1)
        own = next(n for n in counts if n == len(path) or sum(other[-n:] == path[-n:] for other in paths) == 1)
        names[".".join(path)] = ".".join(path[-max(own, 2 if path[-1].isdigit() or path[-1] == "lr" else 1) :])
    return names


def short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def with_values(data: Mapping[str, Any], values: Mapping[str, Any], output: tuple[str, Path]) -> dict[str, Any]:
    """The file with other values for some keys, another output (its key and the folder), and its search turned off."""
    trial_data = copy.deepcopy(dict(data))
    for key, value in values.items():
        *above, last = key_path(key)
        inner: Any = trial_data
        for step in above:
            if isinstance(inner, dict) and not isinstance(step, int) and inner.get(step) is None:
                inner[step] = {}
            inner = _at(inner, step, key)
        if isinstance(inner, list):
            _at(inner, last, key)
        inner[last] = value
    trial_data[output[0]] = str(output[1])
    if "manager_settings" in trial_data:
        trial_data["manager_settings"] = {k: v for k, v in trial_data["manager_settings"].items() if k != "storage"} | {
            "mode": "single"
        }
    if "search_settings" in trial_data:
        trial_data["search_settings"] = trial_data["search_settings"] | {"enable": False}
    return trial_data


def _at(inner: Any, step: int | str, key: str) -> Any:
    try:
        return inner[step]
    except (KeyError, IndexError, TypeError):
        raise UserError(f"search_settings.space: {key}: the file has no {step} there; write the whole list out in it") from None


def numbers(result: Mapping[str, Any], above: str = "") -> dict[str, float | None]:
    """The numbers of a result by their paths; None for those that were not finite."""
    values: dict[str, float | None] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            values |= numbers(value, f"{above}{key}.")
        elif value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            values[f"{above}{key}"] = value
    return values


def objective_values(folder: Path, objectives: Sequence[Objective]) -> list[float]:
    """The objectives of a finished trial. UserError if its result has no such number; ValueError if one is not finite."""
    path = folder / "result.json"
    measured = numbers(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    values = []
    for objective in objectives:
        if objective.name not in measured:
            known = ", ".join(measured) or "nothing: it was not evaluated"
            hint = did_you_mean(objective.name, measured)
            raise UserError(
                f"search_settings.objectives: {path} has no number {objective.name!r}; it has {known}.{hint} "
                "Correct it and start again with another --output"
            )
        value = measured[objective.name]
        if value is None:
            raise ValueError(f"{objective.name} is not finite")
        values.append(float(value))
    return values
