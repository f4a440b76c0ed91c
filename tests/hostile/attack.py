"""What a class of hostile tries is, and how tries are run and counted."""

from __future__ import annotations

import importlib
import pkgutil
import random
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tests.hostile
from tokensieve import UserError

MAX_MESSAGE = 2000  # characters of an error message


@dataclass(frozen=True)
class Attack:
    """A class of hostile tries.

    Args:
        name: of the class, such as "plans".
        summary: what is tried, for the table.
        one_try: raises if tokensieve fails the try. It gets its own random numbers and an empty folder.
        per_thousand: tries of `make attack` for each 1,000 that are asked for; fewer where a try is expensive.
        short: tries of `make test`.
        seconds: a try that takes longer has hung.
        is_slow: whether the short form takes more than a few seconds.
    """

    name: str
    summary: str
    one_try: Callable[[random.Random, Path], None]
    per_thousand: int = 1000
    short: int = 100
    seconds: float = 60.0
    is_slow: bool = False

    def n_tries(self, tries: int) -> int:
        """The number of tries in the long form."""
        return max(1, tries * self.per_thousand // 1000)


@dataclass(frozen=True)
class Failure:
    """One try that failed; `run_tries(attack, seed, [number])` repeats it."""

    attack: str
    seed: int
    number: int
    problem: str

    def __str__(self) -> str:
        return f"{self.attack}, seed {self.seed}, try {self.number}: {self.problem}"


def find_attacks() -> dict[str, Attack]:
    """All classes of tries, by name."""
    found: dict[str, Attack] = {}
    for module in pkgutil.iter_modules(tests.hostile.__path__):
        if not module.name.startswith(("test_", "__")):
            for attack in getattr(importlib.import_module(f"{tests.hostile.__name__}.{module.name}"), "ATTACKS", ()):
                assert attack.name not in found, f"two classes of tries are named {attack.name}"
                found[attack.name] = attack
    return found


def run_tries(attack: Attack, seed: int, numbers: Iterable[int]) -> list[Failure]:
    """Runs the tries with these numbers; those that failed."""
    failures = []
    for number in numbers:
        folder = Path(tempfile.mkdtemp(prefix=f"{attack.name}-"))
        started = time.monotonic()
        try:
            attack.one_try(random.Random(f"{attack.name} {seed} {number}"), folder)
            if (took := time.monotonic() - started) > attack.seconds:
                raise AssertionError(f"hung: it took {took:.0f} s")
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            where = traceback.extract_tb(error.__traceback__)[-1]
            problem = f"{type(error).__name__}: {error}"[:500] + f" ({Path(where.filename).name}:{where.lineno})"
            failures.append(Failure(attack.name, seed, number, problem))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return failures


def run_chunk(name: str, seed: int, numbers: list[int]) -> tuple[list[Failure], float]:
    """`run_tries` in a process of its own; what failed, and the seconds it took."""
    import torch

    torch.set_num_threads(1)
    started = time.monotonic()
    return run_tries(find_attacks()[name], seed, numbers), time.monotonic() - started


def refused(call: Callable[[], Any]) -> UserError | None:
    """None if the call returns; the error if it is a UserError whose message can be shown. Others are raised."""
    try:
        call()
    except UserError as error:
        check_message(str(error))
        return error
    return None


def check_message(text: str) -> None:
    """A message for users says something, is not endless, and cannot steer a terminal."""
    assert text.strip(), "an empty message"
    assert len(text) <= MAX_MESSAGE, f"a message of {len(text)} characters: {text[:200]!r}..."
    bad = sorted({letter for letter in text if letter != "\n" and not letter.isprintable()})
    assert not bad, f"a message with the characters {bad}: {text[:200]!r}"
