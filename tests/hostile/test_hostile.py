"""The short form of every class of hostile tries, with a fixed seed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.hostile.attack import Attack, find_attacks, refused, run_tries
from tokensieve import UserError

SEED = 1


@pytest.mark.parametrize(
    "attack",
    [pytest.param(one, id=one.name, marks=[pytest.mark.slow] if one.is_slow else []) for one in find_attacks().values()],
)
def test_no_try_fails(attack):
    failures = run_tries(attack, SEED, range(attack.short))
    assert not failures, "\n".join(map(str, failures))


def test_tries_that_fail_are_counted_and_can_be_repeated():
    def one_try(rng: random.Random, folder: Path) -> None:
        assert rng.random() < 0.5, "unlucky"

    attack = Attack("coin", "", one_try)
    failures = run_tries(attack, 3, range(100))
    assert 20 < len(failures) < 80
    assert run_tries(attack, 3, [failures[-1].number]) == failures[-1:]


def test_a_raw_error_a_long_message_and_control_characters_are_failures():
    def say(message: str) -> None:
        raise UserError(message)

    assert refused(lambda: None) is None
    assert str(refused(lambda: say("too large"))) == "too large"
    for message in ("", "x" * 3000, "\x1b[2J"):
        with pytest.raises(AssertionError):
            refused(lambda message=message: say(message))
    with pytest.raises(ZeroDivisionError):
        refused(lambda: 1 / 0)
