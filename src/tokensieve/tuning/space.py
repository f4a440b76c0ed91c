"""The plans that are searched: a resolution, one method at one position, its options, and a budget that meets a goal.

A Candidate is a plan up to its budget. The budget follows from a goal, a speed-up that is predicted from operation counts, or
is given (`--keep`). So candidates are compared at equal cost, not at an equal number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from tokensieve.errors import UserError
from tokensieve.methods.registry import REGISTRY, Method, get_method
from tokensieve.plan import Budget, Plan, Step, Where, make_step
from tokensieve.tuning.outline import Outline

if TYPE_CHECKING:
    from optuna.trial import Trial

RESIZE = "resize"
CONTROLS = ("random", "grid")  # and resize alone
SMALLEST = 0.5  # of the sides of an image
NORMS = (0.0, 1.0, 2.0)
EVERY = "*"
PUBLISHED = ("tome",)  # published methods in a search by default; --methods names others


@dataclass(frozen=True)
class Candidate:
    """A plan up to its budget."""

    side: int  # patches on the shorter side of the image; 0: images are not resized
    method: str  # "resize": resizing alone
    position: str = ""  # as a plan writes it
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def is_control(self) -> bool:
        """Whether it is resizing alone, or a plain choice that knows nothing of the image."""
        return self.method == RESIZE or (self.method in CONTROLS and not self.options)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Candidate:
        """The candidate of a JSON value."""
        return cls(values["side"], values["method"], values["position"], tuple((k, v) for k, v in values["options"]))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Space:
    """All candidates for a model."""

    outline: Outline
    methods: tuple[str, ...]  # names of token methods
    with_resize: bool
    keep: int | None = None  # tokens that every plan leaves
    notes: tuple[str, ...] = field(default=())

    @property
    def sides(self) -> tuple[int, int]:
        """The fewest and the most patches on the shorter side; the most means full images."""
        side = self.outline.side
        return (max(1, math.ceil(SMALLEST * side)), side) if self.with_resize else (side, side)

    @property
    def positions(self) -> list[str]:
        """Single positions in the order of the model: blocks, the output, layers of the language model."""
        depth, decoder = self.outline.depth, self.outline.decoder
        if self.keep is not None and decoder is None:
            depth = max(2, depth // 2 + 1)  # after the last block a cut would neither cost nor save anything
        blocks = [str(layer) for layer in range(depth)]
        if decoder is None:
            return blocks
        out = ["out"] if self.outline.tower is not None else []
        inside = [f"llm.{layer}" for layer in range(0 if not out else 1, max(1, decoder // 2) + 1)]
        return blocks + out + (inside if self.keep is None or not out else [])

    def plan(self, candidate: Candidate, budget: Budget | None = None) -> Plan:
        """The plan of a candidate with a budget (none for resizing alone)."""
        steps: list[Step] = []
        if 0 < candidate.side < self.outline.side:
            steps.append(make_step(get_method(RESIZE), options={"size": candidate.side * self.outline.patch}))
        if candidate.method != RESIZE:
            method, options = get_method(candidate.method), dict(candidate.options)
            steps.append(make_step(method, Where.parse(candidate.position), budget, options))
        return Plan(tuple(steps))

    def budget(self, tokens: int, arriving: int) -> Budget:
        """A number of tokens; a share where the number that arrives differs from image to image."""
        if self.outline.tower is None and self.keep is None:
            return Budget("share", Fraction(tokens, arriving))
        return Budget("keep", Fraction(tokens))

    def arriving(self, candidate: Candidate) -> int:
        """Tokens of an image before the cut."""
        blocks, layers = self.outline.counts(self.plan(Candidate(candidate.side, RESIZE)))
        return (blocks or layers)[0]

    def suggest(self, trial: Trial) -> Candidate:
        """A candidate by Optuna. Parameters: side, method, layer, every, rest, norm."""
        least, most = self.sides
        choices = [*self.methods, *([RESIZE] if self.with_resize else [])]
        name = trial.suggest_categorical("method", choices)
        side = trial.suggest_int("side", least, most) if least < most else most
        if name == RESIZE:
            return Candidate(side, RESIZE)
        positions = self.positions
        every = self.keep is None and self.outline.depth > 1 and trial.suggest_categorical("every", [False, True])
        position = EVERY if every else positions[trial.suggest_int("layer", 0, len(positions) - 1)]
        method = get_method(name)
        rest = trial.suggest_categorical("rest", ["drop", "merge"]) if method.selects else None
        norm = trial.suggest_categorical("norm", list(NORMS)) if rest == "merge" or method.norm is not None else None
        return Candidate(side, name, position, options_of(method, rest, norm))

    def seeds(self) -> list[dict[str, Any]]:
        """Parameters of sensible plans, which are tried first."""
        (least, most), positions = self.sides, self.positions
        sides = sorted({most, max(least, round(0.86 * most)), max(least, round(0.72 * most))}, reverse=True)
        last = len(positions) - 1
        made: list[dict[str, Any]] = []

        def add(method: str, side: int, share: float, **options: Any) -> None:
            if method in self.methods:
                where = {} if self.keep is not None or self.outline.depth < 2 else {"every": False}
                made.append({"method": method, "side": side, "layer": round(share * last), **where, **options})

        if self.with_resize:
            made.append({"method": RESIZE, "side": sides[-1]})
        for share in (0.5, 0.3, 0.75):
            for side in sides:
                add("cover", side, share, norm=2.0)
        for side in sides[:2]:
            add("anchor", side, 0.4, rest="merge", norm=2.0)
            add("grid", side, 0.4, rest="drop")
            add("random", side, 0.4, rest="drop")
        for name in self.methods:
            if name not in ("cover", "anchor", *CONTROLS):
                merging = {"rest": "merge"} if get_method(name).selects else {}
                add(name, sides[min(1, len(sides) - 1)], 0.5, **merging)
        return made


def options_of(method: Method, rest: str | None, norm: float | None) -> tuple[tuple[str, Any], ...]:
    """The options that differ from the method's defaults."""
    options: dict[str, Any] = {"rest": rest, "norm": norm}
    return tuple((k, v) for k, v in options.items() if v is not None and v != method.options[k].default)


def find_methods(requested: Sequence[str] | None, takes_questions: bool) -> tuple[list[str], bool]:
    """The token methods to search, and whether images are resized; a UserError for a method that cannot be searched."""
    if requested is None:
        known = [m for m in REGISTRY.values() if not m.paper or m.name in PUBLISHED]
        found = [m for m in known if _is_searched(m) and ("question" not in m.needs or takes_questions)]
        return [method.name for method in found], True
    methods = [get_method(name) for name in dict.fromkeys(requested)]
    for method in methods:
        if method.part is not None:
            raise UserError(f"--methods {method.name}: it has trained weights, which belong to one budget; leave it out")
        if method.name != RESIZE and not _is_searched(method):
            raise UserError(f"--methods {method.name}: it cannot be searched; leave it out")
    return [method.name for method in methods if method.name != RESIZE], RESIZE in {method.name for method in methods}


def _is_searched(method: Method) -> bool:
    """Whether a search can place it anywhere with any budget: it needs no more than attention or a question, and no place of
    its own."""
    is_free = set(method.needs) <= {"attention", "question"} and method.layers is None and not method.adaptive
    return method.part is None and not method.on_image and method.name != "none" and is_free
