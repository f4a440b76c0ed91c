"""TODO docstring."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokensieve import config
from tokensieve.config import search_space
from tokensieve.config.search import Dimension, Objective
from tokensieve.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import optuna


def suggest(trial: optuna.Trial, key: str, dimension: Dimension, kind: type[int] | type[float] | None) -> Any:
    """The value that Optuna wants tried for a key."""
    if dimension.choices is not None:
        words = {word(choice): choice for choice in dimension.choices}
        return words[trial.suggest_categorical(key, list(words))]
    low, high, step = dimension.low, dimension.high, dimension.step
    assert low is not None and high is not None
    if kind is int:
        return trial.suggest_int(key, int(low), int(high), step=int(step or 1), log=dimension.log)
    value = trial.suggest_float(key, float(low), float(high), step=step, log=dimension.log)
    return float(f"{value:.12g}")  # 0.3, not 0.30000000000000004


def word(choice: Any) -> Any:
    """A choice as a database can keep it."""
    return choice if choice is None or isinstance(choice, (bool, int, float, str)) else json.dumps(choice)


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """The last words of each path, as many as tell it from the others: merge_ratio, token_merger.lr."""
    paths = [key.split(".") for key in keys]
    names = {}
    for path in paths:
        counts = range(1, len(path) + 1)
        own = next(n for n in counts if n == len(path) or sum(other[-n:] == path[-n:] for other in paths) == 1)
        names[".".join(path)] = ".".join(path[-max(own, 2 if path[-1].isdigit() or path[-1] == "lr" else 1) :])
    return names


def short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def with_values(data: Mapping[str, Any], values: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """The file with other values for some keys, and the search in it turned off."""
    made = copy.deepcopy(dict(data))
    for key, value in values.items():
        *above, last = search_space.key_path(key)
        inner: Any = made
        for part in above:
            if isinstance(inner, dict) and not isinstance(part, int) and inner.get(part) is None:
                inner[part] = {}
            inner = _at(inner, part, key)
        if isinstance(inner, list):
            _at(inner, last, key)
        inner[last] = value
    made["OUTPUT_DIR" if set(config.REID) & set(made) else "output"] = str(output)
    if "manager_settings" in made:
        made["manager_settings"] = {k: v for k, v in made["manager_settings"].items() if k != "storage"} | {"mode": "single"}
    if "search_settings" in made:
        made["search_settings"] = made["search_settings"] | {"enable": False}
    return made


def _at(inner: Any, part: int | str, key: str) -> Any:
    try:
        return inner[part]
    except (KeyError, IndexError, TypeError):
        raise UserError(f"search_settings.space: {key}: the file has no {part} there; write the whole list out in it") from None


def numbers(result: Mapping[str, Any], above: str = "") -> dict[str, float | None]:
    """The numbers of a result by their paths; None where one was not finite."""
    found: dict[str, float | None] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{above}{key}.")
        elif value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            found[f"{above}{key}"] = value
    return found


def objective_values(folder: Path, objectives: Sequence[Objective]) -> list[float]:
    """What a finished trial reached. UserError if its result has no such number; ValueError if it was not finite."""
    path = folder / "result.json"
    measured = numbers(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    values = []
    for objective in objectives:
        if objective.name not in measured:
            known = ", ".join(measured) or "nothing: it was not evaluated"
            hint = did_you_mean(objective.name, measured)
            raise UserError(
                f"search_settings.objectives: {path} has no number {objective.name!r}; it has {known}.{hint} "
                "Correct it and begin again with another --output"
            )
        value = measured[objective.name]
        if value is None:
            raise ValueError(f"{objective.name} is not finite")
        values.append(float(value))
    return values


def yaml_text(value: Any) -> str:
    import yaml

    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
