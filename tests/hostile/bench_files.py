"""Damaged files of `tokensieve bench`: compared, or refused with a message."""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path
from typing import Any

from tests.hostile.attack import Attack, check_message, refused
from tests.hostile.mutate import NONSENSE, insert_nonsense, mutate_text
from tokensieve.measuring import against

VALUES = (None, True, 0, -1.5, 1e999, float("nan"), 10**400, "1.5", [], {}, {"first": "fast"}, {"first": 0}, *NONSENSE)


def _rows(rng: random.Random) -> list[dict[str, Any]]:
    rows = []
    for _ in range(rng.randint(1, 4)):
        value = rng.choice((1.5, 2, {"first": 1.4, "decode": None}, {"first": 1.1, "decode": 2.0, "total": 1}))
        row = {"model": "M", "plan": rng.choice(("anchor:60", "pool:49")), "batch_size": rng.randint(1, 2), "speedup": value}
        rows.append(row | ({"speedup_low": value, "speedup_high": value} if rng.random() < 0.5 else {}))
    return rows


def _damage(rng: random.Random, rows: list[Any]) -> str:
    """The file, with a value exchanged or its text changed."""
    kind = rng.randrange(4)
    if kind == 0:
        row = rng.choice(rows)
        row[rng.choice([*row, "speedup_low", "layers"])] = rng.choice(VALUES)
    elif kind == 1:
        rows[rng.randrange(len(rows))] = rng.choice(VALUES)
    text = json.dumps({"rows": rows})
    return mutate_text(rng, text) if kind == 2 else insert_nonsense(rng, text) if kind == 3 else text


def _compare(rng: random.Random, folder: Path) -> None:
    file = folder / "old.json"
    file.write_bytes(_damage(rng, _rows(rng)).encode(errors="surrogatepass"))
    read: list[list[dict[str, Any]]] = []
    if refused(lambda: read.append(against.read(str(file)))) is not None:
        return
    for before, now in ((read[0], _rows(rng)), (read[0], read[0])):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            against.print_comparison("old.json", against.compare(before, now))
        check_message(said.getvalue())
    assert against.compare(read[0], read[0]).same == len({(row["model"], row["plan"], row["batch_size"]) for row in read[0]})


ATTACKS = (Attack("bench files", "damaged files of an earlier bench", _compare, short=1000, seconds=5),)
