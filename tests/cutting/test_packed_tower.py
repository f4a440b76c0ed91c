"""Cuts in the towers of Qwen-VL models, by whole squares of patches.

The reference runs all patches through every block, with attention written out here, and hides the dropped ones as keys behind
the cut.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokensieve
from tests.support.rounding import assert_near
from tests.support.states import assert_untouched, snapshot
from tests.support.video_prompts import model_and_batch
from tests.support.vlm_models import IMAGE, in_float64, relative, rows_of
from tokensieve import Reduction, UserError, View
from tokensieve.cutting.cache import cached_length
from tokensieve.errors import Uncuttable
from tokensieve.methods.registry import describe
from tokensieve.models.patching import capture_calls
from tokensieve.models.registry import open_tower
from tokensieve.plan import Budget, Plan, Step, Where
from tokensieve.scoring import top

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
UNIT, SIDE = 4, 2  # patches of a square; squares on the side of a window
HOW: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
STEPS = 3000  # norms and rotary angles of these models compute in float32, whatever the model's type
GRIDS = {"image": [[1, 8, 8], [1, 4, 6]], "video": [[3, 4, 4], [2, 4, 6]]}


def largest(view: View, keep: int) -> Reduction:
    """A selection that the reference can repeat."""
    return Reduction.keep(top(view.tokens.sum(-1), keep), view.n)


def leading(view: View, keep: int) -> Reduction:
    """The first squares, so that nothing is left of whole windows."""
    return Reduction.keep(torch.arange(keep).expand(len(view.tokens), -1), view.n)


CHOICES = {largest: lambda means, k: means.sum(-1).topk(k).indices, leading: lambda means, k: torch.arange(k)}


def plan_at(method: Any, layers: str, budget: str) -> Plan:
    return Plan((Step(describe(method), Where.parse(layers), Budget.parse(budget)),))


def windowed(family: str) -> tuple[Any, dict[str, Tensor]]:
    """A model in float64, that of Qwen2.5 with several windows in an image."""
    model, batch = in_float64(*relative(family))
    model.model.visual.window_size = 4 * SIDE * 2  # pixels
    return model, batch


def order_of(family: str, grids: list[list[int]]) -> Tensor:
    """The squares in the order of the sequence, by their raster numbers."""
    found, first = [], 0
    for frames, h, w in grids:
        rows, columns = h // 2, w // 2
        squares = [(t, r, c) for t in range(frames) for r in range(rows) for c in range(columns)]
        numbers = range(first, first + len(squares))
        windows = [(t, r // SIDE, c // SIDE) if family == "qwen2_5_vl" else () for t, r, c in squares]
        found += [number for _, number in sorted(zip(windows, numbers, strict=True))]
        first += len(squares)
    return torch.tensor(found)


def attend(attention: Any, x: Tensor, tables: tuple[Tensor, Tensor], allowed: Tensor) -> Tensor:
    """Attention of all patches (P, D) to those that each may see, (P, P)."""
    q, k, v = attention.qkv(x).view(len(x), 3, attention.num_heads, -1).permute(1, 2, 0, 3)  # (H, P, d) each
    cos, sin = (table.float() for table in tables)

    def turn(y: Tensor) -> Tensor:
        first, second = y.float().chunk(2, -1)
        return (y.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)

    logits = turn(q) @ turn(k).transpose(1, 2) * q.shape[-1] ** -0.5
    weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1)
    return attention.proj((weights @ v).transpose(0, 1).flatten(1))


@torch.no_grad()
def reference(family: str, model: Any, pixels: Tensor, grids: list[list[int]], layers: list[int], method: Any, share: float):
    """The features, and the deep features of each layer, of all squares; and which are left, (S,)."""
    visual, given = model.model.visual, []
    for block in visual.blocks:
        hook = block.register_forward_pre_hook(lambda _, args, kwargs: given.append((args, kwargs)), with_kwargs=True)
        given.append(hook)
    visual(pixels, grid_thw=torch.tensor(grids))
    inputs = [each for each in given if isinstance(each, tuple)]
    for hook in given[: len(visual.blocks)]:
        hook.remove()
    order, counts = order_of(family, grids), [t * h * w // UNIT for t, h, w in grids]
    alive = torch.ones(len(order), dtype=torch.bool)  # by raster numbers
    x, deep = inputs[0][0][0], []
    taps = list(getattr(visual, "deepstack_visual_indexes", ()))

    def choose() -> None:
        means = torch.zeros(len(order), x.shape[1], dtype=x.dtype).index_copy(0, order, x.view(-1, UNIT, x.shape[1]).mean(1))
        for image, of_image in zip(means.split(counts), alive.split(counts), strict=True):
            left = of_image.nonzero()[:, 0]
            kept = left[CHOICES[method](image[left], max(1, -(-len(left) * int(share * 100) // 100)))]
            of_image.zero_()[kept] = True

    if 0 in layers:
        choose()
    for number, (block, (_, kwargs)) in enumerate(zip(visual.blocks, inputs, strict=True), start=1):
        chunk = torch.bucketize(torch.arange(len(x)), kwargs["cu_seqlens"].long(), right=True)
        seen = alive[order].repeat_interleave(UNIT)
        allowed = (chunk[:, None] == chunk) & seen | torch.eye(len(x), dtype=torch.bool)
        x = x + attend(block.attn, block.norm1(x), kwargs["position_embeddings"], allowed)
        x = x + block.mlp(block.norm2(x))
        if number - 1 in taps:
            deep.append(visual.deepstack_merger_list[taps.index(number - 1)](x))
        if number in layers:
            choose()
    return [tokens[order.argsort()] for tokens in (visual.merger(x), *deep)], alive


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("medium", ["image", "video"])
@pytest.mark.parametrize("layers", ["0", "1", "2", "3", "1,2", "0,1,3"])
@pytest.mark.parametrize("method", [largest, leading])
@torch.no_grad()
def test_dropped_squares_are_hidden_from_later_blocks(family: str, medium: str, layers: str, method: Any) -> None:
    model, _ = windowed(family)
    grids = GRIDS[medium]
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), 96, generator=torch.Generator().manual_seed(1)).double()
    wanted, alive = reference(family, model, pixels, grids, list(map(int, layers.split(","))), method, 0.4)
    with tokensieve.apply(model, plan_at(method, layers, "40%")) as handle:
        out = getattr(model.model, f"get_{medium}_features")(pixels, torch.tensor(grids), return_dict=True)
    streams = [torch.cat(list(layer)) for layer in (out.pooler_output, *(getattr(out, "deepstack_features", None) or ()))]
    assert len(streams) == len(wanted) and 0 < alive.sum() < len(alive)
    for got, full in zip(streams, wanted, strict=True):
        assert_near(got[alive], full[alive], STEPS)
        assert not got[~alive].any()
    assert [row.layer for row in handle.ledger] == layers.split(",")
    assert handle.ledger[-1].tokens_out == max(part.sum() for part in alive.split([t * h * w // UNIT for t, h, w in grids]))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_blocks_and_mergers_behind_a_cut_run_on_fewer_patches(family: str) -> None:
    model, batch = windowed(family)
    visual = model.model.visual
    with (
        tokensieve.apply(model, plan_at(leading, "1", "4")),
        capture_calls(visual.blocks[2]) as calls,
        capture_calls(visual.merger) as merged,
    ):
        out = model.model.get_image_features(batch["pixel_values"], batch["image_grid_thw"], return_dict=True)
    assert calls[0].output.shape[0] == 2 * 4 * UNIT and out.last_hidden_state.shape[0] == 2 * 4 * UNIT
    assert merged[0].output.shape[0] == (8 * 8 + 4 * 6) // UNIT


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_behind_the_last_block_a_cut_is_that_behind_the_merger(family: str) -> None:
    model, batch = windowed(family)
    made = []
    for place in ("3", "out"):
        with tokensieve.apply(model, f"grid@{place}:5") as handle:
            made.append(model(**batch).logits)
            made.append(model.generate(**batch, **HOW | {"num_beams": 2}).sequences)
            assert handle.ledger[0].tokens_out == 5
    assert_near(made[0], made[2], STEPS)
    assert torch.equal(made[1], made[3])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_in_a_batch_with_several_images_and_a_cache_it_is_as_alone(family: str) -> None:
    model, batch = windowed(family)
    rows = [[0, 1], [1], [1, 0]]
    together = rows_of(batch, rows)
    alone = [rows_of(batch, [row], (words,)) for row, words in zip(rows, (2, 5, 3), strict=True)]
    plan = "random@0:80% + divprune@2:60% + random@out:70% + grid@llm.2:2"
    with tokensieve.apply(model, plan) as handle:
        numbers = torch.arange(5)
        with handle.call(samples=numbers):
            cached, uncached = model.generate(**together, **HOW), model.generate(**together, **HOW, use_cache=False)
        ledger = [row.layer for row in handle.ledger]
        singles = []
        for prompt, own in zip(alone, numbers.split([2, 1, 2]), strict=True):
            with handle.call(samples=own):
                singles.append(model.generate(**prompt, **HOW))
    assert ledger == ["0", "2", "out", "llm.2"]
    for step, (a, b) in enumerate(zip(cached.logits, uncached.logits, strict=True)):
        assert_near(a, b, STEPS)
        for row, single in enumerate(singles):
            assert_near(a[row], single.logits[step][0], STEPS)
    lengths = [cached_length(cached.past_key_values, layer) for layer in range(4)]
    assert lengths[0] == lengths[1] > lengths[2] == lengths[3]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_several_images_are_cut_as_one_by_one(family: str) -> None:
    model, batch = windowed(family)
    parts = batch["pixel_values"].split(batch["image_grid_thw"].prod(1).tolist())
    with tokensieve.apply(model, "random@1:50%") as handle:
        whole = model.model.get_image_features(batch["pixel_values"], batch["image_grid_thw"]).pooler_output
        handle.restart()
        for part, grid, together in zip(parts, batch["image_grid_thw"], whole, strict=True):
            one = model.model.get_image_features(part, grid[None]).pooler_output[0]
            assert_near(one, together, STEPS)
            assert torch.equal(one.any(1), together.any(1))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_images_and_videos_of_a_prompt(family: str) -> None:
    model, batch = in_float64(*model_and_batch(family))
    seen = []

    def record(view: View, keep: int) -> Reduction:
        seen.append((view.grid, None if view.frames is None else view.frames[0].bincount().tolist()))
        return leading(view, keep)

    full = model(**batch).logits
    with tokensieve.apply(model, plan_at(record, "2", "50%")) as handle:
        cached, uncached = model.generate(**batch, **HOW), model.generate(**batch, **HOW, use_cache=False)
        assert [row.layer for row in handle.ledger] == ["2"]
        assert len(handle.samples) == 5  # type: ignore[arg-type]
    images = [frames for grid, frames in seen if grid is not None and len(grid) == 2]
    videos = [(grid, frames) for grid, frames in seen if grid is not None and len(grid) == 3]
    assert images == [None] * len(images) and len(images) >= 2 and len(videos) >= 3
    assert all(frames == [grid[1] * grid[2]] * grid[0] for grid, frames in videos)
    for a, b in zip(cached.logits, uncached.logits, strict=True):
        assert_near(a, b, STEPS)
    assert not torch.allclose(cached.logits[0], full[:, -1].float(), atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_what_keeps_everything_and_what_is_removed_change_no_bit(family: str) -> None:
    model, batch = relative(family)
    before, stock = snapshot(model), model(**batch).logits
    for plan in ("none", "grid@1:100%"):
        with tokensieve.apply(model, plan):
            assert torch.equal(model(**batch).logits, stock)
    with tokensieve.apply(model, "grid@0,2:50%"):
        assert not torch.equal(model(**batch).logits, stock)
    assert_untouched(model, before)
    assert torch.equal(model(**batch).logits, stock)


@torch.no_grad()
def test_a_plan_behind_the_tower_leaves_the_tower_alone() -> None:
    model, _ = relative("qwen2_5_vl")
    with tokensieve.apply(model, "grid@out:4 + grid@llm.2:2"):
        assert not any("forward" in module.__dict__ for module in model.model.visual.modules())


@torch.no_grad()
def test_budgets_count_squares() -> None:
    model, batch = relative("qwen2_5_vl")
    both = rows_of(batch, [[0, 1]])
    ledgers = {}
    for budget in ("4", "25%", "11/prompt", "4/tile"):
        with tokensieve.apply(model, f"grid@1:{budget}") as handle:
            model(**both)
            ledgers[budget] = (handle.ledger[0].tokens_in, handle.ledger[0].tokens_out, handle._pass.layouts)  # type: ignore
            assert handle.token_grid(1).columns == 3  # type: ignore[union-attr]
    assert {budget: row[:2] for budget, row in ledgers.items()} == {
        "4": (16, 4),
        "25%": (16, 4),
        "11/prompt": (16, 8),
        "4/tile": (16, 4),
    }
    one = rows_of(batch, [[0]])
    with tokensieve.apply(model, "grid@1:9 + grid@out:4") as handle:
        model(**one)
    assert [place for place, _ in handle.stages] == ["1", "out"]
    assert handle.kept is not None and handle.kept.shape == (1, 4) and handle.kept.max() < 16


@pytest.mark.parametrize("family", FAMILIES[:2])
@torch.no_grad()
def test_tokens_can_be_merged_without_sizes(family: str) -> None:
    model, batch = windowed(family)
    one = rows_of(batch, [[0]])
    grid, visual = one["image_grid_thw"], model.model.visual
    with capture_calls(visual.merger) as calls:
        model.model.get_image_features(one["pixel_values"], grid)
    states = calls[0].args[0].view(16, -1)[order_of(family, grid.tolist()).argsort()].view(2, 2, 2, 2, -1)
    wanted = visual.merger(states.mean((1, 3)).view(16, -1))  # of 2 x 2 squares each
    with tokensieve.apply(model, "pool@3:25%(sizes=no)"):
        features = model.model.get_image_features(one["pixel_values"], grid).pooler_output[0]
    assert_near(features[features.any(1)].float(), wanted)  # means are computed in float32


@torch.no_grad()
def test_deep_features_are_merged_too_or_it_is_refused() -> None:
    model, batch = windowed("qwen3_vl")
    one = rows_of(batch, [[0]])
    with tokensieve.apply(model, "pool@1:25%(sizes=no)"):
        out = model.model.get_image_features(one["pixel_values"], one["image_grid_thw"], return_dict=True)
    with capture_calls(model.model.visual.blocks[0]) as calls:
        model.model.get_image_features(one["pixel_values"], one["image_grid_thw"])
    states = calls[0].output.view(2, 2, 2, 2, -1).mean((1, 3)).view(16, -1)
    deep = out.deepstack_features[0][0]
    assert_near(deep[deep.any(1)].float(), model.model.visual.deepstack_merger_list[0](states))
    with pytest.raises(
        UserError, match=r"deep features of block 1 are made before this cut.*merge at @1 or before, or use pool@out"
    ):
        tokensieve.apply(model, "pool@2:25%(sizes=no)")


@torch.no_grad()
def test_smaller_images_are_cut_too() -> None:
    model, batch = windowed("qwen3_vl")
    with tokensieve.apply(model, "resize(scale=0.5) + grid@1:50% + grid@out:1") as handle:
        model(**batch)
        assert [(row.layer, row.tokens_in) for row in handle.ledger] == [("image", 16), ("1", 4), ("out", 2)]
        out = model.model.get_image_features(batch["pixel_values"], batch["image_grid_thw"], return_dict=True)
    assert [int(each.any(1).sum()) for each in out.pooler_output] == [1, 1]
    assert [int(each.any(1).sum()) for layer in out.deepstack_features for each in layer] == [1] * 4


def test_gradients_reach_the_patches_that_are_left() -> None:
    model, batch = relative("qwen2_5_vl")
    pixels = batch["pixel_values"].requires_grad_()
    with tokensieve.apply(model, plan_at(leading, "0", "4")):
        out = model(**batch)
    out.logits[:, -1].sum().backward()
    assert pixels.grad is not None
    moved = pixels.grad.any(1).view(-1, UNIT)
    assert moved.all(1).nonzero()[:, 0].tolist() == [0, 1, 2, 3, 16, 17, 18, 19] and moved.sum() == 8 * UNIT


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("grid@1.attn:4", "the blocks of this tower run whole; cut behind one, as in grid@1"),
        ("anchor@1:4", r"anchor needs attention of the block before the cut.*only tokens; try anchor@llm\.2"),
        ("tome@0:4", "tome needs attention"),
        ("pixelprune@0:4", "needs the pixels of the patches"),
        ("grid@1:4(rest=merge)", "sizes of merged tokens would be lost; use rest=drop, sizes=no or grid@out"),
        ("grid@1:4(rest=fuse)", "sizes of merged tokens would be lost; use rest=drop or grid@out"),
        ("cover@1:4", "use sizes=no or cover@out"),
        ("dpcknn@1:4", "sizes of merged tokens would be lost; use dpcknn@out"),
        ("grid@4:4", "no layer 4 in a tower of 3 blocks"),
    ],
)
def test_what_is_refused_says_why(plan: str, reason: str) -> None:
    model, _ = relative("qwen2_vl")
    before = snapshot(model)
    with pytest.raises(UserError if "@4" in plan else Uncuttable, match=reason):
        tokensieve.apply(model, plan)
    assert_untouched(model, before)


def test_the_tower_is_not_cut_apart_from_its_model() -> None:
    model, batch = relative("qwen2_5_vl")
    with pytest.raises(Uncuttable, match="joins the patches of all images to one sequence"):
        open_tower(model)
    with torch.no_grad(), tokensieve.apply(model, "grid@1:4"):
        with pytest.raises(UserError, match="call get_image_features"):
            model.model.visual(batch["pixel_values"], grid_thw=batch["image_grid_thw"])
        assert (batch["input_ids"] == IMAGE).any() and model(**batch).logits.isfinite().all()


def test_gradient_checkpointing_is_refused() -> None:
    model, _ = relative("qwen3_vl")
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(UserError, match="gradient checkpointing"):
        tokensieve.apply(model, "grid@1:4")
