"""Turns pydantic's errors into messages for users: the line, what was given, what is allowed, the nearest word.

A file is read twice from the same text: as nodes, which know their lines, and as values, which pydantic checks. Every error has
a path of keys, such as ("phases", 0, "canvas"); the nodes give its line.
"""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from tokensieve.config.document import ConfigError, ConfigErrors, Document
from tokensieve.errors import UserError, did_you_mean, nearest, one_line


def check_document(document: Document, schema: type[BaseModel], known: Iterable[ConfigError] = ()) -> Any:
    """The values of a file as an instance of its schema. Raises ConfigErrors with its errors and the known ones."""
    errors = list(known)
    try:
        made = schema.model_validate(document.data)
    except ValidationError as error:
        errors += [error for one in error.errors() for error in _explain(one, document, schema)]
        errors += _errors_hidden_by_others(error.errors(), document, schema)
        blocks = [_block(one["loc"], schema) for one in error.errors() if one["type"] == "missing"]
        raise ConfigErrors(document.path, errors, "\n".join(filter(None, blocks))) from None
    if errors:
        raise ConfigErrors(document.path, errors)
    return made


def _errors_hidden_by_others(errors: Sequence[Any], document: Document, schema: type[BaseModel]) -> list[ConfigError]:
    """Errors that only show once others are fixed: pydantic runs the checks of a section only when its keys are valid.

    Unknown keys are taken for the nearest ones, and invalid values are left out. Errors that mention a key that was left out
    are dropped: their cause is the omission.
    """
    fixed, left_out = copy.deepcopy(document.data), set[str]()
    for error in errors:
        *above, key = error["loc"] or ("",)
        while isinstance(key, int):  # an item is not left out alone: the others would mean something else
            *above, key = above
        section: Any = fixed
        for step in above:
            inner = (
                section.get(step) if isinstance(section, dict) else section[int(step)] if isinstance(section, list) else None
            )
            section = {} if inner is None else inner
        if not isinstance(section, dict) or key not in section or error["type"] == "missing":
            continue
        value = section.pop(key)
        if error["type"] != "extra_forbidden":
            left_out.add(_words(str(key)))
        elif (near := nearest(str(key), keys(annotation_at(schema, above)))) is not None:
            section.setdefault(near, value)
    try:
        schema.model_validate(fixed)
    except ValidationError as error:
        hidden = [error for one in error.errors() for error in _explain(one, document, schema)]
        return [error for error in hidden if not any(key in _words(str(error)) for key in left_out)]
    return []


def _block(path: Sequence[int | str], schema: Any) -> str:
    """The lines that a file may have for a section that it lacks."""
    return str(getattr(schema, "examples", {}).get(".".join(map(str, path)), ""))


def _words(text: str) -> str:
    """The words of a text with spaces around them: pruning_layers and "pruning layers" alike."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


def _explain(error: Any, document: Document, schema: type[BaseModel]) -> Iterator[ConfigError]:
    """The messages of one pydantic error: where, what was given, what is allowed. A validator may report several at once."""
    path, kind, value = error["loc"], error["type"], error["input"]
    raised = error.get("ctx", {}).get("error")
    message = one_line(raised) if isinstance(raised, UserError) else error["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        *above, key = path
        allowed = keys(annotation_at(schema, above))
        hint = did_you_mean(str(key), allowed) or _suggest_section(str(key), schema)
        yield document.error(path, f"unknown key; allowed are {', '.join(allowed)}.{hint}")
    elif kind == "missing":
        hint = "; paste the lines below and adapt them, or use --data embedded" if _block(path, schema) else ""
        yield document.error(path, f"missing{hint}")
    elif kind == "literal_error":
        options = [str(option) for option in get_args(_bare(annotation_at(schema, path)))]
        yield document.error(path, f"{value!r} is not one of {', '.join(options)}.{did_you_mean(str(value), options)}")
    elif kind == "value_error" and isinstance(value, dict):  # of a section, which names its keys itself
        known = [*keys(annotation_at(schema, path)), *map(str, value)]
        for single in _split_messages(message, known):
            key, _, rest = single.partition(": ")
            below = [int(k) if k.isdigit() else k for k in key.split(".")]
            names_a_key = rest and " " not in key and str(below[0]) in known
            yield document.error((*path, *below), rest) if names_a_key else document.error(path, single)
    else:
        message = message[0].lower() + message[1:]
        yield document.error(path, message if isinstance(value, dict) else f"{message} (got {value!r})")


def _split_messages(text: str, known: Sequence[str]) -> list[str]:
    """The single messages of one such as "lr: too low; steps: none": split where the next one names a key."""
    messages: list[str] = []
    for piece in text.split("; "):
        key = piece.partition(": ")[0].partition(".")[0]
        if not messages or key in known:
            messages.append(piece)
        else:
            messages[-1] += f"; {piece}"
    return messages


def _suggest_section(key: str, schema: type[BaseModel]) -> str:
    """A hint for a key that is in the wrong section."""
    paths = [".".join(path) for path in all_keys(schema) if path[-1] == key]
    return f" It belongs to {paths[0]}." if paths else ""


def _bare(annotation: Any) -> Any:
    """A type without Annotated and without None."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        options = [option for option in get_args(annotation) if option is not type(None)]
        if len(options) == 1:
            return _bare(options[0])
    return annotation


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def keys(section: Any) -> list[str]:
    return list(section.model_fields) if is_section(section) else []


def annotation_at(schema: Any, path: Sequence[int | str]) -> Any:
    """The type of a key; None where there is no such key."""
    for step in path:
        schema, arguments = _bare(schema), get_args(_bare(schema))
        if is_section(schema):
            field = schema.model_fields.get(str(step))
            schema = None if field is None else field.annotation
        elif get_origin(schema) is dict:
            schema = arguments[1]
        elif get_origin(schema) in (tuple, list) and isinstance(step, int):
            several = len(arguments) > 1 and arguments[1] is not Ellipsis
            schema = arguments[min(step, len(arguments) - 1)] if several else arguments[0]
        else:
            return None
    return _bare(schema)


def all_keys(schema: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key of every section, lists left out."""
    for name, field in schema.model_fields.items():
        yield (*above, name)
        inner = _bare(field.annotation)
        if is_section(inner):
            yield from all_keys(inner, (*above, name))
