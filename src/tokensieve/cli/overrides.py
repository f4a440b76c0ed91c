"""Words that replace keys of a YAML file: SOLVER.SEED=2, or SOLVER.SEED 2 as scripts of the field write it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokensieve.errors import UserError, short

OVERRIDE = re.compile(r"([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
HELP = "values that replace those of its keys, such as optimizer.lr=1e-3; each is read as YAML and checked like the file"


def read_overrides(words: Sequence[str]) -> dict[str, str]:
    """The values by the paths of their keys: of words KEY=VALUE, and of two words KEY VALUE."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if match := OVERRIDE.fullmatch(word):
            key, value = match.groups()
        elif not rest:
            raise UserError(f"{short(word)} has no value; after the file comes KEY=VALUE, such as SOLVER.SEED=2")
        else:
            key, value = word, rest.pop(0)
        if found.get(key, value) != value:
            raise UserError(
                f"{short(key)} is given twice, with {short(found[key])} and with {short(value)}; leave one of them out"
            )
        found[key] = value
    return found


def split_files(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Files, and the values KEY=VALUE among them. A word that is the name of a file is one, whatever is in it."""
    values = [word for word in words if OVERRIDE.fullmatch(word) and not Path(word).exists()]
    return [word for word in words if word not in values], read_overrides(values)
