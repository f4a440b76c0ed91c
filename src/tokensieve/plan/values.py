"""Plans as hashable values. Plan.parse and str are inverse; `grammar` describes the text.

Prefix tokens (CLS, registers) are never counted and never cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, TypeVar, get_args

from tokensieve.errors import WINDOW, PlanError, UserError, describe_value, did_you_mean, nearest, short
from tokensieve.methods.registry import REGISTRY, Method, option_text
from tokensieve.plan.file import SIGN, read_plan_text
from tokensieve.plan.grammar import (
    EXAMPLES,
    MAX_LENGTH,
    BudgetKind,
    BudgetScope,
    OptionText,
    PositionKind,
    Reader,
    StepText,
    Unreadable,
    clean,
    read_budget,
    read_steps,
    read_where,
)
from tokensieve.plan.mixes import MIXES
from tokensieve.rest import MERGE_OPTIONS

T = TypeVar("T")
MAX_NORM = 4  # of the option `norm`: higher powers of a ratio of norms blow tokens up


@dataclass(frozen=True)
class Budget:
    """How many of the patch tokens that arrive are kept. `Budget.parse("40%")` makes one.

    Args:
        kind: "keep" (so many tokens), "share" (a share of the tokens that arrive) or "remove" (so many tokens fewer).
        amount: a number of tokens, or for "share" a number above 0 and up to 1.
        scope: "image" (of each image, whose tiles share it), "tile" (of each tile) or "prompt" (of all images of a prompt,
            which share it).
    """

    kind: BudgetKind
    amount: Fraction
    scope: BudgetScope = "image"

    def __post_init__(self) -> None:
        if self.scope not in get_args(BudgetScope):
            raise UserError(f"budget: scope={self.scope!r} is not one of {', '.join(get_args(BudgetScope))}")
        if self.kind not in get_args(BudgetKind):
            raise UserError(f"budget: kind={self.kind!r} is not one of {', '.join(get_args(BudgetKind))}")
        is_number = isinstance(self.amount, (int, float, Fraction)) and not isinstance(self.amount, bool)
        if not is_number or (isinstance(self.amount, float) and not math.isfinite(self.amount)):
            raise UserError(f"budget: the amount is a number of tokens or a share, not {describe_value(self.amount)}")
        amount = Fraction(str(self.amount))  # of the float 0.4: two fifths
        object.__setattr__(self, "amount", amount)
        if self.kind == "share":
            if not 0 < amount <= 1:
                raise UserError(f"budget: a share is above 0 and at most 1, not {float(amount)}")
        elif amount.denominator != 1 or amount < (self.kind == "keep"):
            least = 1 if self.kind == "keep" else 0
            raise UserError(f"budget: the tokens to {self.kind} are a whole number of at least {least}, not {float(amount)}")

    @classmethod
    def parse(cls, text: str) -> Budget:
        """The budget of a text such as "60", "40%", "-8", "64/tile" or "256/prompt"."""
        return cls(*_read_whole(text, "budget", read_budget))

    def count(self, n: int) -> int:
        """The number of tokens kept of n. Shares are rounded up. The result may be below 1, which no plan can carry out."""
        if self.kind == "share":
            return math.ceil(self.amount * n)
        return min(n, int(self.amount)) if self.kind == "keep" else n - int(self.amount)

    def __str__(self) -> str:
        scope = "" if self.scope == "image" else f"/{self.scope}"
        if self.kind == "share":
            return f"{_decimal(self.amount * 100)}%{scope}"
        return f"{'-' * (self.kind == 'remove')}{int(self.amount)}{scope}"


@dataclass(frozen=True)
class Where:
    """The positions of one step: layers of a tower or of a decoder, or the tower's output.

    Args:
        part: "block" (after it), "attn" (inside it), "out", "llm" (a decoder layer) or "half" (those of the
            method, or after half the depth).
        layers: numbers of layers. Empty with "block" or "attn": every one.
    """

    part: PositionKind
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.part not in get_args(PositionKind):
            raise UserError(f"place: part={self.part!r} is not one of {', '.join(get_args(PositionKind))}")
        if not isinstance(self.layers, (tuple, list)) or not all(type(layer) is int for layer in self.layers):
            raise UserError(f"place: layers are whole numbers, not {describe_value(self.layers)}")
        object.__setattr__(self, "layers", tuple(self.layers))
        if len(set(self.layers)) < len(self.layers):
            raise UserError(f"place '{self}' names a layer twice")

    @classmethod
    def parse(cls, text: str) -> Where:
        """The positions of a text such as "6", "3,6", "*", "6.attn", "out" or "llm.2"."""
        return cls(*_read_whole(text, "place", read_where))

    def __str__(self) -> str:
        if self.part in ("out", "half"):
            return {"out": "@out", "half": ""}[self.part]
        numbers = ",".join(map(str, self.layers)) or "*"
        return {"block": f"@{numbers}", "attn": f"@{numbers}.attn", "llm": f"@llm.{numbers}"}[self.part]


@dataclass(frozen=True, repr=False)
class Step:
    """One method at one or several positions. `make_step` checks that its options fit together."""

    method: Method
    where: Where = Where("half")
    budget: Budget | None = None
    explicit_options: tuple[
        tuple[str, Any], ...
    ] = ()  # those that the plan states, in the method's order; a mapping is accepted

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise UserError(
                f"the method of a step is a Method, such as get_method('anchor'), not {describe_value(self.method)}"
            )
        if not isinstance(self.where, Where):
            raise UserError(f"the place of a step is a Where, such as Where.parse('6'), not {describe_value(self.where)}")
        if self.budget is not None and not isinstance(self.budget, Budget):
            raise UserError(f"the budget of a step is a Budget, such as Budget.parse('60'), not {describe_value(self.budget)}")
        given, known = dict(self.explicit_options), self.method.options
        for name in given:
            if name not in known:
                raise UserError(f"{_no_option(self.method, name)}.{did_you_mean(str(name), known)}")
        checked = tuple((name, known[name].check(given[name], name, self.method.name)) for name in known if name in given)
        object.__setattr__(self, "explicit_options", checked)

    @property
    def options(self) -> dict[str, Any]:
        """All options: those that the plan states, and the defaults of the others."""
        return {name: option.default for name, option in self.method.options.items()} | dict(self.explicit_options)

    @property
    def rest(self) -> str:
        """How the tokens are handled that are not selected."""
        return str(self.options.get("rest", "drop"))

    @property
    def merges(self) -> bool:
        """Whether the engine merges tokens: with rest=merge, or by a method that merges, as its options norm and sizes say."""
        return self.rest == "merge" or self.method.norm is not None

    @property
    def keeps_sizes(self) -> bool:
        """Whether merged tokens keep their sizes, which later attention counts."""
        return bool(self.options.get("sizes", "yes") == "yes")

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the method's function: all options but those that the engine carries out."""
        return {name: value for name, value in self.options.items() if name not in self.method.engine_options}

    def resolved_where(self, depth: int = 12, decoder: int = 32) -> Where:
        """The positions that the plan states, or those of the method in a tower and a decoder of these depths."""
        default = self.method.where
        if self.where.part != "half" or not default:
            return self.where
        return Where.parse(default if isinstance(default, str) else default(depth, decoder))

    def resolved_budget(self) -> Budget:
        """The budget that the plan states, or the one that follows from the options."""
        if self.budget is not None:
            return self.budget
        assert self.method.budget is not None
        return Budget.parse(str(self.method.budget(self.options)))

    def __str__(self) -> str:
        budget = "" if self.budget is None else f":{self.budget}"
        options = ",".join(f"{name}={option_text(value)}" for name, value in self.explicit_options)
        return f"{self.method.name}{self.where}{budget}" + (f"({options})" if options else "")

    def __repr__(self) -> str:
        return f"Step({str(self)!r})"


