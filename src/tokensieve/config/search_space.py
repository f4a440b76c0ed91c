"""TODO docstring."""

from __future__ import annotations

from collections.abc import Iterator

from tokensieve.config import explain
from tokensieve.config.document import ConfigError, Document, KeyPath
from tokensieve.config.schema import OUTPUT_KEYS, Training
from tokensieve.errors import did_you_mean


def key_path(key: str) -> KeyPath:
    """The place that a path of keys means: "phases.0.steps" is ("phases", 0, "steps")."""
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def number_type(schema: type[Training], key: str) -> type[int] | type[float] | None:
    """What kind of number a key is; None where it is something else."""
    annotation = explain.annotation_at(schema, key_path(key))
    return annotation if annotation in (int, float) else None


def check_space(document: Document, schema: type[Training]) -> Iterator[ConfigError]:
    """What is wrong with the keys that a search would change, and with ranges of what has none."""
    settings = document.data.get("search_settings")
    space = settings.get("space") if isinstance(settings, dict) else None
    known = [".".join(place) for place in explain.all_keys(schema)]
    fixed = ("manager_settings", "search_settings", *OUTPUT_KEYS, "task")
    free = [key for key in known if key.split(".")[0] not in fixed]
    manager = document.data.get("manager_settings")
    asked = isinstance(settings, dict) and settings.get("enable") is True
    asked |= isinstance(manager, dict) and manager.get("mode") == "optuna"
    if asked and not space:
        yield document.error(("search_settings", "space"), nothing_to_search(schema))
    for key, tried in space.items() if isinstance(space, dict) else ():
        ends = [tried.get(name) for name in ("low", "high", "step")] if isinstance(tried, dict) else []
        kind, wrong = number_type(schema, str(key)), None
        if str(key).split(".")[0] in fixed:
            wrong = "is the same for all trials and cannot be searched"
        elif explain.annotation_at(schema, key_path(str(key))) is None:
            wrong = f"no key of this file; write the whole path, such as {free[-1]}.{_near_path(str(key), free)}"
        elif any(end is not None for end in ends) and kind is None:
            wrong = "is not a number, so it has no range; give {choices: [...]}"
        elif kind is int and any(isinstance(end, float) and end != int(end) for end in ends):
            wrong = "is a whole number; give whole numbers for low, high and step"
        if wrong is not None:
            yield document.error(("search_settings", "space", str(key)), wrong)


def nothing_to_search(schema: type[Training]) -> str:
    """What is wrong with an empty space, with an example of the file's own keys."""
    rates = [".".join(place) for place in explain.all_keys(schema) if place[-1].lower() in ("lr", "base_lr")]
    return f"names nothing to search; for example space: {{{rates[0]}: {{low: 1e-5, high: 1e-2, log: true}}}}"


def _near_path(key: str, known: list[str]) -> str:
    """The nearest path: one that ends in the same word, or is spelt alike."""
    last = key.split(".")[-1]
    same = [path for path in known if path.split(".")[-1] == last]
    return f" Did you mean {same[0]!r}?" if same else did_you_mean(key, known)
