"""Errors that a user can mend: one line that says what came, what is allowed and what to type instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the input. The command line prints it in one line and exits with 2."""


class PlanWarning(UserWarning):
    """The plan can be carried out, but does not do what its text suggests."""


class Uncuttable(UserError):
    """The plan is fine, but this model has no place where it could be carried out."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotFinite(UserError):
    """NaN or infinity where numbers are needed to go on: of the input, or of weights that a training has spoilt."""


class ProcessLostError(RuntimeError):
    """Another process of the job is gone, so this one cannot go on. The command line prints it in one line and exits with 1."""


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The allowed word that a misspelt one most likely means, if any is near."""
    near = difflib.get_close_matches(word, list(options), n=1)
    return near[0] if near else None


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """A hint to append to a message: the nearest allowed word, or nothing."""
    near = nearest(word, options)
    return "" if near is None else f" Did you mean {near!r}?"


def one_line(error: object, limit: int | None = None) -> str:
    """The text of an error as one line, cut after `limit` characters."""
    return " ".join(str(error).split())[:limit]