@dataclass(frozen=True, repr=False)
class Plan:
    """Which methods reduce the tokens, where, and to how many. A hashable value; `str(plan)` is its text.

    Args:
        steps: in the order in which they are written; none at all is the unchanged model.

    Example:
        >>> plan = tokensieve.Plan.parse("anchor@6(k=10,m=50) + pool@9:16")
        >>> str(plan), plan.steps[1].budget.count(60)
        ('anchor@6(k=10,m=50) + pool@9:16', 16)
    """

    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.steps, (tuple, list)) or not all(isinstance(step, Step) for step in self.steps):
            raise UserError(
                f"a Plan is made of steps; use Plan.parse('anchor@6:60') for a text, not {describe_value(self.steps)}"
            )
        object.__setattr__(self, "steps", tuple(self.steps))
        if sum(step.method.on_image for step in self.steps) > 1:
            raise UserError(f"{self}: the image can be resized once")

    @property
    def image_step(self) -> Step | None:
        """The step that acts on the image, before the tower."""
        return next((step for step in self.steps if step.method.on_image), None)

    @property
    def token_steps(self) -> tuple[Step, ...]:
        """The steps that act on tokens."""
        return tuple(step for step in self.steps if not step.method.on_image)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan of a text.

        Args:
            text: steps METHOD@WHERE:BUDGET(OPTION=VALUE,...) joined by "+", or "none". WHERE is 6, 3,6, -1, *, 6.attn, out
                or llm.2; BUDGET is 60, 40% or -8, of each image, or with /tile or /prompt behind it. Everything but METHOD may
                be left out where it has a default. A text may also be the name of a mix, such as "2x", or "@FILE", a file that
                `tokensieve tune` wrote.

        Raises:
            UserError: the text is not a plan. The message shows the place and, where it can, what was probably meant.

        Example:
            >>> tokensieve.Plan.parse("anchor@6:60(rest=merge)")
            Plan('anchor@6:60(rest=merge)')
        """
        if not isinstance(text, str):
            raise UserError(f"a plan is a text, {EXAMPLES}, not {describe_value(text)}")
        if text.lstrip().startswith(SIGN):
            text = read_plan_text(text.strip())
        try:
            text = clean(text)
            return cls(_read_plan(text))
        except Unreadable as error:
            meant, hint = _suggest(text, error)
            raise PlanError(error.reason + hint, text, error.position, meant) from None

    @property
    def is_identity(self) -> bool:
        """Whether the plan changes nothing."""
        return not self.steps

    @property
    def is_trained(self) -> bool:
        """Whether one of its methods has a trained part."""
        return any(step.method.part is not None for step in self.steps)

    def __str__(self) -> str:
        return " + ".join(map(str, self.steps)) or "none"

    def __repr__(self) -> str:
        return f"Plan({str(self)!r})"


def as_plan(plan: Plan | str) -> Plan:
    """A plan, or the plan of a text; a UserError for any other value."""
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, (list, tuple)):
        joined = " + ".join(map(str, plan))
        raise UserError(f"a plan is one text, not {describe_value(plan)}; join its steps with '+', as in {joined[:100]!r}")
    return Plan.parse(plan)


def make_step(
    method: Method, where: Where | None = None, budget: Budget | None = None, options: Mapping[str, Any] | None = None
) -> Step:
    """A step whose budget and options fit together; a UserError otherwise."""
    step = Step(method, where or Where("half"), budget, tuple((options or {}).items()))
    given = dict(step.explicit_options)
    if method.check is not None:
        method.check(step.options)
    if method.on_image:
        if where is not None or budget is not None:
            raise UserError(f"{method.name} acts on the image before the tower: leave its position and its budget out")
        return step
    if budget is None and method.budget is None and method.part is None:
        raise UserError(
            f"{method.name}: how many tokens? Write for example {method.name}{step.where}:60, :40% or :-8 "
            "(keep 60, keep 40%, remove 8)"
        )
    if budget is not None and budget.scope == "tile" and step.where.part == "llm":
        raise UserError(
            f"{method.name}: in the language model a method ranks all tokens of an image together, so there is no budget for "
            f"each tile; write :{replace(budget, scope='image')}, or cut @out"
        )
    if budget is not None and method.budget is not None and "m" in given:
        total = method.budget(step.options)
        if budget.kind != "keep" or budget.amount != total or budget.scope != "image":
            raise UserError(f"{method.name}: the budget :{budget} and m={given['m']} contradict; give one of them")
    if "attention" in given and step.where.part != "llm":
        raise UserError(f"{method.name}: attention={given['attention']} is an option of decoder layers; use it with @llm.L")
    for name in MERGE_OPTIONS:
        if name in given and not step.merges:
            raise UserError(f"{method.name}: {name}={option_text(given[name])} is an option of merging; add rest=merge")
    if not 0 <= step.options.get("norm", 0.0) <= MAX_NORM:
        raise UserError(
            f"{method.name}: norm={step.options['norm']} is not from 0 to {MAX_NORM}; 0 is plain averaging, 1 restores norms"
        )
    if step.rest == "zero" and step.where.part != "out":
        raise UserError(f"{method.name}: rest=zero keeps the length and saves nothing inside the tower; use it with @out")
    return step


def _decimal(number: Fraction) -> str:
    """A positive number with all its digits; with 17 if it has no end."""
    digits = 0
    while digits < MAX_LENGTH and 10**digits % number.denominator:
        digits += 1
    if digits == MAX_LENGTH:
        return f"{float(number):.17f}".rstrip("0")
    whole, part = divmod(number.numerator * 10**digits // number.denominator, 10**digits)
    return f"{whole}.{part:0{digits}d}" if digits else str(whole)


def _read_plan(text: str) -> tuple[Step, ...]:
    if text == "none":
        return ()
    text = MIXES.get(text, text)
    return tuple(_build_step(step) for step in read_steps(text, REGISTRY))


def _build_step(step: StepText) -> Step:
    method = REGISTRY[step.name]
    if method.name == "none":
        raise Unreadable("'none' stands alone, it has no place and no budget", step.position)
    try:
        where = None if step.where is None else Where(*step.where)
    except UserError as error:
        raise Unreadable(str(error), step.where_position) from None
    budget = None if step.budget is None else Budget(*step.budget)
    return make_step(method, where, budget, {option.name: _read_option(method, option) for option in step.options})


def _read_option(method: Method, option: OptionText) -> Any:
    if option.name not in method.options:
        near = nearest(option.name, method.options)
        edits = [] if near is None else [(option.position, option.position + len(option.name), near)]
        raise Unreadable(_no_option(method, option.name), option.position, edits, did_you_mean(option.name, method.options))
    try:
        return method.options[option.name].read(option.value, option.name, method.name)
    except UserError as error:
        raise Unreadable(str(error), option.position) from None


def _no_option(method: Method, name: object) -> str:
    return f"{method.name}: no option {short(name)!r} (options: {', '.join(method.options) or 'none'})"


def _read_whole(text: str, what: str, read: Callable[[Reader], T]) -> T:
    """What `read` makes of a whole text, of which nothing may be left."""
    if not isinstance(text, str):
        raise UserError(f"a {what} is a text, not {describe_value(text)}")
    try:
        reader = Reader(clean(text))
        value = read(reader)
    except Unreadable as error:
        raise UserError(error.reason) from None
    if reader.next:
        raise UserError(f"{what} {short(reader.text)!r} is not understood")
    return value


def _suggest(text: str, error: Unreadable) -> tuple[str, str]:
    """What was probably meant ("" if unknown), and the hint about it: the first edit of the text that makes it a plan."""
    for start, end, replacement in error.edits:
        try:
            meant = str(Plan(_read_plan(clean(text[:start] + replacement + text[end:]))))
        except (UserError, Unreadable):
            continue
        return meant, f". Did you mean {meant!r}?" if len(meant) <= 2 * WINDOW else ""
    return "", f".{error.hint}" if error.hint else ""
