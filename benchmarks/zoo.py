"""What deciding costs: every method's decision as a share of one ViT-B/16 block and of one decoder layer of 7B size.

    python benchmarks/zoo.py --output benchmarks/results/zoo.json
    python benchmarks/zoo.py --output zoo.json --methods tome divprune --oracle_rounds 0     # the rows of others stay

Both have random weights, and a decision is timed with everything it reads at hand: keys, queries and the log-sum-exp of their
rows, as an opened block gives them. The block sees 196 patches of 16 images; the layer (width 4096, 32 heads, MLP 11008) reads
576 image tokens, 35 of the system before them and 13 of the question behind. Methods for videos see these as 16 frames of 6 x
6. Budgets are the authors' own, at the first of their cuts (a share counts from what arrives), and half of the tokens where
they have none, as controls.

`realized` is the share of the speed of the oracle (the same numbers of tokens, chosen at no cost) that the method's own plan
reaches on a whole ViT-B/16; for methods of the decoder it is in the files of the leaderboard. All is CPU time of one thread, in
interleaved rounds; ratios are medians of ratios within a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve import View, files, list_methods, provenance
from tokensieve.core import Inputs, Question, Rotary
from tokensieve.cutting.placement import place_plan
from tokensieve.errors import one_line
from tokensieve.measuring.oracle import oracle
from tokensieve.measuring.rounds import Ratio, Variant, detached_handle, interleaved
from tokensieve.methods.registry import Method, Place
from tokensieve.models import loading
from tokensieve.models.features import encode_image
from tokensieve.models.registry import open_tower
from tokensieve.models.tower import Tower
from tokensieve.plan import Budget, Plan, Step, make_step
from tokensieve.testing import fresh_part, make_view

CPU = torch.device("cpu")
SYSTEM, IMAGE, WORDS, WIDTH, HEADS = 35, 576, 13, 4096, 32
LAYERS = 32
HALF = Budget.parse("50%")
Calls = dict[str, Callable[[], Any]]


def tower_view(tower: Tower, batch: int, generator: torch.Generator) -> View:
    """What methods see after the first block of a ViT-B/16."""
    x = torch.randn(batch, 197, 768, generator=generator)
    behind, attention = tower.blocks[0].attend(x, None)
    after = tower.blocks[0].mlp(behind)
    text = torch.randn(batch, 1, 512, generator=generator)
    return View(
        tokens=after[:, 1:].contiguous(),
        prefix=after[:, :1].contiguous(),
        grid=(14, 14),
        attention=attention,
        layer=6,
        depth=12,
        place="6",
        samples=torch.arange(batch),
        earlier=dict.fromkeys(range(1, 12), attention),
        before=behind[:, 1:].contiguous(),
        pixels=torch.randn(batch, 196, 768, generator=generator),
        text=text,
        image_embeds=torch.randn(batch, 196, 512, generator=generator),
    )


def decoder_view(generator: torch.Generator, grid: tuple[int, ...] = (24, 24)) -> View:
    """What methods see before a layer of a 7B-sized decoder, of one prompt with an image, or with a video."""
    length = SYSTEM + IMAGE + WORDS
    q, k, v = (torch.randn(1, HEADS, length, WIDTH // HEADS, generator=generator) for _ in range(3))
    tokens, words = (torch.randn(1, n, WIDTH, generator=generator) for n in (IMAGE, SYSTEM + WORDS))
    question = Question(words, torch.ones(1, SYSTEM + WORDS, dtype=torch.bool))
    inverse = 10000.0 ** (-torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))
    angles = (torch.arange(length)[:, None] * inverse).repeat(1, 2)[None]  # (1, L, d)
    span = slice(SYSTEM, SYSTEM + IMAGE)
    of_image, of_text = angles[:, span], torch.cat([angles[:, : span.start], angles[:, span.stop :]], dim=1)
    return make_view(
        tokens=tokens,
        grid=grid,
        q=q,
        k=k,
        v=v,
        span=(SYSTEM, SYSTEM + IMAGE),
        text=torch.randn(1, 1, 512, generator=generator),
        image_embeds=torch.randn(1, IMAGE, 512, generator=generator),
        layer=2,
        depth=LAYERS,
        place="llm.2",
        samples=torch.arange(1),
        question=question,
        inputs=Inputs(tokens, question),
        rotary=Rotary((of_image.cos(), of_image.sin()), (of_text.cos(), of_text.sin())),
        final_norm=lambda x: F.rms_norm(x, x.shape[-1:]),
    )


def output_view(generator: torch.Generator) -> View:
    """What methods see at the output of a CLIP ViT-L/14 at 336 pixels, of one image."""
    q, k, v = (torch.randn(1, 16, IMAGE + 1, 64, generator=generator) for _ in range(3))
    return make_view(
        tokens=torch.randn(1, IMAGE, 1024, generator=generator),
        prefix=torch.randn(1, 1, 1024, generator=generator),
        grid=(24, 24),
        q=q,
        k=k,
        v=v,
        earlier=dict.fromkeys(range(1, 24), (q, k)),
        text=torch.randn(1, 1, 512, generator=generator),
        image_embeds=torch.randn(1, IMAGE, 512, generator=generator),
        layer=24,
        depth=24,
        place="out",
        samples=torch.arange(1),
    )


def decoder_layer() -> Callable[[], Any]:
    """The prefill of one layer."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=WIDTH, num_attention_heads=HEADS, intermediate_size=11008, num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    layer: Any = LlamaDecoderLayer(config, 0).eval()
    rotary: Any = LlamaRotaryEmbedding(config)
    x = torch.randn(1, SYSTEM + IMAGE + WORDS, WIDTH)
    angles = rotary(x, torch.arange(x.shape[1])[None])
    return lambda: layer(x, position_embeddings=angles)


