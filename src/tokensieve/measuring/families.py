"""What can be cut where: a table made by trying every kind of cut on a tiny random model of every family."""

from __future__ import annotations

import shutil
import textwrap
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve import files
from tokensieve.core import Reduction, View
from tokensieve.cutting.handle import apply
from tokensieve.errors import PlanWarning, Uncuttable, UserError
from tokensieve.measuring import terminal
from tokensieve.methods.registry import describe
from tokensieve.models.families import VLM_FAMILIES, Example
from tokensieve.models.features import encode_image
from tokensieve.models.registry import families, open_tower, open_vlm
from tokensieve.models.tower import Tower
from tokensieve.plan import Budget, Plan, Step, Where
from tokensieve.registry import resolve
from tokensieve.terminal import progress

WHERES = ("0", "2", "2.attn", "out")
LLM = "llm.2"
RESIZE = "resize(scale=0.75)"
SHOWN = {"0": "@0", "2": "@L", "2.attn": "@L.attn", "out": "@out", LLM: "@llm.L"}
Inputs = Tensor | Mapping[str, Tensor]  # images, or what the processor of a vision-language model makes


@dataclass
class Line:
    """One line of the table."""

    family: str
    models: str
    prefix: str = ""
    coarse: str = ""
    drops: list[str] = field(default_factory=list)  # positions where tokens can be dropped
    merges: list[str] = field(default_factory=list)
    pooling: str = ""
    resize: str = ""  # whether images can be made smaller
    reasons: list[str] = field(default_factory=list)  # why not, where not

    def cells(self) -> tuple[str, ...]:
        """As shown: family, models, prefix, A_coarse, drop and merge, pooling, resize."""
        drops, merges = (" ".join(places) or "nowhere" for places in (self.drops, self.merges))
        places = drops if drops == merges else f"drop {drops}, merge {merges}"
        return self.family, self.models, self.prefix, self.coarse, places, self.pooling, self.resize

    def failure_text(self) -> str:
        """Why it cannot be cut at some positions, or nothing."""
        return f"{self.family}: {'; '.join(self.reasons)}" if self.reasons else ""


HEADS = ("family", "for example", "prefix", "A_coarse", "drop and merge", "pooling", "resize")


def table() -> list[Line]:
    """Every family, tried."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        torch.manual_seed(0)
        tries = [partial(try_family, example) for family in families() for example in family.examples]
        examples = [example for family in VLM_FAMILIES.values() for example in (family.example, *family.others)]
        tries += [partial(try_vlm_family, example) for example in examples]
        return [one() for one in progress.bar(tries, desc="families", unit="model", leave=False)]


def try_family(example: Example) -> Line:
    """One line: the tiny model is built, opened, cut everywhere in both ways, and the source of its A_coarse is found."""
    try:
        model = resolve(example.build)(**example.options).eval()
        tower = open_tower(model)
    except Uncuttable as error:
        return Line(example.name, example.models, resize="no", reasons=[error.reason])
    except ImportError as error:
        return Line(example.name or example.models, example.models, reasons=[f"{error.name} is not installed"])
    line = Line(tower.family, example.models, _prefix(tower, example.extra))
    images = torch.randn(2, 3, *tower.image_size)
    _try_cuts(line, model, images, WHERES)
    line.coarse = _coarse(model, images, "2")
    line.pooling = _pooling(model, images, "out", "prefix alone" if tower.pools_cls else "sizes do not reach it")
    _try_resize(line, model, images)
    return line


def try_vlm_family(example: Example) -> Line:
    """The same for a vision-language model: in its tower, at its tower's output, and in its decoder."""
    try:
        model, inputs = resolve(example.build)(**example.options)
    except ImportError as error:
        return Line(example.name or example.models, example.models, reasons=[f"{error.name} is not installed"])
    try:
        vlm = open_vlm(model.eval())
    except Uncuttable as error:
        title = VLM_FAMILIES[example.options["family"]].title
        return Line(title, example.models, resize="no", reasons=[error.reason])
    assert vlm is not None
    tower = vlm.tower or vlm.tile_tower
    line = Line(example.name or vlm.family, example.models, "" if tower is None else _prefix(tower, ""))
    is_opened = tower is not None or vlm.packed_tower is not None
    in_tower = WHERES if is_opened else ("out",) if vlm.out_is_projected else ()
    _try_cuts(line, model, inputs, (*in_tower, LLM))
    if not is_opened:
        line.reasons.append(vlm.reason)
    line.coarse = ", ".join(_coarse(model, inputs, where) for where in (("2", LLM) if tower is not None else (LLM,)))
    line.pooling = _pooling(model, inputs, LLM, "sizes do not reach it")
    _try_resize(line, model, inputs)
    return line


