"""The base class of every section of a file, and the types of its values. Every number has a smallest and a largest value."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
)

MAX_PATH = 4000  # letters of a path or a name
MAX_NAME = 255  # bytes of one folder or file in a path
MAX_NUMBER = 1e15  # of a search range or a free value

# Whole numbers. The limits are far above what any training needs; they catch slips such as a rate in the place of a count.
Count = Annotated[int, Field(ge=1, le=10**9)]
"""Steps, epochs, images, tokens."""
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
Batch = Annotated[int, Field(ge=1, le=10**6)]
PairBatch = Annotated[int, Field(ge=2, le=10**6)]
"""A batch whose samples are compared with each other."""
Size = Annotated[int, Field(ge=1, le=10**5)]
"""Pixels of a side, width of a layer."""
Depth = Annotated[int, Field(ge=1, le=1000)]
"""A number of layers."""
Index = Annotated[int, Field(ge=0, lt=1000)]
"""The index of a layer or of a device."""
Workers = Annotated[int, Field(ge=0, le=1024)]
Threads = Annotated[int, Field(ge=1, le=1024)]
"""Threads, processes, GPUs."""
Seed = Annotated[int, Field(ge=0, lt=2**63)]

# Numbers with fractions.
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]
"""A share that leaves something over."""
Rate = Annotated[float, Field(gt=0, le=1000)]
"""A learning rate."""
Weight = Annotated[float, Field(ge=0, le=10**6)]
"""The weight of a loss, weight decay, noise."""
Temperature = Annotated[float, Field(ge=1e-4, le=10**4)]
Positive = Annotated[float, Field(gt=0, le=10**9)]
"""A norm, a period, seconds."""


def check_number(value: Any) -> int | float:
    """A number of moderate size, also one in quotes. Raises ValueError."""
    if isinstance(value, str):
        value = _read_number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("give a number")
    if not abs(value) <= MAX_NUMBER:  # also NaN
        raise ValueError(f"give a number between {-MAX_NUMBER:g} and {MAX_NUMBER:g}")
    return value


def _read_number(text: str) -> int | float | str:
    """The number that a text in quotes stands for; the text if it is none."""
    for kind in (int, float) if text.isascii() else ():
        try:
            return kind(text)
        except ValueError:
            continue
    return text


Number = Annotated[int | float, PlainValidator(check_number)]
"""An end of a search range, whole or not."""


def _check_kept(value: Any) -> int | str:
    if value == "all" or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 10**9):
        return value
    raise ValueError("give a number of checkpoints, at least 1, or all")


KeepCheckpoints = Annotated[int | Literal["all"], PlainValidator(_check_kept)]
"""How many of the last checkpoints are kept, besides the best one."""


def check_line(text: Any) -> str:
    """The text, if it is a single line that can be a name; a line break at its end is removed. Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError("give a text")
    text = text.rstrip("\r\n")
    if len(text) > MAX_PATH:
        raise ValueError(f"a text of {len(text):,} letters; at most {MAX_PATH:,} are allowed")
    for letter in text:
        if unicodedata.category(letter) in ("Cc", "Cs"):
            raise ValueError(f"the character U+{ord(letter):04X} is not allowed here")
    return text


Text = Annotated[str, AfterValidator(check_line)]
"""A name, a plan, an address: one line."""


def _check_path(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    path = check_line(value)
    if not path:
        raise ValueError("give a path; . is the current folder")
    if any(len(part.encode()) > MAX_NAME for part in Path(path).parts):
        raise ValueError(f"a folder or file in the path has a name of more than {MAX_NAME} bytes")
    return path


FilePath = Annotated[Path, BeforeValidator(_check_path)]
"""A file or a folder, which need not exist."""


def check_free_value(value: Any) -> Any:
    """A value of any kind, such as one of the choices of a search. Raises ValueError for what no key takes."""
    if isinstance(value, dict):
        return {check_line(key): check_free_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [check_free_value(item) for item in value]
    if isinstance(value, str):
        return check_line(value)
    return value if value is None or isinstance(value, bool) else check_number(value)


FreeValue = Annotated[Any, PlainValidator(check_free_value)]


class Problems(ValueError):
    """Several errors of one section, each as KEY: MESSAGE."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))


class Section(BaseModel):
    """A section of a file. Unknown keys are errors; values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    other_names: ClassVar[Mapping[str, str]] = {}
    """Other names that a file may give to keys -> the keys."""

    @field_validator("*", mode="before")
    @classmethod
    def _reject_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would take `steps: true` for 1."""
        annotation = str(cls.model_fields[info.field_name or ""].annotation)
        numbers = any(word in annotation for word in ("int", "float")) and not any(
            word in annotation for word in ("bool", "Any")
        )
        if numbers and any(item is True or item is False for item in (value if isinstance(value, list) else [value])):
            raise ValueError("true and false are not numbers")
        return value
