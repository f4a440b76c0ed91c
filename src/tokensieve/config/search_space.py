"""The search space of a file: the keys that a search changes, by their paths, checked against the schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tokensieve.config import explain
from tokensieve.config.document import ConfigError, Document, key_path
from tokensieve.config.schema import Training
from tokensieve.config.section import check_number
from tokensieve.errors import did_you_mean


def number_type(schema: type[Training], key: str) -> type[int] | type[float] | None:
    """The type of a key that holds a number; None for other keys."""
    annotation = explain.annotation_at(schema, key_path(key))
    return annotation if annotation in (int, float) else None


def is_search(document: Document) -> bool:
    """Whether a file turns a search on: either switch does."""
    manager, settings = (document.data.get(key) for key in ("manager_settings", "search_settings"))
    return (isinstance(settings, dict) and _is_on(settings.get("enable"))) or (
        isinstance(manager, dict) and manager.get("mode") == "optuna"
    )


def _is_on(switch: Any) -> bool:
    """A switch as the schema reads it: 'yes' in quotes turns it on too."""
    try:
        return TypeAdapter(bool).validate_python(switch)
    except ValidationError:
        return False


def fill_space(document: Document, schema: type[Training]) -> None:
    """Give a search that names no space the one that the training has by default, if it has one."""
    settings = document.data.get("search_settings") or {}
    space = schema.default_space(document.data)
    if space and isinstance(settings, dict) and not settings.get("space"):
        document.data["search_settings"] = {**settings, "space": space}


def check_space(document: Document, schema: type[Training]) -> Iterator[ConfigError]:
    """Errors in the search space: keys that do not exist or cannot change, and ranges of keys that are not numbers."""
    settings = document.data.get("search_settings")
    space = settings.get("space") if isinstance(settings, dict) else None
    known = [".".join(path) for path in explain.all_keys(schema)]
    fixed = ("manager_settings", "search_settings", schema.output_key, "task")
    free = [key for key in known if key.split(".")[0] not in fixed]
    if is_search(document) and not space:
        yield document.missing(("search_settings", "space"), nothing_to_search(schema))
    for key, values in space.items() if isinstance(space, dict) else ():
        ends = [values.get(name) for name in ("low", "high", "step")] if isinstance(values, dict) else []
        kind, problem = number_type(schema, key), None
        if key.split(".")[0] in fixed:
            problem = "is the same for all trials and cannot be searched"
        elif explain.annotation_at(schema, key_path(key)) is None:
            problem = f"no key of this file; write the whole path, such as {free[-1]}.{_near_path(key, free)}"
        elif any(end is not None for end in ends) and kind is None:
            problem = "is not a number, so it has no range; give {choices: [...]}"
        elif kind is int and not all(_is_whole(end) for end in ends):
            problem = "is a whole number; give whole numbers for low, high and step"
        if problem is not None:
            yield document.error(("search_settings", "space", key), problem)


def _is_whole(end: Any) -> bool:
    """Whether an end of a range is a whole number; what is no number at all is an error of its own."""
    try:
        return end is None or float(check_number(end)).is_integer()
    except ValueError:
        return True


def nothing_to_search(schema: type[Training]) -> str:
    """The message for an empty space, with an example of the file's own keys."""
    rates = [".".join(path) for path in explain.all_keys(schema) if path[-1].lower() in ("lr", "base_lr")]
    return f"names nothing to search; for example space: {{{rates[0]}: {{low: 1e-5, high: 1e-2, log: true}}}}"


def _near_path(key: str, known: list[str]) -> str:
    """A hint with the nearest path: one that ends in the same word, or is spelt alike."""
    last = key.split(".")[-1]
    same = [path for path in known if path.split(".")[-1] == last]
    return f" Did you mean {same[0]!r}?" if same else did_you_mean(key, known)
