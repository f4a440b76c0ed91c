"""Plans in files: a text "@FILE" means the plan that `tokensieve tune` wrote to a JSON file."""

from __future__ import annotations

import json
from pathlib import Path

from tokensieve.errors import UserError, one_line

SIGN = "@"
KEY = "plan"  # of the JSON object


def read_plan_text(text: str) -> str:
    """The plan's text in the file that "@FILE" names; a UserError if there is none."""
    name = text.removeprefix(SIGN).strip()
    if not name:
        raise UserError("a plan that begins with @ is read from a file; write @tune.json, or a method before the @")
    try:
        content = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"the plan {text}: {name} cannot be read ({error.strerror}); tokensieve tune writes such a file"
        ) from None
    except ValueError as error:
        raise UserError(f"the plan {text}: {name} is not a JSON file ({one_line(error, 100)})") from None
    plan = content.get(KEY) if isinstance(content, dict) else None
    if not isinstance(plan, str) or not plan.strip() or plan.strip().startswith(SIGN):
        raise UserError(
            f"the plan {text}: {name} holds no plan, which is a text under the key {KEY!r}; tokensieve tune writes such a file"
        )
    return plan
