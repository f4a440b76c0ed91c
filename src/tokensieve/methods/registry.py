"""The registry of methods. A method is one function, and its keyword arguments are its options.

    @method(summary="...", paper="...", needs=("attention",))
    def mine(view: View, keep: int, *, power: float = 1.0) -> Reduction: ...

The name of the function is the name in plans and results. The options `rest` of selecting methods, and `norm` and `sizes` of
methods that can merge, are added here.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from tokensieve.core import Reduction, Resize
from tokensieve.errors import UserError, describe_value, did_you_mean, short
from tokensieve.registry import Registry
from tokensieve.rest import MERGE_OPTIONS, RAGGED_RESTS, RESTS

Decide = TypeVar("Decide", bound=Callable[..., Reduction])
DecideSize = TypeVar("DecideSize", bound=Callable[..., Resize])
Check = Callable[[Mapping[str, Any]], None]
DefaultBudget = Callable[[Mapping[str, Any]], int | str]
FindPlaces = Callable[[int, int], str]


@dataclass(frozen=True)
class Place:
    """One of the cuts of a step, for methods whose number of tokens depends on it."""

    n: int  # tokens that arrive
    first: int  # tokens of the image before any cut
    keep: int  # of the arriving tokens, by the budget of the plan
    keep_first: int  # of the first tokens, by the budget of the plan
    number: int  # of the cut among those of the step, from 0
    total: int  # cuts of the step
    share: Fraction | None = None  # of the arriving tokens, if the budget of the plan is a share


Count = Callable[[Place, Mapping[str, Any]], int]

NEEDS = {
    "attention": "attention of the block before the cut, so it cannot stand at @0",
    "question": "the question, where a language model reads the tokens",
    "text": "embeddings of the text in the space of the image tokens",
    "values": "the values of a block's attention, so it stands in a tower",
    "before": "the tokens before the MLP of a block, so it stands after a block",
    "pixels": "the pixels of the patches, so it stands at @0",
    "inputs": "the input embeddings of the language model, so it stands at @llm.L",
    "rotary": "the rotary embedding of the language model, so it stands at @llm.L",
}
ATTENTIONS = {  # whose attention a method sees at a decoder layer
    "layer": "of the layer to come, computed for the method",
    "previous": "of the layer that just ran, which costs less",
}
NUMBER = re.compile(r"[-+]?(inf|([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?)")
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
            if not NUMBER.fullmatch(text):  # int and float would also read 1_0, nan and the digits of other scripts
                raise ValueError
            return self.check(self.kind(text), name, method)
        except (ValueError, KeyError):
            raise self._error(text, name, method) from None

    def check(self, value: Any, name: str, method: str) -> Any:
        """The value of an option as given in Python, in the option's type."""
        if self.choices:
            if value not in self.choices:
                hint = did_you_mean(value, self.choices) if isinstance(value, str) else ""
                raise UserError(f"{method}: {name}={short(value)} is not one of {', '.join(self.choices)}.{hint}")
            return value
        if self.kind is str and isinstance(value, str) and value and value == value.strip() and not set(value) & set("(),"):
            return value  # what a plan's text can hold
        if self.kind is bool and isinstance(value, bool):
            return value
        if self.kind is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
            return int(value)
        if self.kind is float and isinstance(value, numbers.Real) and not isinstance(value, bool) and not math.isnan(value):
            return float(value)
        raise self._error(value if isinstance(value, (str, int, float)) else describe_value(value), name, method)

    def allows_default(self) -> bool:
        """Whether the default is of the option's type. (A default text may be empty; one in a plan may not.)"""
        if self.kind is str and not self.choices:
            return isinstance(self.default, str)
        try:
            self.check(self.default, "", "")
        except UserError:
            return False
        return True

    def _error(self, value: object, name: str, method: str) -> UserError:
        return UserError(
            f"{method}: {name}={short(value)} is not {KINDS[self.kind]}; for example {name}={option_text(self.default)}"
        )


