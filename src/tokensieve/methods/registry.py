"""The registry of methods. A method is one function, and its keyword arguments are its options.

    @method(summary="...", paper="...", needs=("attention",))
    def mine(view: View, keep: int, *, power: float = 1.0) -> Reduction: ...

The name of the function is the name in plans and results. The option `rest` of selecting methods is added here.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from tokensieve.core import Reduction
from tokensieve.errors import UserError, describe_value, did_you_mean
from tokensieve.registry import Registry
from tokensieve.rest import RESTS

Decide = TypeVar("Decide", bound=Callable[..., Reduction])
Check = Callable[[Mapping[str, Any]], None]
DefaultBudget = Callable[[Mapping[str, Any]], int]

NEEDS = {
    "attention": "attention of the block before the cut, so it cannot stand at @0",
    "question": "the question, where a language model reads the tokens",
}
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}  # types of options


@dataclass(frozen=True)
class Option:
    """One keyword argument of a method: its type, its default, and for Literal types the allowed words."""

    kind: type
    default: Any
    choices: tuple[str, ...] = ()

    def read(self, text: str, name: str, method: str) -> Any:
        """The value of an option as written in a plan."""
        if self.choices or self.kind is str:
            return self.check(text, name, method)
        try:
            if self.kind is bool:
                return {"true": True, "false": False}[text.lower()]
            return self.kind(text.encode("ascii").decode())  # int and float would also read other digits
        except (ValueError, KeyError):
            raise self._error(text, name, method) from None

    def check(self, value: Any, name: str, method: str) -> Any:
        """The value of an option as given in Python, in the option's type."""
        if self.choices:
            if value not in self.choices:
                hint = did_you_mean(value, self.choices) if isinstance(value, str) else ""
                raise UserError(f"{method}: {name}={value} is not one of {', '.join(self.choices)}.{hint}")
            return value
        if self.kind is str and isinstance(value, str) and value and value == value.strip() and not set(value) & set("(),"):
            return value  # what a plan's text can hold
        if self.kind is bool and isinstance(value, bool):
            return value
        if self.kind is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
            return int(value)
        if self.kind is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
            return float(value)
        raise self._error(value if isinstance(value, (str, int, float)) else describe_value(value), name, method)

    def _error(self, value: object, name: str, method: str) -> UserError:
        return UserError(f"{method}: {name}={value} is not {KINDS[self.kind]}; for example {name}={option_text(self.default)}")


