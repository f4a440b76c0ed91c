"""Types of values: in every file of a training, every number has limits, and every text is a line of moderate length."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, ConfigDict, PlainValidator, TypeAdapter, ValidationError

from tokensieve import plugins
from tokensieve.config.registry import TRAININGS
from tokensieve.config.section import FilePath, FreeValue, KeepCheckpoints, Number, Seed, Text
from tokensieve.registry import resolve

SCHEMAS = [resolve(spec.schema) for name, spec in TRAININGS.items() if plugins.is_built_in(TRAININGS.origin(name))]
HUGE = (10**30, -(10**30), 1e308, -1e308, math.inf, -math.inf, math.nan)
TEXTS = ("a\0b", "a\nb", "\x1b[2J", "\ud800", "x" * 100_000)


def leaves(annotation: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The types of all single values in a type, each with its path."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            full = Annotated.__class_getitem__((field.annotation, *field.metadata)) if field.metadata else field.annotation
            yield from leaves(full, f"{path}.{name}")
    elif origin is Annotated and not (
        arguments[0] in (int, float, str, Path) or any(isinstance(one, PlainValidator) for one in arguments[1:])
    ):
        yield from leaves(arguments[0], path)
    elif origin in (Union, types.UnionType, tuple):
        for argument in arguments:
            yield from leaves(argument, path)
    elif origin is dict:
        yield from leaves(arguments[1], path)
    elif origin is not Literal and annotation not in (bool, type(None), Ellipsis):
        yield path, annotation


LEAVES = [leaf for schema in SCHEMAS for leaf in leaves(schema, schema.__name__)]


def refused(annotation: Any, value: Any) -> bool:
    try:
        TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        return True
    return False


def test_all_files_are_looked_at():
    paths = {path for path, _ in LEAVES}
    assert len(SCHEMAS) == 7 and len(paths) > 150
    assert {"ClipTraining.optimizer.lr", "ReidTraining.SOLVER.BASE_LR", "PruningTraining.search_settings.space.low"} <= paths


@pytest.mark.parametrize(("path", "annotation"), LEAVES, ids=[path for path, _ in LEAVES])
def test_every_value_has_limits(path, annotation):
    for value in HUGE:
        assert refused(annotation, value), f"{path} takes {value}"
    for text in TEXTS:
        assert refused(annotation, text), f"{path} takes {text[:10]!r}"


@pytest.mark.parametrize(
    ("annotation", "value", "made"),
    [
        (Number, "1e-5", 1e-5),
        (Number, "5", 5),
        (Number, 0.5, 0.5),
        (Seed, 2**63 - 1, 2**63 - 1),
        (KeepCheckpoints, "all", "all"),
        (Text, "a plan > folded\n", "a plan > folded"),
        (FilePath, "my folder/données", Path("my folder/données")),
        (FreeValue, [1, {"a": [True, None, "x"]}], [1, {"a": [True, None, "x"]}]),
    ],
)
def test_what_is_sane_is_taken(annotation, value, made):
    assert TypeAdapter(annotation).validate_python(value) == made


@pytest.mark.parametrize(
    ("annotation", "value", "told"),
    [
        (Number, "five", "give a number"),
        (Number, True, "give a number"),
        (Number, "٣", "give a number"),
        (Number, "9" * 5000, "between -1e"),
        (FilePath, "", "give a path"),
        (FilePath, "a/" + "x" * 300, "more than 255 bytes"),
        (FreeValue, {1: 2}, "give a text"),
        (FreeValue, {1, 2}, "give a number"),
        (KeepCheckpoints, 10**12, "give a number of checkpoints"),
    ],
)
def test_what_is_not_is_told(annotation, value, told):
    with pytest.raises(ValidationError, match=told):
        TypeAdapter(annotation).validate_python(value)
