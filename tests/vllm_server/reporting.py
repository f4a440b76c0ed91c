"""One line for each check, and the names of those that failed."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

failures: list[str] = []


def report(name: str, is_good: bool, detail: str = "") -> None:
    print(f"{'ok    ' if is_good else 'FAILED'} {name}{': ' if detail else ''}{detail}", flush=True)
    if not is_good:
        failures.append(name)


def attempt(name: str, check: Callable[[], Any]) -> None:
    """Runs a check; an error is a failure of it."""
    try:
        check()
    except Exception as error:
        traceback.print_exc()
        report(name, False, f"{type(error).__name__}: {str(error)[-400:]}")
