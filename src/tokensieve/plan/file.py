"""Plans in files: a text "@FILE" means the plan that `tokensieve tune` wrote to a JSON file."""

from __future__ import annotations

from pathlib import Path

from tokensieve.errors import UserError, short
from tokensieve.files import read_json

SIGN = "@"
KEY = "plan"  # of the JSON object
MAX_BYTES = 10_000_000


def read_plan_text(text: str) -> str:
    """The plan's text in the file that "@FILE" names; a UserError if there is none."""
    name = text.removeprefix(SIGN).strip()
    if not name:
        raise UserError("a plan that begins with @ is read from a file; write @tune.json, or a method before the @")
    try:
        content = read_json(Path(name).expanduser(), MAX_BYTES)
    except (UserError, RuntimeError) as error:  # RuntimeError: there is no such home folder
        raise UserError(f"a plan that begins with @ is read from a file: {error}; tokensieve tune writes such a file") from None
    plan = content.get(KEY) if isinstance(content, dict) else None
    if not isinstance(plan, str) or not plan.strip() or plan.strip().startswith(SIGN):
        raise UserError(
            f"the plan {short(text)} holds no plan, which is a text under the key {KEY!r}; tokensieve tune writes such a file"
        )
    return plan
