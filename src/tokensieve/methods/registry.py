"""The registry: a method is one function, and its keyword arguments are its options.

    @method(summary="...", paper="...", needs=("attention",))
    def mine(view: View, keep: int, *, power: float = 1.0) -> Reduction: ...

Function name = registry name = name in plans and results. What the plumbing offers on top (rest=...) is added here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tokensieve.core import Reduction
from tokensieve.errors import UserError, did_you_mean
from tokensieve.rest import RESTS

NEEDS = {
    "attention": "attention of the block before the cut, so it cannot stand at @0",
    "question": "the question, where a language model reads the tokens",
}


@dataclass(frozen=True)
class Option:
    """One keyword argument of a method: its type, its default, and for Literal types the allowed words."""

    kind: type
    default: Any
    choices: tuple[str, ...] = ()

    def read(self, text: str, name: str, method: str) -> Any:
        """The value of an option as written in a plan."""
        if self.choices:
            if text not in self.choices:
                allowed = ", ".join(self.choices)
                hint = did_you_mean(text, self.choices)
                raise UserError(f"{method}: {name}={text} is not one of {allowed}.{hint}")
            return text
        try:
            if self.kind is bool:
                return {"true": True, "false": False}[text.lower()]
            return self.kind(text)
        except (ValueError, KeyError):
            raise UserError(
                f"{method}: {name}={text} is not {_kind_name(self.kind)}; for example {name}={self.default}"
            ) from None


def _kind_name(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, kind.__name__)


@dataclass(frozen=True)
class Method:
    """A registered method: the function, and what a user and the plumbing have to know of it."""

    name: str
    decide: Callable[..., Reduction]
    summary: str
    paper: str
    needs: tuple[str, ...]
    selects: bool  # answers with a plain selection, so that rest=... applies
    options: Mapping[str, Option]
    check: Callable[[Mapping[str, Any]], None] | None = None  # raises UserError for values that make no sense
    budget: Callable[[Mapping[str, Any]], int] | None = None  # tokens kept when the plan does not say how many
    part: Any = None  # class of its trained module, made as Part(**settings); the method finds it in view.part
    mixes: bool = False  # its output tokens are mixtures of many, so that no input token belongs to one of them


REGISTRY: dict[str, Method] = {}


def describe(
    decide: Callable[..., Reduction],
    *,
    summary: str = "",
    paper: str = "",
    needs: tuple[str, ...] = (),
    selects: bool = True,
    check: Callable[[Mapping[str, Any]], None] | None = None,
    budget: Callable[[Mapping[str, Any]], int] | None = None,
    part: Any = None,
    mixes: bool = False,
) -> Method:
    """A Method from a function, without registering it."""
    unknown = set(needs) - set(NEEDS)
    if unknown:
        raise UserError(f"{decide.__name__}: needs={sorted(unknown)} is not known; known are {sorted(NEEDS)}")
    hints = get_type_hints(decide)
    options = {}
    for parameter in inspect.signature(decide).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            hint = hints.get(parameter.name, str)
            choices = get_args(hint) if get_origin(hint) is Literal else ()
            options[parameter.name] = Option(str if choices else hint, parameter.default, choices)
    if selects:
        options["rest"] = Option(str, "drop", tuple(RESTS))
    summary = summary or (inspect.getdoc(decide) or "").split("\n")[0]
    return Method(decide.__name__, decide, summary, paper, needs, selects, options, check, budget, part, mixes)


def method(**about: Any) -> Callable[[Callable[..., Reduction]], Callable[..., Reduction]]:
    """Registers the function below it; arguments as in describe()."""

    def register(decide: Callable[..., Reduction]) -> Callable[..., Reduction]:
        if decide.__name__ in REGISTRY and REGISTRY[decide.__name__].decide.__module__ != decide.__module__:
            raise UserError(f"a method named {decide.__name__!r} is registered already; choose another name")
        REGISTRY[decide.__name__] = describe(decide, **about)
        return decide

    return register


def get_method(name: str) -> Method:
    if name not in REGISTRY:
        allowed = ", ".join(sorted(REGISTRY))
        raise UserError(f"no method named {name!r}.{did_you_mean(name, REGISTRY)} Known methods: {allowed}")
    return REGISTRY[name]


def list_methods() -> list[Method]:
    """All methods, by name."""
    return [REGISTRY[name] for name in sorted(REGISTRY)]
