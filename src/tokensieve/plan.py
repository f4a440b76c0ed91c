"""Where, what, how many: a plan as text and as a value.

    plan   = step { " + " step }                anchor@6(k=10,m=50) + pool@9:16
    step   = method [@ where] [: budget] [( name=value, ... )]
    where  = L | L,L,... | *                    after L blocks have run; -1 is after the last one; * after every block
           | L.attn                             inside block L, between its attention and its MLP
           | out                                at the tower's output tokens
           | llm.L                              at the input of decoder layer L
             (none)                             after half the depth
    budget = 60 | 40% | -8                      keep 60 patch tokens, keep 40% of those that arrive, remove 8

Prefix tokens (CLS, registers) are never counted and never cut. Plan.parse and str are inverse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from tokensieve.errors import UserError, did_you_mean
from tokensieve.methods.registry import Method, get_method

EXAMPLES = "for example 'anchor@6(k=10,m=50)', 'random@3,6:70%' or 'none'"
STEP = re.compile(
    r"\s*(?P<name>[A-Za-z_]\w*)\s*(?:@\s*(?P<where>[^:()]*?)\s*)?(?::\s*(?P<budget>[^():]*?)\s*)?(?:\((?P<options>[^()]*)\)\s*)?"
)


@dataclass(frozen=True)
class Budget:
    """How many patch tokens go on, of those that arrive."""

    kind: str  # "keep", "share" or "remove"
    amount: Fraction  # tokens, or the share between 0 and 1

    @classmethod
    def parse(cls, text: str) -> Budget:
        found = re.fullmatch(r"(-?)(\d+(?:\.\d+)?)(%?)", text)
        if found is None or (found[1] and found[3]) or ("." in found[2] and not found[3]):
            raise UserError(f"budget {text!r} is not understood; write 60 (keep 60 tokens), 40% (keep 40%) or -8 (remove 8)")
        amount = Fraction(found[2])
        if amount == 0 and not found[1]:
            raise UserError(f"budget {text!r} keeps nothing; keep at least 1 token")
        if found[3]:
            if amount > 100:
                raise UserError(f"budget {text!r} is more than all tokens; at most 100%")
            return cls("share", amount / 100)
        return cls("remove" if found[1] else "keep", amount)

    def count(self, n: int) -> int:
        """Tokens kept of n: shares round up, nothing exceeds n. May be 0 or less, which no plan can carry out."""
        if self.kind == "share":
            return math.ceil(self.amount * n)
        return min(n, int(self.amount)) if self.kind == "keep" else n - int(self.amount)

    def __str__(self) -> str:
        if self.kind == "share":
            percent = self.amount * 100
            return f"{int(percent)}%" if percent.denominator == 1 else f"{float(percent)!r}%"
        return f"-{int(self.amount)}" if self.kind == "remove" else f"{int(self.amount)}"


@dataclass(frozen=True)
class Where:
    """The places of one step: layers of a tower or of a decoder, or the tower's output."""

    part: str  # "block" (after it), "attn" (inside it), "out", "llm" or "half" (after half the depth)
    layers: tuple[int, ...] = ()  # empty with part block or attn: every one

    @classmethod
    def parse(cls, text: str) -> Where:
        if text == "out":
            return cls("out")
        part, numbers = "block", text
        if text.endswith(".attn"):
            part, numbers = "attn", text.removesuffix(".attn")
        elif text.startswith("llm."):
            part, numbers = "llm", text.removeprefix("llm.")
        if numbers == "*" and part != "llm":
            return cls(part)
        if not re.fullmatch(r"-?\d+(,-?\d+)*", numbers.replace(" ", "")):
            hint = did_you_mean(text, ["out", "*", "llm.2", "6.attn"])
            raise UserError(f"place '@{text}' is not understood; write @6, @3,6,9, @-1, @*, @6.attn, @out or @llm.2.{hint}")
        layers = tuple(int(number) for number in numbers.split(","))
        if len(set(layers)) < len(layers):
            raise UserError(f"place '@{text}' names a layer twice")
        return cls(part, layers)

    def __str__(self) -> str:
        if self.part in ("out", "half"):
            return {"out": "@out", "half": ""}[self.part]
        numbers = ",".join(map(str, self.layers)) or "*"
        return {"block": f"@{numbers}", "attn": f"@{numbers}.attn", "llm": f"@llm.{numbers}"}[self.part]


