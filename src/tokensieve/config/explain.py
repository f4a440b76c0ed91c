"""Every error of a YAML file at once, each with its line, what came, what is allowed and the nearest word.

A file is read twice from the same text: as nodes, which know their lines, and as values, which pydantic checks. Whatever is
wrong has a place, a path of keys such as ("phases", 0, "canvas"); the nodes tell the line of it.
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
    """The values as a section of this type, or Mistakes: these, and those that were found already."""
    errors = list(known)
    try:
        made = schema.model_validate(document.data)
    except ValidationError as error:
        errors += [error for one in error.errors() for error in _explain(one, document, schema)]
        errors += _errors_hidden_by_others(error.errors(), document, schema)
        raise ConfigErrors(document.path, errors) from None
    if errors:
        raise ConfigErrors(document.path, errors)
    return made


def _errors_hidden_by_others(errors: Sequence[Any], document: Document, schema: type[BaseModel]) -> list[ConfigError]:
    """Mistakes that only show once others are mended: pydantic compares the keys of sound sections only.

    Unknown keys are taken for the nearest ones, and bad values are left out; what is then told of a key that was left out, or
    with a word about it, is not the user's.
    """
    mended, left_out = copy.deepcopy(document.data), set[str]()
    for error in errors:
        *above, key = error["loc"] or ("",)
        while isinstance(key, int):  # an item is not left out alone: the others would mean something else
            *above, key = above
        section: Any = mended
        for part in above:
            found = (
                section.get(part) if isinstance(section, dict) else section[int(part)] if isinstance(section, list) else None
            )
            section = {} if found is None else found
        if not isinstance(section, dict) or key not in section or error["type"] == "missing":
            continue
        value = section.pop(key)
        if error["type"] != "extra_forbidden":
            left_out.add(_words(str(key)))
        elif (meant := nearest(str(key), keys(annotation_at(schema, above)))) is not None:
            section.setdefault(meant, value)
    try:
        schema.model_validate(mended)
    except ValidationError as error:
        shown = [error for one in error.errors() for error in _explain(one, document, schema)]
        return [error for error in shown if not any(key in _words(str(error)) for key in left_out)]
    return []


def _words(text: str) -> str:
    """The words of a text with spaces around them: pruning_layers and "pruning layers" alike."""
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


def _explain(error: Any, document: Document, schema: type[BaseModel]) -> Iterator[ConfigError]:
    """One pydantic error in a user's words: where, what came, what is allowed. A validator may have told several."""
    place, kind, came = error["loc"], error["type"], error["input"]
    raised = error.get("ctx", {}).get("error")
    told = one_line(raised) if isinstance(raised, UserError) else error["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        *above, key = place
        allowed = keys(annotation_at(schema, above))
        hint = did_you_mean(str(key), allowed) or _suggest_section(str(key), schema)
        yield document.error(place, f"unknown key; allowed are {', '.join(allowed)}.{hint}")
    elif kind == "missing":
        yield document.error(place, "missing")
    elif kind == "literal_error":
        options = [str(option) for option in get_args(_bare(annotation_at(schema, place)))]
        yield document.error(place, f"{came!r} is not one of {', '.join(options)}.{did_you_mean(str(came), options)}")
    elif kind == "value_error" and isinstance(came, dict):  # of a section, which names its keys itself
        for part in _split_messages(told, keys(annotation_at(schema, place))):
            key, _, message = part.partition(": ")
            at = [int(k) if k.isdigit() else k for k in key.split(".")]
            known = message and " " not in key and str(at[0]) in keys(annotation_at(schema, place))
            yield document.error((*place, *at), message) if known else document.error(place, part)
    else:
        told = told[0].lower() + told[1:]
        yield document.error(place, told if isinstance(came, dict) else f"{told} (got {came!r})")


def _split_messages(text: str, known: Sequence[str]) -> list[str]:
    """The errors of a message such as "lr: too low; steps: none": cut where the next one names a key."""
    parts: list[str] = []
    for piece in text.split("; "):
        key = piece.partition(": ")[0].partition(".")[0]
        if not parts or key in known:
            parts.append(piece)
        else:
            parts[-1] += f"; {piece}"
    return parts


def _suggest_section(key: str, schema: type[BaseModel]) -> str:
    """Where a key that stands in the wrong section belongs."""
    found = [".".join(place) for place in all_keys(schema) if place[-1] == key]
    return f" It belongs to {found[0]}." if found else ""


def _bare(annotation: Any) -> Any:
    """A type without what only qualifies it: Annotated, and None beside it."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        some = [option for option in get_args(annotation) if option is not type(None)]
        if len(some) == 1:
            return _bare(some[0])
    return annotation


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def keys(section: Any) -> list[str]:
    return list(section.model_fields) if is_section(section) else []


def annotation_at(schema: Any, place: Sequence[int | str]) -> Any:
    """The type of a key; None where there is no such key."""
    for part in place:
        schema, made_of = _bare(schema), get_args(_bare(schema))
        if is_section(schema):
            field = schema.model_fields.get(str(part))
            schema = None if field is None else field.annotation
        elif get_origin(schema) is dict:
            schema = made_of[1]
        elif get_origin(schema) in (tuple, list) and isinstance(part, int):
            several = len(made_of) > 1 and made_of[1] is not Ellipsis
            schema = made_of[min(part, len(made_of) - 1)] if several else made_of[0]
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
