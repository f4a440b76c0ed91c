"""The base class of every section of a file, and types of numbers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationInfo, field_validator

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


def _kept(value: Any) -> int | str:
    if value == "all" or (isinstance(value, int) and value >= 1):
        return value
    raise ValueError("give a number of checkpoints, at least 1, or all")


KeepCheckpoints = Annotated[int | Literal["all"], PlainValidator(_kept)]
"""How many of the last checkpoints are kept, besides the best one."""


class Section(BaseModel):
    """A section of a file. Unknown keys are errors; values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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
