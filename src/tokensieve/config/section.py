"""TODO docstring."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of a file. Keys it does not know are errors; nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would take `steps: true` for 1."""
        wanted = str(cls.model_fields[info.field_name or ""].annotation)
        numbers = any(word in wanted for word in ("int", "float")) and not any(word in wanted for word in ("bool", "Any"))
        if numbers and any(item is True or item is False for item in (value if isinstance(value, list) else [value])):
            raise ValueError("true and false are no numbers")
        return value