def needs_budget(method: Method) -> bool:
    """Whether nobody has said how many tokens it leaves, as of controls."""
    return method.budget is None and method.part is None


def own_step(method: Method) -> Step:
    """The method as its authors use it, or for half of the tokens."""
    return make_step(method, None, HALF if needs_budget(method) else None, {})


def own_budget(method: Method, view: View) -> int:
    """The tokens that the authors leave at their first cut, of those of the view."""
    n, step = view.n, own_step(method)
    budget = HALF if method.budget is None else step.resolved_budget()
    keep = budget.count(n)
    if method.count is not None:
        share = budget.amount if budget.kind == "share" else None
        keep = method.count(Place(n, n, keep, keep, 0, 3, share), step.options)
    least = 1 if method.min_keep is None else method.min_keep(n)
    return max(least, min(keep, n - 1))


def decision(method: Method, view: View) -> tuple[int, Callable[[], Any]]:
    """How many tokens are kept, and the decision; an error where the view lacks what the method needs."""
    keep, options = own_budget(method, view), own_step(method).arguments()
    if method.part is not None:
        part = fresh_part(method, view.tokens.shape[2], view.n)
        if hasattr(part, "places") and part.places():
            view = View(**{**vars(view), "place": part.places()[0]})
        if method.mixes:
            keep = part.budget(view.place)  # type: ignore[operator]
        view = View(**{**vars(view), "part": part})

    def decide() -> Any:
        return method.decide(view, keep, **options)

    decide()
    return keep, decide


