"""Class names of the user's own data: of folders or labels, of a file beside them, or of --classnames. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokensieve.errors import UserError, short
from tokensieve.files import read_text

CLASSES, TEMPLATES = "classes.txt", "templates.txt"
DEFAULT_TEMPLATES = ("a photo of a {c}.", "a picture of a {c}.", "{c}")


def name_classes(found: Sequence[str], given: Sequence[str], data: str) -> tuple[list[str], list[int]]:
    """The class names, and the index of the class of each word in `found` (names of folders, or different labels).

    given: the user's names. They are matched by the words, and those without images are classes too. If no word is among
    them, they name the words in their order: numbers (from 0) by value, others sorted. Without them, the words are the names.
    """
    if not given:
        names = [_readable(word) for word in found]
        return names, list(range(len(found)))
    if twice := [name for name in given if given.count(name) > 1]:
        raise UserError(f"{data}: the class name {short(twice[0])!r} comes twice.")
    by_name = {_readable(name).lower(): number for number, name in enumerate(given)}
    matched = [by_name.get(_readable(word).lower()) for word in found]
    if all(number is not None for number in matched):
        return list(given), [number for number in matched if number is not None]
    if any(number is not None for number in matched):
        lost = next(word for word, number in zip(found, matched, strict=True) if number is None)
        raise UserError(f"{data}: the class {short(lost)!r} is not among the class names {short(', '.join(given), 200)}.")
    if _are_numbers(found):
        values = list(map(int, found))
        if not 0 <= min(values) <= max(values) < len(given):
            raise UserError(
                f"{data}: the labels go from {min(values)} to {max(values)}, and {len(given)} class names are for 0 to "
                f"{len(given) - 1}."
            )
        return list(given), values
    if len(given) != len(found):
        raise UserError(
            f"{data}: there are {len(given)} class names for {len(found)} classes ({short(', '.join(found), 200)}), and none "
            "of them is one of these."
        )
    return list(given), list(range(len(found)))


def sort_words(words: Sequence[str]) -> list[str]:
    """The different words in order: numbers by value."""
    different = list(dict.fromkeys(words))
    return sorted(different, key=int) if _are_numbers(different) else sorted(different)


def _are_numbers(words: Sequence[str]) -> bool:
    return all(word.isascii() and word.isdigit() and len(word) < 10 for word in words)


def _readable(word: str) -> str:
    return " ".join(word.replace("_", " ").split())


def read_classes(folder: Path, found: Sequence[str]) -> list[str]:
    """The names in classes.txt: one a line, or the name of a folder or a label, a tab, and the name of the class.

    The second form comes back in the order of `found`, with further classes at the end. Empty without such a file.
    """
    path = folder / CLASSES
    if not path.exists():
        return []
    lines = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    pairs = dict(line.split("\t", 1) for line in lines if "\t" in line)
    if not pairs:
        return lines
    if len(pairs) < len(lines):
        raise UserError(f"{short(path, 200)}: every line or none has a tab, once for each class.")
    if lost := [word for word in found if word not in pairs]:
        raise UserError(f"{short(path, 200)} has no name for the class {short(lost[0])!r}.")
    return [pairs[word].strip() for word in found] + [name.strip() for word, name in pairs.items() if word not in found]


def read_templates(folder: Path) -> list[str]:
    """The prompts in templates.txt, one a line with {c} for the class; empty without such a file."""
    path = folder / TEMPLATES
    return [line.strip() for line in read_text(path).splitlines() if line.strip()] if path.exists() else []


def check_enough(classes: Sequence[str], data: str, advice: str) -> None:
    """A UserError for a single class."""
    if len(classes) < 2:
        raise UserError(f"{data} has one class only ({short(classes[0])}), so every image would be right: {advice}.")
