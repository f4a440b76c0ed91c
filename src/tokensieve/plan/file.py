"""Plans in files: a text "@FILE" means the plan that `tokensieve tune` wrote to a JSON file, or that a text file holds."""

from __future__ import annotations

from pathlib import Path

from tokensieve.errors import UserError, short
from tokensieve.files import read_json, read_text

SIGN = "@"
KEY = "plan"  # of the JSON object
TEXT_FILE = ".txt"  # the ending of a file that holds nothing but a plan
MAX_BYTES = 10_000_000


def read_plan_text(text: str) -> str:
    """The plan's text in the file that "@FILE" names; a UserError if there is none."""
    name = text.removeprefix(SIGN).strip()
    if not name:
        raise UserError(
            "a plan that begins with @ is read from a file; write @tune.json or @plan.txt, or a method before the @"
        )
    try:
        path = Path(name).expanduser()
        content = {KEY: read_text(path, MAX_BYTES)} if path.suffix == TEXT_FILE else read_json(path, MAX_BYTES)
    except (UserError, RuntimeError) as error:  # RuntimeError: there is no such home folder
        raise UserError(f"a plan that begins with @ is read from a file: {error}; tokensieve tune writes such a file") from None
    plan = content.get(KEY) if isinstance(content, dict) else None
    if not isinstance(plan, str) or not plan.strip() or plan.strip().startswith(SIGN):
        raise UserError(
            f"the plan {short(text)} holds no plan: a text file has it alone, a JSON file, such as tokensieve tune "
            f"writes, under the key {KEY!r}"
        )
    return plan.strip()