def _try_cuts(line: Line, model: nn.Module, inputs: Inputs, wheres: Sequence[str]) -> None:
    """Tries drops and merges at all these positions, and records in the line what works, and why not what does not."""
    failures: dict[str, list[str]] = {}  # places by reason
    for positions, rest in ((line.drops, "drop"), (line.merges, "merge")):
        for where in wheres:
            plan = f"grid@{where}:5(rest={rest})"
            try:
                _cut(model, inputs, plan)
            except UserError as error:
                failures.setdefault(str(error).removeprefix(f"{plan}: "), []).append(f"{SHOWN[where]} {rest}")
            else:
                positions.append(SHOWN[where])
    line.reasons += [f"{', '.join(places)}: {reason}" for reason, places in failures.items()]


def _try_resize(line: Line, model: nn.Module, inputs: Inputs) -> None:
    """Tries a smaller image alone and before a cut, and records in the line whether it works, or why not."""
    try:
        for plan in (RESIZE, f"{RESIZE} + grid@{LLM if SHOWN[LLM] in line.drops else '2'}:3"):
            _cut(model, inputs, plan)
    except UserError as error:
        line.resize = "no"
        line.reasons.append(str(error).replace(RESIZE, "resize"))
    else:
        line.resize = "yes"


def _cut(model: Any, inputs: Inputs, plan: Plan | str) -> Tensor:
    """The feature, or the logits, with the plan on, which really cut."""
    with torch.no_grad(), apply(model, plan) as handle:
        feature: Tensor = encode_image(model, inputs) if isinstance(inputs, Tensor) else model(**inputs).logits
    if not torch.isfinite(feature).all() or not any(row.tokens_out < row.tokens_in for row in handle.ledger):
        raise UserError("ran, but cut nothing")
    return feature


def _prefix(tower: Tower, extra: str) -> str:
    more = tower.prefix - tower.has_cls
    parts = (["CLS"] if tower.has_cls else []) + ([f"{more} {extra}"] if more else [])
    return " + ".join(parts) or "none"


def _plan(decide: Callable[..., Reduction], where: str, **about: Any) -> Plan:
    return Plan((Step(describe(decide, **about), Where.parse(where), Budget.parse("5")),))


def _coarse(model: nn.Module, inputs: Inputs, where: str) -> str:
    """Which row the view gives as A_coarse: it is compared with each."""
    sources = []

    def record_source(view: View, keep: int) -> Reduction:
        attention = view.attention
        assert attention is not None
        if attention.prefix and attention.has_cls and torch.equal(view.coarse(), attention.cls_row()):
            sources.append("last token's row" if where == LLM else "CLS row")
        else:
            sources.append("received" if torch.equal(view.coarse(), attention.received()) else "pooling query")
        return Reduction.keep(torch.arange(keep).expand(len(view.tokens), -1), view.n)

    _cut(model, inputs, _plan(record_source, where, needs=("attention",)))
    return sources[0]


def _pooling(model: nn.Module, inputs: Inputs, where: str, otherwise: str) -> str:
    """Whether sizes of tokens merged there change what comes out: the same merge is tried with sizes and without."""

    def merged(sized: bool) -> Callable[..., Reduction]:
        def join(view: View, keep: int) -> Reduction:
            batch, first = len(view.tokens), view.n - keep
            groups = (torch.arange(view.n) - first).clamp_min(0).expand(batch, -1)  # one big group, the others single
            index = torch.arange(first, view.n).expand(batch, -1)
            reduction = Reduction.merge(groups, index, view.sizes_or_ones())
            return reduction if sized else replace(reduction, sizes=torch.ones_like(index, dtype=torch.float))

        return join

    try:
        sized, unsized = (_cut(model, inputs, _plan(merged(way), where, selects=False)) for way in (True, False))
    except UserError as error:
        return f"no: {error}"
    return otherwise if torch.allclose(sized, unsized, atol=1e-6) else "by size"


def markdown(lines: Sequence[Line]) -> str:
    """The page: what the columns mean, and the table."""
    rows = [HEADS, tuple("---" for _ in HEADS), *(line.cells() for line in lines)]
    notes = "".join(f"\n{note}.\n" for note in map(Line.failure_text, lines) if note)
    intro = (Path(__file__).parent / "families_intro.md").read_text(encoding="utf-8")
    return intro + "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows) + notes


def run(args: Namespace) -> list[dict[str, str]]:
    """Prints the table, and writes it as Markdown to args.output where that is given."""
    from rich import box
    from rich.table import Table

    if args.output is not None:
        files.check_writable(Path(args.output))
    lines = table()
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    shown.add_column("family, for example", overflow="fold")
    for head, width in zip(HEADS[2:], (12, 8, 18, 7, 6), strict=True):
        shown.add_column(head, width=width)
    for line in lines:
        family, models, *others = line.cells()
        shown.add_row(f"{family}\n  {models}", *others)
    if not args.quiet and not args.as_json:
        terminal.print_table(shown)
    for note in filter(None, map(Line.failure_text, lines)):
        print(textwrap.fill(note, max(20, shutil.get_terminal_size().columns)))
    if args.output is not None:
        files.replace_file(Path(args.output), markdown(lines).encode())
    return [dict(zip(HEADS, line.cells(), strict=True)) for line in lines]
