"""Turns pydantic's errors into messages for users: the line, what was given, what is allowed, the nearest word.

A file is read twice from the same text: as nodes, which know their lines, and as values, which pydantic checks. Every error has
a path of keys, such as ("phases", 0, "canvas"); the nodes give its line.
"""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from tokensieve.config.document import ConfigError, ConfigErrors, Document, child, is_below, key_path
from tokensieve.config.section import Problems
from tokensieve.config.yaml_tree import KeyPath
from tokensieve.errors import UserError, did_you_mean, nearest, one_line, short

MAX_EXPLAINED = 200  # errors of pydantic that are explained; a broken list may have thousands


def check_document(document: Document, schema: type[BaseModel], known: Iterable[ConfigError] = ()) -> Any:
    """The values of a file as an instance of its schema. Raises ConfigErrors with its errors and the known ones."""
    errors = [*document.errors(), *known]
    try:
        made = schema.model_validate(document.data)
    except ValidationError as error:
        found = error.errors()
        told = [one for one in found if not _follows_from_others(one, found)]
        problems = [problem for one in told[:MAX_EXPLAINED] for problem in _explain(one, document, schema)]
        if len(found) <= MAX_EXPLAINED:
            problems += _problems_hidden_by_others(found, document, schema)
        problems = [one for one in problems if not any(is_below(one.path, path) for path in document.unread)]
        errors += [problem.as_error(document) for problem in problems]
        blocks = [_block(one["loc"], schema) for one in told if one["type"] == "missing"]
        raise ConfigErrors(document.path, errors, "\n".join(filter(None, blocks)), more=len(told[MAX_EXPLAINED:])) from None
    if errors:
        raise ConfigErrors(document.path, errors)
    return made


def _follows_from_others(error: Any, errors: Sequence[Any]) -> bool:
    """Whether an error is that a list is too short, only because its items are wrong."""
    path = error["loc"]
    return error["type"] == "too_short" and any(is_below(one["loc"], path) for one in errors if one["loc"] != path)


@dataclass(frozen=True)
class Problem:
    """What is wrong at a key, with the names of the file."""

    path: KeyPath
    message: str
    is_missing: bool = False

    def as_error(self, document: Document) -> ConfigError:
        return (document.missing if self.is_missing else document.error)(self.path, self.message)


def _problems_hidden_by_others(errors: Sequence[Any], document: Document, schema: type[BaseModel]) -> list[Problem]:
    """Problems that only show once others are fixed: pydantic runs the checks of a section only when its keys are valid.

    Invalid values are left out. Unknown keys are taken for the nearest ones, unless their values are invalid there. Nothing is
    reported that is only due to this: about a key that is not in the file, or with the name of one that was left out.
    """
    fixed, left_out, guesses = copy.deepcopy(document.data), set[str](), dict[KeyPath, KeyPath]()
    for error in errors:
        path = _as_written(error["loc"], document, schema)
        while path and isinstance(path[-1], int):  # an item is not left out alone: the others would mean something else
            path = path[:-1]
        section: Any = fixed
        for step in path[:-1]:
            section = child(section, step)
        if not path or not isinstance(section, dict) or path[-1] not in section:
            continue
        value = section.pop(path[-1])
        if error["type"] != "extra_forbidden":
            left_out.add(_words(str(path[-1])))
        elif (near := nearest(str(path[-1]), keys(annotation_at(schema, path[:-1])))) is not None and near not in section:
            section[near] = value
            guess = (*path[:-1], near)
            guesses[guess] = path
    try:
        schema.model_validate(fixed)
    except ValidationError as error:
        hidden = [one for one in error.errors()[:MAX_EXPLAINED] if not any(is_below(one["loc"], path) for path in guesses)]
        problems = [problem for one in hidden for problem in _explain(one, document, schema, guesses)]
        return [
            problem
            for problem in problems
            if (problem.is_missing or document.has(problem.path))
            and not any(key in _words(f"{'.'.join(map(str, problem.path))} {problem.message}") for key in left_out)
        ]
    return []


def _as_written(
    path: Sequence[int | str], document: Document, schema: Any, guesses: Mapping[KeyPath, KeyPath] | None = None
) -> KeyPath:
    """A path with the names that the file gives to its keys. guesses: keys that the file may mean by unknown ones."""
    written: KeyPath = ()
    for depth, step in enumerate(path):
        others = getattr(annotation_at(schema, path[:depth]), "other_names", {})
        names = [step, *(name for name, own in others.items() if own == step)]
        written = next(((*written, name) for name in names if document.has((*written, name))), (*written, step))
        written = (guesses or {}).get(written, written)
    return written


def _block(path: Sequence[int | str], schema: Any) -> str:
    """The lines that a file may have for a section that it lacks."""
    return str(getattr(schema, "examples", {}).get(".".join(map(str, path)), ""))


def _words(text: str) -> str:
    """The words of a text with spaces around them: pruning_layers and "pruning layers" alike."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


def _explain(
    error: Any, document: Document, schema: type[BaseModel], guesses: Mapping[KeyPath, KeyPath] | None = None
) -> Iterator[Problem]:
    """The problems of one pydantic error: where, what was given, what is allowed. A validator may report several at once."""
    path, kind, value = error["loc"], error["type"], error["input"]
    written = _as_written(path, document, schema, guesses)
    raised, given = error.get("ctx", {}).get("error"), short(repr(value), 60)
    message = one_line(raised) if isinstance(raised, UserError) else error["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        allowed = keys(annotation_at(schema, path[:-1]))
        hint = did_you_mean(str(path[-1]), allowed) or _suggest_section(str(path[-1]), schema)
        yield Problem(written, f"unknown key; allowed are {', '.join(allowed)}.{hint}")
    elif kind == "missing":
        hint = "; paste the lines below and adapt them, or use --data embedded" if _block(path, schema) else ""
        yield Problem(written, f"missing{hint}", is_missing=True)
    elif kind == "literal_error":
        options = [str(option) for option in get_args(_bare(annotation_at(schema, path)))]
        yield Problem(written, f"{given} is not one of {', '.join(options)}.{did_you_mean(short(value), options)}")
    elif kind == "value_error" and isinstance(value, dict):  # of a section, which names its keys itself
        known = [*keys(annotation_at(schema, path)), *map(str, value)]
        for single in raised.problems if isinstance(raised, Problems) else [message]:
            key, _, rest = single.partition(": ")
            below = key_path(key)
            if rest and str(below[0]) in known:
                yield Problem(_as_written((*path, *below), document, schema, guesses), rest)
            else:
                yield Problem(written, single)
    else:
        message = _EXPECTED.get(kind, message[:1].lower() + message[1:])
        message = message.replace("tuple", "list").replace(" after validation", "")
        hint = "; write it in quotes" if kind == "string_type" and isinstance(value, (bool, int, float)) else ""
        yield Problem(written, message if isinstance(value, dict) else f"{message} (got {given}){hint}")


_EXPECTED = dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "expected keys and values") | dict.fromkeys(
    ("tuple_type", "list_type"), "expected a list"
)


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
