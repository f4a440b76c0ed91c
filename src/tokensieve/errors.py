"""Errors that users can fix. The message states what was given, what is allowed and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable

WINDOW = 100  # characters of a long plan that are shown around the place of an error
LONGEST = 100  # letters of a word for which the nearest option is searched


class UserError(ValueError):
    """An error in the input. The command line prints its message without a traceback and exits with 2."""


class PlanError(UserError):
    """A plan that cannot be read. The message has three lines: the problem, the plan, and a caret under the place.

    Args:
        reason: the problem, and what was probably meant.
        text: the plan.
        position: the index of the character in `text` where reading stopped.
        meant: the plan that was probably meant; "": unknown.
    """

    def __init__(self, reason: str, text: str, position: int, meant: str = "") -> None:
        self.reason, self.text, self.position, self.meant = reason, printable(text), position, meant
        start = max(0, min(position - WINDOW // 2, len(text) - WINDOW))
        before, after = "..." if start else "", "..." if start + WINDOW < len(text) else ""
        shown = f"{before}{self.text[start : start + WINDOW]}{after}"
        caret = " " * (len(before) + position - start) + "^"
        super().__init__(f"{reason}\n  {shown}\n  {caret}" if text else reason)

    def __reduce__(self) -> tuple[type[PlanError], tuple[str, str, int, str]]:
        return PlanError, (self.reason, self.text, self.position, self.meant)


class PlanWarning(UserWarning):
    """The plan can be applied, but does not do what its text suggests."""


class Uncuttable(UserError):
    """The plan is valid, but this model has no position where it could be applied."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotFinite(UserError):
    """NaN or infinity where finite numbers are needed: in the input, or from weights of a training that diverged."""


class WriteError(UserError):
    """A file that cannot be written, say because the disk is full. It says nothing about what was to be written."""


class ProcessLostError(RuntimeError):
    """Another process of the job has ended. The command line prints the message without a traceback and exits with 1."""


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option that a misspelt word most likely means; None if none is near.

    Near is a typing mistake: one letter, or one in three, is changed, added, left out or swapped with the next. Upper and lower
    case, dashes at the beginning, and - for _ do not count.
    """
    if len(word) > LONGEST:
        return None
    plain, found = _plain(word), None
    best = max(len(plain), 3) // 3 + 1
    for option in options:
        other = _plain(option)
        distance = _edits(plain, other, best)
        if distance < min(best, max(len(plain), len(other))):  # some letter is the same
            best, found = distance, option
    return found


def _plain(word: str) -> str:
    return word.lower().lstrip("-").replace("-", "_").replace(" ", "_")


def _edits(first: str, second: str, limit: int) -> int:
    """How many letters to change, add, leave out or swap with the next to make one word of the other; `limit` if not fewer."""
    if abs(len(first) - len(second)) >= limit:
        return limit
    before, last = [0] * (len(second) + 1), list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        row = [i]
        for j, other in enumerate(second, 1):
            edits = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != other))
            if i > 1 and j > 1 and (letter, first[i - 2]) == (second[j - 2], other):
                edits = min(edits, before[j - 2] + 1)
            row.append(edits)
        if min(row) >= limit and min(last) >= limit:
            return limit
        before, last = last, row
    return min(last[-1], limit)


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """A hint to append to a message: the nearest option, or nothing."""
    near = nearest(word, options)
    return "" if near is None else f" Did you mean {near!r}?"


def printable(text: str) -> str:
    """The text with every whitespace character as a space and every other unprintable character as a question mark."""
    return "".join(letter if letter.isprintable() else " " if letter.isspace() else "?" for letter in text)


def short(text: object, limit: int = 40) -> str:
    """A text of a user for a message: printable, and cut if it is long."""
    shown = printable(str(text))
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def one_line(error: object, limit: int | None = None) -> str:
    """The text of an error as one printable line, cut after `limit` characters. For a PlanError: the plan and the reason."""
    text = f"plan {error.text!r}: {error.reason}" if isinstance(error, PlanError) else str(error)
    return " ".join(printable(text).split())[:limit]


def describe_value(value: object) -> str:
    """A value and its type for a message, such as "3 (int)"; long values are cut."""
    text = printable(repr(value))
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"
