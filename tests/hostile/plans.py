"""Texts that are nearly plans, or nothing like one: parsed to a plan that prints and parses back, or refused with a message."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path

import torch

from tests.hostile.attack import Attack, refused
from tests.hostile.mutate import insert_nonsense, mutate_text
from tokensieve import Plan, UserError
from tokensieve.methods.registry import REGISTRY
from tokensieve.plan import Budget, Where, as_plan

WHERES = ("", "@6", "@3,6,9", "@-1", "@*", "@6.attn", "@*.attn", "@out", "@llm.2", "@llm.1,2", "@0", "@-3", "@2,-3")
BUDGETS = ("", ":60", ":40%", ":-8", ":33.3333333333333333333%", ":0.000001%", ":1", ":100%", ":99999999999999999999")
OPTIONS = ("", "(k=10,m=50)", "(rest=merge)", "(rest=zero)", "(alpha=0.5)", "(norm=2,rest=merge)", "(size=192)", "(scale=0.5)")
VALUES = (None, 3, 2.5, b"none", [], ["anchor@6:60"], {"plan": "none"}, object(), True, float("nan"), Path("x"), torch.zeros(2))


def plan_text(rng: random.Random) -> str:
    """A text in the form of a plan; its names exist, but it need not be valid."""
    names = sorted(REGISTRY)
    steps = ["".join(map(rng.choice, (names, WHERES, BUDGETS, OPTIONS))) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    return " + ".join(steps)


def _text(rng: random.Random) -> str:
    text = plan_text(rng)
    kind = rng.randrange(6)
    if kind == 0:
        return text
    if kind == 1:
        return insert_nonsense(rng, text)
    if kind == 2:  # one part repeated until it is long
        at = rng.randrange(len(text) + 1)
        return text[:at] + rng.choice(" @:(,+)%-.9a_\t٣") * rng.choice((50, 500, 1900, 5000, 100_000)) + text[at:]
    return mutate_text(rng, text)


def _parse(rng: random.Random, folder: Path) -> None:
    if rng.random() < 0.05:
        value = rng.choice(VALUES)
        assert isinstance(refused(lambda: Plan.parse(value)), UserError)
        refused(lambda: as_plan(value))
        refused(lambda: Budget.parse(value))
        refused(lambda: Where.parse(value))
        return
    text = _text(rng)
    plans = []
    if refused(lambda: plans.append(Plan.parse(text))) is not None:
        return
    plan = plans[0]
    printed = str(plan)
    assert printed.isascii() or not text.isascii()
    for same in (Plan.parse(printed), copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert same == plan and str(same) == printed and hash(same) == hash(plan)
    for step in plan.token_steps:  # a budget counts tokens whatever arrives
        if step.budget is not None:
            for n in (1, 7, 196, 16_000):
                assert step.budget.count(n) <= n


def _pieces(rng: random.Random, folder: Path) -> None:
    """Budgets and positions alone."""
    kind = rng.choice((Budget, Where))
    pieces = [piece[1:] for piece in (BUDGETS if kind is Budget else WHERES) if piece]
    text = mutate_text(rng, rng.choice(pieces))
    made = []
    if refused(lambda: made.append(kind.parse(text))) is None:
        printed = str(made[0])
        assert kind.parse(printed.lstrip("@")) == made[0], printed


ATTACKS = (
    Attack("plans", "texts that are nearly plans, up to 100,000 characters", _parse, short=2000, seconds=5),
    Attack("budgets", "budgets and positions alone", _pieces, short=1000, seconds=5),
)
