"""Arguments of a timm model in the file of a training: names and plain values."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator

from tokensieve.config.section import FreeValue, Problems
from tokensieve.errors import short


def _check_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Names and plain values: numbers of moderate size, words, true and false, lists of them."""
    problems = []
    for name, value in arguments.items():
        for item in value if isinstance(value, list) else [value]:
            if not name.isidentifier():
                problems.append(f"{name}: is not the name of an argument")
            elif isinstance(item, (list, dict)):
                problems.append(f"{name}: a list inside a list, or keys and values, cannot be an argument")
            elif isinstance(item, str) and not re.fullmatch(r"(?!nan$|inf$)[a-z_]\w*|", item, re.ASCII | re.IGNORECASE):
                problems.append(f"{name}: {short(repr(item))} is not a word; write numbers without quotes")
            elif isinstance(item, (int, float)) and not 0 <= item <= 10**6:
                problems.append(f"{name}: {item} is not between 0 and 1000000")
    if problems:
        raise Problems(problems)
    return arguments


Arguments = Annotated[dict[str, FreeValue], AfterValidator(_check_arguments)]
