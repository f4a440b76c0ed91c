"""Budgets of each image, of each tile, and of all images of a prompt, in the tower, behind the projector and in the decoder."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import tokensieve
from tests.support.rounding import assert_near
from tests.support.vlm_models import IMAGE, in_float64, llava, prompts, relative, rows_of
from tokensieve import Budget, Plan, Reduction, UserError, View
from tokensieve.cutting.allotment import allot
from tokensieve.cutting.cache import cached_length
from tokensieve.cutting.passes import TiledRow
from tokensieve.errors import PlanError, PlanWarning
from tokensieve.methods.registry import describe
from tokensieve.plan import Step, Where

HOW: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
STEPS = 3000


def lengths(model: Any, batch: dict[str, Tensor], plan: str) -> tuple[list[int], Any]:
    """Cached tokens of every layer, and the handle."""
    with tokensieve.apply(model, plan) as handle:
        cache = model(**batch, use_cache=True).past_key_values
    return [cached_length(cache, layer) for layer in range(4)], handle


def text_of(batch: dict[str, Tensor]) -> int:
    return int((batch["input_ids"] != IMAGE).sum(1)[0])


def test_scopes_are_read_and_written() -> None:
    for text in ("64/tile", "25%/tile", "256/prompt", "25%/prompt", "-8/tile", "64"):
        assert str(Budget.parse(text)) == text
    plan = "cover@out:64/tile + grid@llm.2:256/prompt(rest=merge)"
    assert str(Plan.parse(plan)) == plan
    assert Budget.parse("64/tile") != Budget.parse("64") and Budget("keep", 64, "tile") == Budget.parse("64/tile")
    with pytest.raises(PlanError, match="Did you mean 'cover@out:64/tile'") as error:
        Plan.parse("cover@out:64/tiles")
    assert "not '/tiles'" in str(error.value)
    with pytest.raises(PlanError, match="Did you mean 'cover@out:64'"):
        Plan.parse("cover@out:64/image")
    with pytest.raises(UserError, match=r"no budget for each tile; write :64, or cut @out"):
        Plan.parse("cover@llm.2:64/tile")
    with pytest.raises(UserError, match="scope='frame'"):
        Budget("keep", 64, "frame")  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
@torch.no_grad()
def test_each_tile_keeps_its_budget(family: str) -> None:
    model, batch = relative(family)
    alone = rows_of(batch, [[0]])  # 48 x 48 pixels: the small image and four tiles of 36 tokens
    ends = 12
    for method, place in (("grid", "1"), ("anchor", "1"), ("grid", "2.attn"), ("grid", "out")):
        counts, handle = lengths(model, alone, f"{method}@{place}:7/tile" + "(k=2)" * (method == "anchor"))
        assert counts == [text_of(alone) + ends + 5 * 7] * 4
        assert handle.ledger == [TiledRow(place, 180, 35, 35.0, 35, 5, 7, 7)]
    assert "180 -> 35 tokens, 7 of each of 5 tiles" in str(handle)


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
@torch.no_grad()
def test_tiles_of_a_tower_share_the_budget_of_their_image(family: str) -> None:
    model, batch = in_float64(*relative(family))
    rows = [[0, 1], [1], [1, 0]]
    together = rows_of(batch, rows)
    plan = "anchor@1:53(k=1) + cover@llm.2:9"  # more than a tile has, and the attention of a block
    with tokensieve.apply(model, plan) as handle:
        cached, uncached = model.generate(**together, **HOW), model.generate(**together, **HOW, use_cache=False)
        row = handle.ledger[0]
        singles = [
            model.generate(**rows_of(batch, [images], (words,)), **HOW) for images, words in zip(rows, (2, 5, 3), strict=True)
        ]
    assert isinstance(row, TiledRow) and (row.tokens_out, row.least_out, row.tiles) == (53, 53, 5)
    for step, (a, b) in enumerate(zip(cached.logits, uncached.logits, strict=True)):
        assert_near(a, b, STEPS)
        for number, single in enumerate(singles):
            assert_near(a[number], single.logits[step][0], STEPS)


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
@torch.no_grad()
def test_a_cut_of_the_last_block_is_one_of_its_tiles_behind_the_projector(family: str) -> None:
    """The projector sees tokens one by one, so the same patches may be dropped before it or behind it."""
    model, batch = in_float64(*relative(family))
    alone = rows_of(batch, [[0]])
    depth = 2 if family == "llava_next" else 3  # LLaVA-NeXT takes the tokens before its last block
    made = []
    for place in (f"{depth}", "out"):
        with tokensieve.apply(model, f"grid@{place}:9/tile") as handle:
            made.append((model(**alone).logits[:, -4:], handle.kept))
    (before, kept_before), (behind, kept_behind) = made
    assert kept_before is not None and kept_behind is not None and torch.equal(kept_before, kept_behind)
    assert_near(before, behind, STEPS)


@torch.no_grad()
def test_images_of_a_prompt_share_its_budget() -> None:
    model, batch = in_float64(*relative("qwen2_5_vl"))
    rows = [[0, 1], [1], [0, 0, 1]]
    given = rows_of(batch, rows)
    sizes = [[16 if image == 0 else 6 for image in row] for row in rows]
    wanted = [sum(allot(13, of_row)) for of_row in sizes]
    assert wanted == [13, 6, 13]
    for plan in ("grid@out:13/prompt", "grid@llm.0:13/prompt"):
        with tokensieve.apply(model, plan) as handle:
            cached, uncached = model.generate(**given, **HOW), model.generate(**given, **HOW, use_cache=False)
            assert handle.ledger[0].tokens_out == max(share for of_row in sizes for share in allot(13, of_row))
            singles = [
                model.generate(**rows_of(batch, [images], (words,)), **HOW)
                for images, words in zip(rows, (2, 5, 3), strict=True)
            ]
        for step, (a, b) in enumerate(zip(cached.logits, uncached.logits, strict=True)):
            assert_near(a, b, STEPS)
            for number, single in enumerate(singles):
                assert_near(a[number], single.logits[step][0], STEPS)
        texts = [int((rows_of(batch, [row], (n,))["input_ids"] != IMAGE).sum()) for row, n in zip(rows, (2, 5, 3), strict=True)]
        longest = max(text + keep for text, keep in zip(texts, wanted, strict=True))
        assert cached_length(cached.past_key_values, 0) == longest + 2  # and the two tokens that were fed


@torch.no_grad()
def test_images_of_a_prompt_share_a_budget_in_the_tower() -> None:
    model = llava().double()
    given = prompts((2, 1, 3), (5, 4, 3))
    given["pixel_values"] = given["pixel_values"].double()
    shares = [*allot(21, [36] * 2), *allot(21, [36]), *allot(21, [36] * 3)]
    for plan in ("grid@2:21/prompt", "grid@out:21/prompt"):
        with tokensieve.apply(model, plan) as handle:
            got = model.generate(**given, **HOW)
            row = handle.ledger[0]
        assert (row.tokens_in, row.tokens_out, getattr(row, "least_out", None)) == (36, max(shares), min(shares))
        first = {"input_ids": given["input_ids"][:1], "attention_mask": given["attention_mask"][:1]}
        real = first["attention_mask"][0].bool()
        first = {name: value[:, real] for name, value in first.items()} | {"pixel_values": given["pixel_values"][:2]}
        with tokensieve.apply(model, plan):
            alone = model.generate(**first, **HOW)
        for a, b in zip(got.logits, alone.logits, strict=True):
            assert_near(a[0], b[0], STEPS)


def test_what_cannot_be_shared_says_why() -> None:
    model, batch = relative("llava_next")
    with pytest.raises(UserError, match=r"it is the last cut in the tower; give each tile a budget, as in grid@1:64/tile"):
        tokensieve.apply(model, "grid@1:20 + grid@2:10")
    wanted = pytest.raises(UserError, match="needs the prompt; call the model with input_ids")
    with torch.no_grad(), tokensieve.apply(model, "grid@out:20/prompt"), wanted:
        model.model.get_image_features(batch["pixel_values"], batch["image_sizes"])
    with pytest.raises(UserError, match="this model reads no prompts; write :20"):
        tokensieve.apply(model.model.vision_tower, "grid@1:20/prompt")
    onevision, _ = relative("llava_onevision")
    onevision.config.vision_aspect_ratio = onevision.model.config.vision_aspect_ratio = "anyres_max_1"
    sizes = torch.tensor([[48, 48]])
    wanted = pytest.raises(UserError, match="averages the tiles of an image that has many")
    with torch.no_grad(), tokensieve.apply(onevision, "grid@1:7/tile"), wanted:
        onevision.model.get_image_features(torch.zeros(1, 5, 3, 24, 24), sizes)


@pytest.mark.parametrize("scope", ["", "/prompt"])
@pytest.mark.parametrize(
    ("method", "share", "wanted"),
    [("evs", 33, 59), ("cosine", 33, 59), ("divprune", 33, 59), ("divprune", 36, 65), ("grid", 33, 60)],
)
@torch.no_grad()
def test_tiles_share_what_the_method_makes_of_a_share(method: str, share: int, wanted: int, scope: str) -> None:
    """180 tokens: 59.4 of them rounded down, to the nearest or up, as the method does; in every place the same."""
    model, batch = relative("llava_next")
    alone = rows_of(batch, [[0]])
    for place in ("out", "llm.0", "1"):
        with tokensieve.apply(model, f"{method}@{place}:{share}%{scope}") as handle:
            model(**alone)
        assert (handle.ledger[0].tokens_in, handle.ledger[0].tokens_out) == (180, wanted), place


@torch.no_grad()
def test_a_shared_budget_above_all_tokens_is_told_once() -> None:
    model, batch = relative("llava_next")
    with pytest.warns(PlanWarning), tokensieve.apply(model, "grid@out:200") as handle:
        model(**rows_of(batch, [[0]]))
    assert [note.partition(":")[2] for note in handle.notes] == [
        "200: at layer out 180 patch tokens arrive and 200 tokens are to be kept: everything is kept"
    ]


@pytest.mark.parametrize("place", ["1", "out", "llm.0"])
@torch.no_grad()
def test_a_method_knows_the_share_that_the_plan_states(place: str) -> None:
    seen: list[Fraction | None] = []

    def look(view: View, keep: int) -> Reduction:
        seen.append(view.share)
        return Reduction.keep(torch.arange(keep).expand(len(view.tokens), -1), view.n)

    def run(family: str, budget: str) -> set[Fraction | None]:
        seen.clear()
        model, batch = relative(family)
        with tokensieve.apply(model, Plan((Step(describe(look), Where.parse(place), Budget.parse(budget)),))):
            model(**batch)
        return {*seen}

    assert run("paligemma", "33%") == {Fraction(33, 100)}
    assert run("paligemma", "9") == run("paligemma", "-9") == {None}
    if place != "llm.0":  # tiles get numbers of tokens, which add up to the share of the image
        assert run("llava_next", "33%") == {None} and run("llava_next", "33%/tile") == {Fraction(33, 100)}