def option_text(value: Any) -> str:
    """The value of an option as a plan writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Method:
    """A registered method: its function, and what users and the engine need to know about it.

    `@method(...)` makes one from a function and registers it. `list_methods()` returns all of them.
    """

    name: str
    decide: Callable[..., Reduction]  # (view, keep, **options) -> Reduction
    summary: str  # one line for `tokensieve methods`
    paper: str  # citation; "": none
    needs: tuple[str, ...]  # names of NEEDS
    selects: bool  # returns a plain selection, so that the option `rest` applies
    options: Mapping[str, Option] = field(hash=False)
    check: Check | None = None  # raises UserError for option values that make no sense
    budget: DefaultBudget | None = None  # tokens to keep when the plan has no budget
    part: Any = None  # class of its trained module, made as part(**settings); the method reads it from view.part
    mixes: bool = False  # its output tokens are mixtures of many, so that no input token belongs to one of them
    recipe: str = ""  # the command that trains its part
    control: bool = False  # a baseline that others should beat at the same number of tokens; the report marks it

    def __repr__(self) -> str:
        return f"Method({self.name!r})"


REGISTRY: Registry[Method] = Registry("method")


def describe(
    decide: Callable[..., Reduction],
    *,
    summary: str = "",
    paper: str = "",
    needs: tuple[str, ...] = (),
    selects: bool = True,
    check: Check | None = None,
    budget: DefaultBudget | None = None,
    part: Any = None,
    mixes: bool = False,
    recipe: str = "",
    control: bool = False,
) -> Method:
    """A Method from a function, without registering it; arguments as in `method`."""
    name = decide.__name__
    unknown = set(needs) - set(NEEDS)
    if unknown:
        raise UserError(f"{name}: needs={sorted(unknown)} is not known; known are {sorted(NEEDS)}")
    options = _read_options(decide)
    if selects:
        if "rest" in options:
            raise UserError(f"{name}: the option 'rest' is added to every selecting method; choose another name")
        options["rest"] = Option(str, "drop", tuple(RESTS))
    summary = summary or (inspect.getdoc(decide) or "").split("\n")[0]
    return Method(name, decide, summary, paper, tuple(needs), selects, options, check, budget, part, mixes, recipe, control)


def method(
    *,
    summary: str = "",
    paper: str = "",
    needs: tuple[str, ...] = (),
    selects: bool = True,
    check: Check | None = None,
    budget: DefaultBudget | None = None,
    part: Any = None,
    mixes: bool = False,
    recipe: str = "",
    control: bool = False,
) -> Callable[[Decide], Decide]:
    """Registers the decorated function as a method that plans can name.

    The function takes a `View` and the number of tokens to keep and returns a `Reduction`. Its keyword-only arguments are the
    method's options: they need a default, and the type int, float, bool, str or a Literal of words.

    Args:
        summary: one line for `tokensieve methods`. Default: the first line of the docstring.
        paper: the citation, if the method is published.
        needs: "attention" (the attention of the block before the cut) and "question" (the text that came with the image).
        selects: True if the method returns `Reduction.keep`; plans can then set the option `rest`. False if it merges.
        check: called with all option values; raises `UserError` for values that make no sense.
        budget: called with all option values; the number of tokens to keep where the plan has no budget.
        part: class of the trained module, an `nn.Module`; the function reads it from `view.part`.
        mixes: every output token is a mixture of many input tokens.
        recipe: the command that trains the part.
        control: True for a baseline that others should beat at the same number of tokens; the report marks it.

    Returns:
        The decorator. It returns the function unchanged.

    Raises:
        UserError: the name is taken by another module, or an option has no default or another type.

    Example:
        >>> @tokensieve.method(summary="the tokens with the largest norm")
        ... def largest(view: View, keep: int, *, power: float = 1.0) -> Reduction:
        ...     scores = view.tokens.float().norm(dim=-1) ** power
        ...     return Reduction.keep(top(scores, keep), view.n, scores=scores)
        >>> tokensieve.apply(model, "largest@6:50%(power=2.0)")
    """

    def register(decide: Decide) -> Decide:
        declared = describe(
            decide,
            summary=summary,
            paper=paper,
            needs=needs,
            selects=selects,
            check=check,
            budget=budget,
            part=part,
            mixes=mixes,
            recipe=recipe,
            control=control,
        )
        REGISTRY.add(declared, decide.__module__)
        return decide

    return register


def get_method(name: str) -> Method:
    """The method of that name; a UserError that lists the names and the nearest one if there is none."""
    return REGISTRY.get_or_fail(name)


def list_methods() -> list[Method]:
    """All methods, sorted by name, those of plug-ins included."""
    return [REGISTRY[name] for name in sorted(REGISTRY)]


def _read_options(decide: Callable[..., Reduction]) -> dict[str, Option]:
    """The keyword-only arguments of a method's function, as options."""
    try:
        hints = get_type_hints(decide)
    except NameError as error:
        raise UserError(f"{decide.__name__}: its type hints cannot be read: {error}; import that name at run time") from error
    options = {}
    for name, parameter in inspect.signature(decide).parameters.items():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        default = parameter.default
        if default is inspect.Parameter.empty:
            raise UserError(f"{decide.__name__}: the option {name!r} needs a default")
        hint = hints.get(name, type(default))
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        if not (choices and all(isinstance(choice, str) for choice in choices)) and hint not in KINDS:
            raise UserError(
                f"{decide.__name__}: the option {name!r} has the type {hint}; use int, float, bool, str or a Literal of words"
            )
        options[name] = Option(str if choices else hint, default, choices)
    return options