@dataclass(frozen=True)
class Step:
    """One method at one or several places."""

    method: Method
    where: Where = Where("half")
    budget: Budget | None = None
    given: Mapping[str, Any] = field(default_factory=dict)  # the options that were written; the rest are defaults

    @property
    def options(self) -> dict[str, Any]:
        return {name: option.default for name, option in self.method.options.items()} | dict(self.given)

    @property
    def rest(self) -> str:
        return self.options.get("rest", "drop")

    def arguments(self) -> dict[str, Any]:
        """What the method's function gets: its own options, not those of the plumbing."""
        return {name: value for name, value in self.options.items() if not (self.method.selects and name == "rest")}

    def resolved_budget(self) -> Budget:
        """The budget, written or following from the options."""
        if self.budget is not None:
            return self.budget
        assert self.method.budget is not None
        return Budget("keep", Fraction(self.method.budget(self.options)))

    def __str__(self) -> str:
        budget = "" if self.budget is None else f":{self.budget}"
        given = ",".join(f"{name}={_value(self.given[name])}" for name in self.method.options if name in self.given)
        return f"{self.method.name}{self.where}{budget}" + (f"({given})" if given else "")


@dataclass(frozen=True)
class Plan:
    """Steps in the order in which they were written; no step at all is the stock model."""

    steps: tuple[Step, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Plan:
        text = text.strip()
        if text == "none":
            return cls()
        return cls(tuple(_parse_step(part.strip(), text) for part in _split(text)))

    @property
    def is_identity(self) -> bool:
        return not self.steps

    @property
    def is_trained(self) -> bool:
        """Whether a method of it has trained weights."""
        return any(step.method.part is not None for step in self.steps)

    def __str__(self) -> str:
        return " + ".join(map(str, self.steps)) or "none"


def make_step(
    method: Method, where: Where | None = None, budget: Budget | None = None, given: Mapping[str, Any] | None = None
) -> Step:
    """A step whose options make sense together, or an error that says what would."""
    given = dict(given or {})
    step = Step(method, where or Where("half"), budget, given)
    if method.check is not None:
        method.check(step.options)
    if budget is None and method.budget is None and method.part is None:
        raise UserError(
            f"{method.name}: how many tokens? Write for example {method.name}{step.where}:60, :40% or :-8 "
            "(keep 60, keep 40%, remove 8)"
        )
    if budget is not None and method.budget is not None and "m" in given:
        total = method.budget(step.options)
        if budget.kind != "keep" or budget.amount != total:
            raise UserError(f"{method.name}: the budget :{budget} and m={given['m']} contradict; give one of them")
    if step.rest == "zero" and step.where.part != "out":
        raise UserError(f"{method.name}: rest=zero keeps the length and saves nothing inside the tower; use it with @out")
    return step


def _split(text: str) -> Iterable[str]:
    parts = re.split(r"\+(?![^(]*\))", text)
    if any(not part.strip() for part in parts):
        raise UserError(f"plan {text!r} has an empty step; {EXAMPLES}")
    return parts


def _parse_step(text: str, whole: str) -> Step:
    found = STEP.fullmatch(text)
    if found is None:
        raise UserError(f"plan {whole!r}: step {text!r} is not understood; {EXAMPLES}")
    method = get_method(found["name"])
    if method.name == "none":
        raise UserError(f"plan {whole!r}: 'none' stands alone, it has no place and no budget")
    where = None if found["where"] is None else Where.parse(found["where"])
    budget = None if found["budget"] is None else Budget.parse(found["budget"])
    return make_step(method, where, budget, _parse_options(method, found["options"] or ""))


def _parse_options(method: Method, text: str) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value:
            raise UserError(f"{method.name}: option {pair!r} should read name=value, for example rest=merge")
        if name not in method.options:
            allowed = ", ".join(method.options) or "none"
            raise UserError(f"{method.name}: no option {name!r}.{did_you_mean(name, method.options)} Options: {allowed}")
        if name in given:
            raise UserError(f"{method.name}: option {name!r} is given twice")
        given[name] = method.options[name].read(value, name, method.name)
    return given


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