def shares(calls: Mapping[str, Callable[[], Any]], whole: str, repeats: int) -> dict[str, float]:
    """CPU time of the calls as shares of that of one of them."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            started = time.process_time()
            call()
            seconds[name].append(time.process_time() - started)
    return {
        name: statistics.median(a / b for a, b in zip(series[1:], seconds[whole][1:], strict=True))
        for name, series in seconds.items()
    }


def realized(model: Any, methods: list[Method], batch: int, rounds: int) -> dict[str, dict[str, Any]]:
    """The share of the oracle's speed that each method's own plan reaches on a whole tower."""
    images = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    found: dict[str, dict[str, Any]] = {}

    def call() -> Tensor:
        return encode_image(model, images)

    for method in methods:
        try:
            plan = f"{method.name}:{HALF}" if needs_budget(method) else method.name
            handle = detached_handle(model, plan)
            place_plan(Plan.parse(plan), open_tower(model), seed=0)
            if handle.leaves_feature:
                continue
            with handle:
                call()
            ideal = detached_handle(model, oracle(handle))
            variants = [Variant(call), Variant(call, handle), Variant(call, ideal)]
            for variant in variants:
                variant.run()
            full, ours, best = ([each.counted(CPU) for each in row] for row in interleaved(variants, CPU, range(rounds)))
        except Exception as error:  # what this tower cannot carry out
            found[method.name] = {"skipped": one_line(error, 200)}
            continue
        reached, speedup = Ratio.of(best, ours), Ratio.of(full, ours)
        found[method.name] = {**reached.entries("realized"), **speedup.entries("speedup"), "plan": plan}
        print(f"{method.name}: {reached.median:.2f} of the oracle, {speedup.median:.2f}x", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", help="default: all that choose tokens")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--oracle_batch", type=int, default=8)
    parser.add_argument("--oracle_rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    methods = [method for method in list_methods() if method.name != "none" and not method.on_image]
    methods = [method for method in methods if not args.methods or method.name in args.methods]
    model = loading.architecture("ViT-B-16", "").eval()
    tower, generator = open_tower(model), torch.Generator().manual_seed(0)
    rows: dict[str, dict[str, Any]] = {method.name: {"method": method.name} for method in methods}
    others = [row for row in files.read_json(args.output)["rows"] if row["method"] not in rows] if args.output.exists() else []
    with torch.inference_mode():
        x = torch.randn(args.batch_size, 197, 768, generator=generator)
        whole = {"block": lambda: tower.blocks[0].module(x), "layer": decoder_layer()}
        views = {
            "block": [tower_view(tower, args.batch_size, generator)],
            "layer": [output_view(generator), decoder_view(generator), decoder_view(generator, grid=(16, 6, 6))],
        }
        for what, choices in views.items():
            calls: Calls = {what: whole[what]}
            for method in methods:
                for view in choices:  # the tower's output first, where the method can stand there
                    is_video = view.frames is not None
                    if is_video != (what == "layer" and method.name in VIDEOS) or (
                        view.place == "out" and method.name in DECODERS
                    ):
                        continue
                    try:
                        rows[method.name][f"keep_{what}"], calls[method.name] = decision(method, view)
                        break
                    except Exception as error:
                        rows[method.name][f"{what}_skipped"] = one_line(error, 200)
            for name, share in shares(calls, what, args.repeats).items():
                if name != what:
                    rows[name][f"of_{what}"] = share
                    print(f"{name}: {share:.1%} of a {what}", flush=True)
            write(args, [*others, *rows.values()])
        if args.oracle_rounds:
            for name, found in realized(model, methods, args.oracle_batch, args.oracle_rounds).items():
                rows[name] |= found
            write(args, [*others, *rows.values()])


def write(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    about = {name: getattr(args, name) for name in ("batch_size", "repeats", "oracle_batch", "oracle_rounds")}
    value = {**about, "threads": 1, "rows": sorted(rows, key=lambda row: row["method"]), "versions": provenance.versions()}
    files.write_bytes(args.output, files.json_bytes(value))


DECODERS = ("fastv", "pyramiddrop", "sparsevlm", "sparsevlm2", "dart")
VIDEOS = ("evs", "fastvid", "flashvid", "frames", "holitom", "llava_scissor", "vcast", "vidcom2", "vidcom2_vllm")


if __name__ == "__main__":
    main()
