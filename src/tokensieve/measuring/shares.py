"""Plans with shares of tokens instead of numbers, for the same model with images of another size."""

from __future__ import annotations

import math
from fractions import Fraction

from tokensieve.cutting.handle import Handle
from tokensieve.cutting.placement import place_plan
from tokensieve.errors import UserError
from tokensieve.models.tower import Tower
from tokensieve.plan import Budget, Plan, Where, make_step


def in_shares(handle: Handle, tower: Tower | None, depth: int | None, n: int) -> Plan:
    """The plan with every number of tokens as a share of the tokens that arrive, for images of n tokens.

    Shares are rounded down to as many digits as needed to keep the same numbers of tokens. depth: of the language model.
    """
    if handle.plan.image_step is not None:
        raise UserError(f"{handle.plan.image_step}: no break-even point is measured for plans that change the size of images")
    steps = []
    for cut in place_plan(handle.plan, tower, 0, depth, handle.parts):
        keep = cut.count(n)
        given = {name: value for name, value in cut.step.explicit_options if name != "m" or cut.step.method.budget is None}
        if cut.budget.kind == "share" or keep < n:
            share = cut.budget if cut.budget.kind == "share" else token_share(keep, n)
            steps.append(make_step(cut.step.method, Where.parse(cut.name), share, given))
        n = cut.outputs(n)
    return Plan(tuple(steps))


def token_share(keep: int, n: int) -> Budget:
    """keep / n as a share in hundredths of a percent, or finer where that would keep fewer tokens."""
    units = 10_000
    while math.ceil(Fraction(keep * units // n, units) * n) < keep:
        units *= 10
    return Budget("share", Fraction(keep * units // n, units))