def option_text(value: Any) -> str:
    """The value of an option as a plan writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Method:
    """A registered method: its function, and what users and the engine need to know about it.

    `@method(...)` makes one from a function and registers it. `list_methods()` returns all of them.
    """

    name: str
    decide: Callable[..., Any]  # (view, keep, **options) -> Reduction
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
    norm: float | None = None  # the default of the option `norm`; None: the method merges nothing by itself
    control: bool = False  # a baseline that others should beat at the same number of tokens; the report marks it
    where: str | FindPlaces = ""  # its positions when the plan has none, as a plan writes them; "": after half the depth.
    # A function gets the number of blocks of the tower and of layers of the decoder (0: there is none)
    min_keep: Callable[[int], int] | None = None  # the fewest of n tokens that it can keep; None: 1
    count: Count | None = None  # tokens to keep at one of its cuts, for schedules; None: what the budget says
    # output tokens beyond those to keep: 1 for a token made of the rest, -1 if the authors count CLS; or a function of the
    # number of tokens that arrive and of those to keep
    extra: int | Callable[[int, int], int] = 0
    adaptive: bool = False  # leaves a different number of tokens for each image; `keep` is the most
    layers: Callable[[int], tuple[int, ...]] | None = None  # of the depth: earlier blocks whose attention it sees, from 1
    sums: bool = False  # its outputs are weighted sums, whose weights do not add up to 1
    no_graph: str = ""  # why a model with it is not one graph for torch.compile and torch.export; "": it is
    no_onnx: str = ""  # why it has no ONNX graph although it has one for torch.export
    on_image: bool = False  # acts on the image: decide is (image size, patch size, **options) -> Resize; sizes are (h, w)

    @property
    def engine_options(self) -> frozenset[str]:
        """The options that the engine carries out, not the method's function."""
        merging = MERGE_OPTIONS if self.selects or self.norm is not None else ()
        attention = ("attention",) if "attention" in self.needs else ()
        return frozenset((*(("rest",) if self.selects else ()), *merging, *attention))

    def n_extra(self, n: int, keep: int) -> int:
        """Output tokens beyond the `keep` of n."""
        return self.extra if isinstance(self.extra, int) else self.extra(n, keep)

    def __repr__(self) -> str:
        return f"Method({self.name!r})"

    def __copy__(self) -> Method:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Method:
        return self

    def __reduce__(self) -> tuple[Callable[[str], Method], tuple[str]]:
        """Pickled by its name, as a function is: its declaration may hold what cannot be pickled."""
        if self.name not in REGISTRY:
            raise UserError(
                f"the method {self.name!r} is not registered, so it cannot be pickled; declare it with @method(...)"
            )
        return get_method, (self.name,)


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
    norm: float | None = None,
    control: bool = False,
    where: str | FindPlaces = "",
    min_keep: Callable[[int], int] | None = None,
    count: Count | None = None,
    extra: int | Callable[[int, int], int] = 0,
    adaptive: bool = False,
    layers: Callable[[int], tuple[int, ...]] | None = None,
    sums: bool = False,
    no_graph: str = "",
    no_onnx: str = "",
    attention: Literal["layer", "previous"] = "layer",
) -> Method:
    """A Method from a function, without registering it; arguments as in `method`."""
    name = _read_name(decide)
    if not isinstance(needs, (tuple, list)) or not all(isinstance(need, str) for need in needs):
        example = f"({needs!r},)" if isinstance(needs, str) else '("attention",)'
        raise UserError(f"{name}: needs is a tuple of names, such as needs={example}, not {describe_value(needs)}")
    unknown = set(needs) - set(NEEDS)
    if unknown:
        raise UserError(f"{name}: needs={sorted(unknown)} is not known; known are {sorted(NEEDS)}")
    options = _read_options(decide)
    added: dict[str, Option] = {}
    if "attention" in needs:
        added["attention"] = Option(str, attention, tuple(ATTENTIONS))
    if selects:
        added["rest"] = Option(str, "drop", RAGGED_RESTS if adaptive else tuple(RESTS))
    if selects or norm is not None:
        added |= {"norm": Option(float, norm or 0.0), "sizes": Option(str, "yes", ("yes", "no"))}
    for taken in added.keys() & options.keys():
        raise UserError(f"{name}: the option {taken!r} is added to methods by the engine; choose another name")
    summary = summary or (inspect.getdoc(decide) or "").split("\n")[0]
    return Method(
        name,
        decide,
        summary,
        paper,
        tuple(needs),
        selects,
        options | added,
        check=check,
        budget=budget,
        part=part,
        mixes=mixes,
        recipe=recipe,
        norm=norm,
        control=control,
        where=where,
        min_keep=min_keep,
        count=count,
        extra=extra,
        adaptive=adaptive,
        layers=layers,
        sums=sums,
        no_graph=no_graph,
        no_onnx=no_onnx,
    )


