"""What can be cut where: a table made by trying every kind of cut on a tiny random model of every family."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.cutting.handle import apply
from tokensieve.errors import PlanWarning, Uncuttable, UserError
from tokensieve.methods.registry import describe
from tokensieve.models.registry import open_tower, open_vlm
from tokensieve.models.tower import Tower
from tokensieve.plan import Budget, Plan, Step, Where
from tokensieve.testing import tiny_vlms
from tokensieve.testing.tiny_models import (
    distilled_model,
    eva_model,
    hf_model,
    map_model,
    open_clip_model,
    open_clip_timm_model,
    timm_model,
)

INTRO = """\
# Families

Made by `tokensieve families --output docs/families.md`: each line is a tiny random model of the family, on which every kind
of cut was tried.

Prefix tokens are CLS, registers and the distillation token. They stand before the patches, are never counted in a budget and
never cut.

`A_coarse`, by which `anchor` finds its anchors (`View.coarse()` for your own methods), is how much the token that becomes the
image feature attends to each patch, in the block before the cut:

- the CLS row of that block's attention, softmax over all keys, mean over heads;
- where there is no CLS token but a pooling head with a learned query (MAP heads, as SigLIP's): the attention of that query,
  by the head's own projections, to the tokens at the cut after the tower's last norm, log(size) included;
- where there is neither (mean pooling): the attention that a patch receives, mean over all queries of the block.

After a cut, rotary angles are those of the kept patches of each image; a merged token has those of the patch that stands for
it. `@L` is after block L, `@L.attn` between its attention and its MLP. "by size" means that the model's own pooling counts a
merged token as often as it stands for patches; where the feature is made of prefix tokens alone, sizes reach it through
the attention of later blocks. Grids are those of the batch, not those of the config. SigLIP2's padding is taken off before
the first block; the images of one batch need the same grid of patches. Not to be cut: a tower without patch tokens
(ResNet), blocks that run attention and MLP in parallel, backbones and decoders that need the whole raster.

The last lines are vision-language models. `@llm.L` is at the input of layer L of the language model, where `A_coarse` is the
row of the prompt's last token in that layer's attention; "by size" means there that the decoder hears a merged token as often
as it stands for patches. More about them: [vlm.md](vlm.md).
"""
WHERES = ("0", "2", "2.attn", "out")
LLM = "llm.2"
SHOWN = {"0": "@0", "2": "@L", "2.attn": "@L.attn", "out": "@out", LLM: "@llm.L"}
Inputs = Tensor | Mapping[str, Tensor]  # images, or what the processor of a vision-language model makes


@dataclass(frozen=True)
class Example:
    """A family, models of it that people know, and a tiny one."""

    models: str
    build: Callable[[], nn.Module]
    extra: str = ""  # what the prefix tokens after CLS are
    name: str = ""  # of a family that has no tower to tell it


@dataclass(frozen=True)
class VlmExample:
    """A family of vision-language models, one that people know, and a tiny one with prompts for it."""

    models: str
    build: Callable[[], tuple[nn.Module, Mapping[str, Tensor]]]


@dataclass
class Line:
    """One line of the table."""

    family: str
    models: str
    prefix: str = ""
    coarse: str = ""
    drops: list[str] = field(default_factory=list)  # places where tokens can be dropped
    merges: list[str] = field(default_factory=list)
    pooling: str = ""
    reasons: list[str] = field(default_factory=list)  # why not, where not

    def cells(self) -> tuple[str, ...]:
        """As shown: family, models, prefix, A_coarse, drop and merge, pooling."""
        drops, merges = (" ".join(places) or "nowhere" for places in (self.drops, self.merges))
        places = drops if drops == merges else f"drop {drops}, merge {merges}"
        return self.family, self.models, self.prefix, self.coarse, places, self.pooling

    def why_not(self) -> str:
        """Why it cannot be cut at some place, or nothing."""
        return f"{self.family}: {'; '.join(self.reasons)}" if self.reasons else ""


HEADS = ("family", "for example", "prefix", "A_coarse", "drop and merge", "pooling")
EXAMPLES = (
    Example("ViT-B-16, ViT-L-14-336", open_clip_model),
    Example("coca_ViT-B-32", lambda: open_clip_model(attentional_pool=True, attn_pooler_heads=2, attn_pooler_queries=4)),
    Example("ViT-B-16-SigLIP, ViT-SO400M-14-SigLIP-384", lambda: open_clip_timm_model(timm_model(**map_model()))),
    Example("EVA02-B-16, EVA02-L-14-336", lambda: open_clip_timm_model(eva_model(swiglu_mlp=True, global_pool="token"))),
    Example("RN50", lambda: open_clip_model(layers=[1, 1, 1, 1], width=8, image_size=64), name="open_clip ModifiedResNet"),
    Example("vit_base_patch16_224, deit3_base_patch16_224", timm_model),
    Example("vit_base_patch14_reg4_dinov2", lambda: timm_model(reg_tokens=4, init_values=1e-5), "registers"),
    Example("deit_base_distilled_patch16_224", distilled_model, "distillation"),
    Example("vit_base_patch16_siglip_224", lambda: timm_model(**map_model())),
    Example("vit_base_patch16_siglip_gap_224", lambda: timm_model(class_token=False, global_pool="avg")),
    Example("eva02_base_patch14_448", lambda: eva_model(swiglu_mlp=True, scale_mlp=True, qkv_fused=False)),
    Example("vit_base_patch16_dinov3", lambda: eva_model(rope_type="dinov3", num_reg_tokens=4), "registers"),
    Example("vit_base_patch16_rope_mixed_224", lambda: eva_model(rope_type="mixed", attn_type="rope", global_pool="token")),
    Example("openai/clip-vit-base-patch16", lambda: hf_model("CLIPVision")),
    Example("google/siglip-base-patch16-224", lambda: hf_model("SiglipVision")),
    Example("google/siglip2-base-patch16-naflex", lambda: hf_model("Siglip2Vision")),
    Example("google/vit-base-patch16-224", lambda: hf_model("ViT")),
    Example("facebook/deit-base-distilled-patch16-224", lambda: hf_model("DeiT"), "distillation"),
    Example("facebook/dinov2-base", lambda: hf_model("Dinov2")),
    Example("facebook/dinov2-with-registers-base", lambda: hf_model("Dinov2WithRegisters", num_register_tokens=4), "registers"),
    Example("facebook/dinov3-vitb16-pretrain-lvd1689m", lambda: hf_model("DINOv3ViT", num_register_tokens=4), "registers"),
)
VLM_EXAMPLES = (
    VlmExample("llava-hf/llava-1.5-7b-hf", lambda: (tiny_vlms.llava(), tiny_vlms.prompts())),
    VlmExample("llava-hf/llava-v1.6-mistral-7b-hf", partial(tiny_vlms.relative, "llava_next")),
    VlmExample("llava-hf/llava-onevision-qwen2-7b-ov-hf", partial(tiny_vlms.relative, "llava_onevision")),
    VlmExample("Qwen/Qwen2-VL-7B-Instruct", partial(tiny_vlms.relative, "qwen2_vl")),
    VlmExample("Qwen/Qwen2.5-VL-7B-Instruct", partial(tiny_vlms.relative, "qwen2_5_vl")),
    VlmExample("Qwen/Qwen3-VL-8B-Instruct", partial(tiny_vlms.relative, "qwen3_vl")),
)


def table() -> list[Line]:
    """Every family, tried."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        torch.manual_seed(0)
        return [*map(try_family, EXAMPLES), *map(try_vlm_family, VLM_EXAMPLES)]


def try_family(example: Example) -> Line:
    """One line: the tiny model is built, opened, cut everywhere in both ways, and asked where its A_coarse comes from."""
    try:
        model = example.build().eval()
        tower = open_tower(model)
    except Uncuttable as error:
        return Line(example.name, example.models, reasons=[error.reason])
    except ImportError as error:
        return Line(example.name or example.models, example.models, reasons=[f"{error.name} is not installed"])
    line = Line(tower.family, example.models, _prefix(tower, example.extra))
    images = torch.randn(2, 3, *tower.image_size)
    _try_cuts(line, model, images, WHERES)
    line.coarse = _coarse(model, images, "2")
    line.pooling = _pooling(model, images, "out", "prefix alone" if tower.pools_cls else "sizes do not reach it")
    return line


def try_vlm_family(example: VlmExample) -> Line:
    """The same for a vision-language model: in its tower, at its tower's output, and in its decoder."""
    try:
        model, inputs = example.build()
    except ImportError as error:
        return Line(example.models, example.models, reasons=[f"{error.name} is not installed"])
    vlm = open_vlm(model.eval())
    assert vlm is not None
    line = Line(vlm.family, example.models, "" if vlm.tower is None else _prefix(vlm.tower, ""))
    _try_cuts(line, model, inputs, (LLM,) if vlm.tower is None else (*WHERES, LLM))
    if vlm.tower is None:
        line.reasons.append(vlm.reason.removeprefix(f"{vlm.family} "))
    line.coarse = ", ".join(_coarse(model, inputs, where) for where in (("2", LLM) if vlm.tower is not None else (LLM,)))
    line.pooling = _pooling(model, inputs, LLM, "sizes do not reach it")
    return line


def _try_cuts(line: Line, model: nn.Module, inputs: Inputs, wheres: Sequence[str]) -> None:
    """Drops and merges at all these places, noted in the line."""
    for places, rest in ((line.drops, "drop"), (line.merges, "merge")):
        for where in wheres:
            try:
                _cut(model, inputs, f"grid@{where}:5(rest={rest})")
            except UserError as error:
                line.reasons.append(f"{SHOWN[where]} {rest}: {error}")
            else:
                places.append(SHOWN[where])


def _cut(model: Any, inputs: Inputs, plan: Plan | str) -> Tensor:
    """The feature, or the logits, with the plan on, which really cut."""
    from tokensieve.models.features import encode_image

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
    found = []

    def look(view: View, keep: int) -> Reduction:
        attention = view.attention
        assert attention is not None
        if attention.prefix and attention.has_cls and torch.equal(view.coarse(), attention.cls_row()):
            found.append("last token's row" if where == LLM else "CLS row")
        else:
            found.append("received" if torch.equal(view.coarse(), attention.received()) else "pooling query")
        return Reduction.keep(torch.arange(keep).expand(len(view.tokens), -1), view.n)

    _cut(model, inputs, _plan(look, where, needs=("attention",)))
    return found[0]


def _pooling(model: nn.Module, inputs: Inputs, where: str, otherwise: str) -> str:
    """Whether sizes of tokens merged there change what comes out: the same merge is tried with sizes and without."""

    def merged(sized: bool) -> Callable[..., Reduction]:
        def join(view: View, keep: int) -> Reduction:
            batch, first = len(view.tokens), view.n - keep
            groups = (torch.arange(view.n) - first).clamp_min(0).expand(batch, -1)  # one big group, the others single
            index = torch.arange(first, view.n).expand(batch, -1)
            reduction = Reduction.merge(groups, index, view.sizes_or_ones())
            return reduction if sized else Reduction(index, view.n, reduction.weight, torch.ones_like(index, dtype=torch.float))

        return join

    try:
        sized, unsized = (_cut(model, inputs, _plan(merged(way), where, selects=False)) for way in (True, False))
    except UserError as error:
        return f"no: {error}"
    return otherwise if torch.allclose(sized, unsized, atol=1e-6) else "by size"


def markdown(lines: Sequence[Line]) -> str:
    """The page: what the columns mean, and the table."""
    rows = [HEADS, tuple("---" for _ in HEADS), *(line.cells() for line in lines)]
    notes = "".join(f"\n{note}.\n" for note in map(Line.why_not, lines) if note)
    return INTRO + "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows) + notes


def run(args: Namespace) -> None:
    """Prints the table, and writes it as Markdown where args.output says so."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from tokensieve import files

    if args.output is not None:
        files.check_writable(Path(args.output))
    lines = table()
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    shown.add_column("family, for example", overflow="fold")
    for head, width in zip(HEADS[2:], (12, 8, 18, 7), strict=True):
        shown.add_column(head, width=width)
    for line in lines:
        family, models, *others = line.cells()
        shown.add_row(f"{family}\n  {models}", *others)
    console = Console()
    console.print(shown)
    for note in filter(None, map(Line.why_not, lines)):
        console.print(note, highlight=False)
    if args.output is not None:
        files.replace_file(Path(args.output), markdown(lines).encode())
