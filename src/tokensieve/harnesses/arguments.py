"""What the harnesses hand over in --model_args: models by name, and plans in a form that survives their parsing."""

from __future__ import annotations

import os
from typing import Any

from tokensieve import embedded
from tokensieve.errors import UserError, describe_value
from tokensieve.plan import Plan, as_plan

ALLOWED = {"plan", "seed", "weights"}  # of ours among the arguments; all others are the harness's


def model_path(pretrained: Any) -> Any:
    """The folder of the embedded model, or what was given: a folder, an id on the Hub, a loaded model."""
    return os.fspath(embedded.llava_path(pretrained)) if pretrained in embedded.LLAVAS else pretrained


def read_plan(given: Any) -> Plan:
    """The plan of `plan=...`.

    The arguments are separated by commas, so a plan may have `;` for `,`, or stand in a file: `plan=@plan.txt`. Quotes around
    it are left out. The harnesses make None of "none".

    >>> str(read_plan("anchor@out(k=10;m=50)"))
    'anchor@out(k=10,m=50)'
    """
    if given is None:
        return as_plan("none")
    if not isinstance(given, str):
        raise UserError(f"plan={describe_value(given)} is not a plan; write for example plan=anchor@out:50%, with ; for ,")
    text = given.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return as_plan(text if text.startswith("@") else text.replace(";", ","))


def read_seed(given: Any) -> int:
    """The seed of `seed=...`."""
    try:
        return int(given)
    except (TypeError, ValueError):
        raise UserError(f"seed={describe_value(given)} is not a whole number") from None