def method(
    without_parentheses: None = None,
    /,
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
    norm: float | None = None,
    control: bool = False,
    where: str | FindPlaces = "",
    min_keep: Callable[[int], int] | None = None,
    count: Count | None = None,
    extra: int | Callable[[int, int], int] = 0,
    adaptive: bool = False,
    layers: Callable[[int], tuple[int, ...]] | None = None,
    sums: bool = False,
    no_graph: str = "",
    no_onnx: str = "",
    attention: Literal["layer", "previous"] = "layer",
) -> Callable[[Decide], Decide]:
    """Registers the decorated function as a method that plans can name.

    The function takes a `View` and the number of tokens to keep and returns a `Reduction`. Its keyword-only arguments are the
    method's options: they need a default, and the type int, float, bool, str or a Literal of words.

    Args:
        summary: one line for `tokensieve methods`. Default: the first line of the docstring.
        paper: the citation, if the method is published.
        needs: "attention" (the attention of the block before the cut), "question" (the text that came with the image), "text"
            (its embeddings in the space of the image tokens), "values" (of the block's attention), "before" (the tokens before
            the MLP of the block), "pixels" (of the patches, at @0), "inputs" (the input embeddings of the language model),
            "rotary" (the tables of its rotary embedding).
        selects: True if the method returns `Reduction.keep`; plans can then set the option `rest`. False if it merges.
        check: called with all option values; raises `UserError` for values that make no sense.
        budget: called with all option values; the tokens to keep where the plan has no budget, as a number or as in a plan
            ("25%").
        part: class of the trained module, an `nn.Module`; the function reads it from `view.part`.
        mixes: every output token is a mixture of many input tokens.
        recipe: the command that trains the part.
        norm: of methods that merge (`Reduction.merge`): the default of the option `norm`, with which averaged tokens get their
            norm back: 0 for plain means.
        control: True for a baseline that others should beat at the same number of tokens; the report marks it.
        where: the positions of the cuts where the plan states none, as in a plan ("*.attn"), or a function of the number of
            blocks and of decoder layers. Default: after half the depth.
        min_keep: called with the number of tokens that arrive; the fewest that the method can keep. A smaller budget keeps that
            many, and a note says so.
        count: called with a `Place` and all option values; the tokens to keep at this cut of the step, for schedules.
        extra: output tokens beyond those to keep, such as 1 for a token that stands for the rest; or a function of the number
            of tokens that arrive and of those to keep.
        adaptive: True if images are left with different numbers of tokens (`Reduction.keep_some`, `Reduction.stack`), at most
            as many as the budget says.
        layers: called with the number of blocks; the earlier blocks whose attention is in `view.earlier`, from 1.
        sums: True if output tokens are weighted sums whose weights do not add up to 1.
        no_graph: why a model with the method cannot be one graph for torch.compile and torch.export.
        no_onnx: why it cannot be an ONNX file, if it can be a graph.
        attention: the default of the option `attention`: whose attention the method sees in a decoder.

    Returns:
        The decorator. It returns the function unchanged.

    Raises:
        UserError: the name is taken by another module, the function cannot be called with a view and `keep`, or an option
            has no default or another type.

    Example:
        >>> @tokensieve.method(summary="the tokens with the largest norm")
        ... def largest(view: View, keep: int, *, power: float = 1.0) -> Reduction:
        ...     scores = view.tokens.float().norm(dim=-1) ** power
        ...     return Reduction.keep(top(scores, keep), view.n, scores=scores)
        >>> tokensieve.apply(model, "largest@6:50%(power=2.0)")
    """

    if without_parentheses is not None:
        raise UserError(f"write @method(...) with parentheses, such as @method(); got {describe_value(without_parentheses)}")

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
            norm=norm,
            control=control,
            where=where,
            min_keep=min_keep,
            count=count,
            extra=extra,
            adaptive=adaptive,
            layers=layers,
            sums=sums,
            no_graph=no_graph,
            no_onnx=no_onnx,
            attention=attention,
        )
        REGISTRY.add(declared, decide.__module__)
        return decide

    return register


def image_method(*, summary: str, check: Check | None = None) -> Callable[[DecideSize], DecideSize]:
    """Registers the decorated function as a method that acts on the image, before the tower.

    It takes the image size and the patch size of the tower, each (h, w) in pixels, and returns a `Resize`. Its
    keyword-only arguments are options, as those of other methods.
    """

    def register(decide: DecideSize) -> DecideSize:
        options = _read_options(decide)
        declared = Method(decide.__name__, decide, summary, "", (), False, options, check, on_image=True)
        REGISTRY.add(declared, decide.__module__)
        return decide

    return register


def get_method(name: str) -> Method:
    """The method of that name; a UserError that lists the names and the nearest one if there is none."""
    return REGISTRY.get_or_fail(name)


class MethodList(list[Method]):
    """Methods, printed one on a line with what they do."""

    def __repr__(self) -> str:
        width = max((len(method.name) for method in self), default=0)
        return "\n".join(f"{method.name:<{width}}  {method.summary}" for method in self)


def list_methods() -> list[Method]:
    """All methods, sorted by name, those of plug-ins included. Printed, it is one on a line with what it does."""
    return MethodList(REGISTRY[name] for name in sorted(REGISTRY))


def _read_name(decide: Callable[..., Reduction]) -> str:
    """The name of a method's function, which must be one that a plan can write, and that takes a view and `keep`."""
    name = getattr(decide, "__name__", None)
    if not callable(decide) or not isinstance(name, str):
        raise UserError(f"a method is a function, def name(view, keep), not {describe_value(decide)}")
    if not name.isidentifier():
        raise UserError(f"a method has the name of its function, and {name!r} is none; write it as def name(view, keep)")
    signature = inspect.signature(decide)
    only_named = [each.name for each in signature.parameters.values() if each.kind is inspect.Parameter.KEYWORD_ONLY]
    try:
        signature.bind("view", "keep", **dict.fromkeys(only_named))
    except TypeError:
        raise UserError(f"{name}: a method is called as {name}(view, keep), but its function is {name}{signature}") from None
    return name


def _read_options(decide: Callable[..., Any]) -> dict[str, Option]:
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
        option = Option(str if choices else hint, default, choices)
        if not option.allows_default():
            allowed = f"one of {', '.join(choices)}" if choices else KINDS[hint]
            raise UserError(
                f"{decide.__name__}: the default of the option {name!r} is {describe_value(default)}; it must be {allowed}"
            )
        options[name] = option
    return options
