"""Cuts at @out behind the projector, beside the stock decoder on the tokens that are left."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import tokensieve
from tests.support.rounding import assert_near
from tests.support.vlm_models import IMAGE, VARYING, in_float64, relative, rows_of
from tokensieve import Reduction, View
from tokensieve.cutting.allotment import allot
from tokensieve.cutting.cache import cached_length
from tokensieve.methods.registry import describe
from tokensieve.plan import Budget, Plan, Step, Where
from tokensieve.scoring import top

TILED = ("llava_next", "llava_onevision")
HOW: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
STEPS = 3000  # norms and softmax of these models compute in float32, whatever the model's type


def largest(view: View, keep: int) -> Reduction:
    """A selection that the test can repeat."""
    return Reduction.keep(top(view.tokens.sum(-1), keep), view.n)


def pairs(view: View, keep: int) -> Reduction:
    """Averages each token with the next one, in the place of the first. Sizes stay 1, so attention has no bias."""
    groups = (torch.arange(view.n) // 2).expand(len(view.tokens), -1)
    index = torch.arange(0, view.n, 2).expand(len(view.tokens), -1)
    merged = Reduction.merge(groups, index, view.sizes_or_ones())
    return replace(merged, sizes=torch.ones(index.shape))


def plan(method: Any, budget: str) -> Plan:
    return Plan((Step(describe(method), Where.parse("out"), Budget.parse(budget)),))


def tiles_of(model: Any, batch: dict[str, Tensor], total: int) -> list[Tensor]:
    """The placeholders of each tile of the first image: its tokens are numbered, and packed by the model's own code."""
    if "image_sizes" not in batch:
        return [torch.arange(total)]
    inner, size = model.model, batch["image_sizes"][:1]
    side = inner.config.vision_config.image_size // inner.config.vision_config.patch_size
    h, w = model_tiles(inner, size[0])
    numbers = torch.arange(h * w + 1, dtype=torch.float64)[:, None, None].expand(-1, side**2, 1)
    more = {"vision_feature_select_strategy": "default"} if "NextModel" in type(inner).__name__ else {}
    packed = inner.pack_image_features([numbers], size, image_newline=torch.tensor([-1.0], dtype=torch.float64), **more)[0][0]
    assert len(packed) == total
    return [at for tile in range(h * w + 1) if len(at := (packed[:, 0] == tile).nonzero()[:, 0])]


def model_tiles(inner: Any, size: Tensor) -> tuple[int, int]:
    import importlib

    library: Any = importlib.import_module(type(inner).__module__)
    shape = library.get_anyres_image_grid_shape(size, inner.config.image_grid_pinpoints, inner.config.vision_config.image_size)
    return shape[0], shape[1]


def expected_logits(model: Any, batch: dict[str, Tensor], merges: bool, keep: int) -> Tensor:
    """The logits of the words behind the image: the stock decoder reads the tokens that are left, at their positions."""
    inner, ids = model.model, batch["input_ids"]
    arguments = {name: batch[name] for name in ("pixel_values", "image_sizes", "image_grid_thw") if name in batch}
    out = inner.get_image_features(**arguments, return_dict=True)
    layers = [torch.cat(list(layer)) for layer in (out.pooler_output, *(getattr(out, "deepstack_features", None) or ()))]
    tiles = tiles_of(model, batch, len(layers[0]))
    shares = allot(keep, [len(at) for at in tiles])
    stays = torch.ones(len(layers[0]), dtype=torch.bool)
    for at, share in zip(tiles, shares, strict=True):
        stays[at] = False
        if merges:
            for layer in layers:
                for first, second in zip(at[::2], at[1::2], strict=False):
                    layer[first] = (layer[first] + layer[second]) / 2
            stays[at[::2]] = True
        else:
            stays[at[layers[0][at].sum(-1).argsort(descending=True)[:share]]] = True
    is_image = ids[0] == IMAGE
    left = torch.ones(ids.shape[1], dtype=torch.bool)
    left[is_image] = stays
    embeds = inner.get_input_embeddings()(ids)
    embeds[0, is_image] = layers[0]
    more: dict[str, Any] = {}
    if "mm_token_type_ids" in batch:
        names = ("mm_token_type_ids", "image_grid_thw", "attention_mask")
        positions = inner.get_rope_index(ids, **{name: batch[name] for name in names})[0]  # (3, 1, L)
    else:
        positions = torch.arange(ids.shape[1])[None]
    if len(layers) > 1:
        more = {"visual_pos_masks": is_image[None, left], "deepstack_visual_embeds": [layer[stays] for layer in layers[1:]]}
    more |= {"attention_mask": torch.ones_like(ids[:, left])}  # without one, transformers takes gaps for several sequences
    states = inner.language_model(inputs_embeds=embeds[:, left], position_ids=positions[..., left], use_cache=False, **more)
    words = int((~is_image).nonzero()[-1]) - int(is_image.nonzero()[-1])
    logits: Tensor = model.lm_head(states.last_hidden_state[:, -words:])
    return logits


@pytest.mark.parametrize("family", VARYING)
@pytest.mark.parametrize("merges", [False, True])
@torch.no_grad()
def test_it_is_the_stock_decoder_on_the_tokens_that_are_left(family: str, merges: bool) -> None:
    model, batch = in_float64(*relative(family))
    for image in (0, 1):
        alone = rows_of(batch, [[image]])
        expected = expected_logits(model, alone, merges, 5)
        with tokensieve.apply(model, plan(pairs if merges else largest, "5")) as handle:
            got = model(**alone).logits
        got = got[:, -expected.shape[1] :]
        assert_near(got.float() if merges else got, expected, STEPS)  # means are computed in float32
        assert handle.ledger[0].layer == "out" and handle.ledger[0].tokens_out < handle.ledger[0].tokens_in


@pytest.mark.parametrize("family", VARYING)
@torch.no_grad()
def test_in_a_batch_with_several_images_and_a_cache_it_is_as_alone(family: str) -> None:
    model, batch = in_float64(*relative(family))
    rows = [[0, 1], [1], [1, 0]]
    together = rows_of(batch, rows)
    wanted = "divprune@out:40%(rest=merge) + grid@llm.2:3"
    alone = [rows_of(batch, [row], (words,)) for row, words in zip(rows, (2, 5, 3), strict=True)]
    with tokensieve.apply(model, wanted) as handle:
        cached, uncached = model.generate(**together, **HOW), model.generate(**together, **HOW, use_cache=False)
        ledger = [row.layer for row in handle.ledger]
        beams = [model.generate(**together, **HOW | {"num_beams": 2}, use_cache=cache).sequences for cache in (True, False)]
        singles = [model.generate(**prompt, **HOW) for prompt in alone]
    assert ledger == ["out", "llm.2"]
    assert torch.equal(*beams)
    for step, (a, b) in enumerate(zip(cached.logits, uncached.logits, strict=True)):
        assert_near(a, b, STEPS)
        for row, single in enumerate(singles):
            assert_near(a[row], single.logits[step][0], STEPS)
    lengths = [cached_length(cached.past_key_values, layer) for layer in range(4)]
    assert lengths[0] == lengths[1] > lengths[2] == lengths[3]


@pytest.mark.parametrize("family", VARYING)
@torch.no_grad()
def test_each_image_of_a_prompt_is_cut_as_alone(family: str) -> None:
    model, batch = in_float64(*relative(family))
    arguments = [
        {name: rows_of(batch, rows)[name] for name in batch if name in ("pixel_values", "image_sizes", "image_grid_thw")}
        for rows in ([[0, 1, 0]], [[0]], [[1]])
    ]
    samples = torch.tensor([4, 9, 2])
    with tokensieve.apply(model, "random@out:7") as handle:
        made = []
        for given, numbers in zip(arguments, (samples, samples[:1], samples[1:2]), strict=True):
            with handle.call(samples=numbers):
                made.append(model.model.get_image_features(**given, return_dict=True))
    together, *alone = [out.pooler_output for out in made]
    for image, (single,) in enumerate(alone):
        assert_near(together[image], single, STEPS)
    assert not torch.allclose(together[2], together[0])  # another sample
    if family == "qwen3_vl":  # deep features follow the same choice
        kept = together[0].any(-1)
        assert all(torch.equal(layer[0].any(-1), kept) for layer in made[0].deepstack_features)


@pytest.mark.parametrize("family", TILED)
@torch.no_grad()
def test_tiles_share_a_budget_and_line_ends_stay(family: str) -> None:
    model, batch = relative(family)
    seen = []

    def look(view: View, keep: int) -> Reduction:
        assert view.grid is not None and view.grid[0] * view.grid[1] == view.n
        seen.extend([(view.grid, keep)] * len(view.tokens))
        return Reduction.keep(torch.arange(keep).expand(len(view.tokens), -1), view.n)

    alone = rows_of(batch, [[1]])  # 20 x 44 pixels: two tiles, whose padding is gone
    with tokensieve.apply(model, plan(look, "20")) as handle:
        model(**alone)
    features = model.model.get_image_features(alone["pixel_values"], alone["image_sizes"], return_dict=True).pooler_output[0]
    tiles = tiles_of(model, alone, len(features))
    assert [h * w for (h, w), _ in seen] == [len(at) for at in tiles]
    assert [keep for _, keep in seen] == allot(20, [len(at) for at in tiles])
    row = handle.ledger[0]
    assert vars(row) == {
        "layer": "out",
        "tokens_in": sum(map(len, tiles)),
        "tokens_out": 20,
        "mean_out": 20,
        "least_out": 20,
        "tiles": len(tiles),
        "most_of_tile": max(keep for _, keep in seen),
        "least_of_tile": min(keep for _, keep in seen),
    }
    kept = handle.kept
    assert kept is not None and kept.shape == (1, 20)  # among the tokens that are no line ends
    with tokensieve.apply(model, "grid@llm.1:20") as handle:
        cache = model(**alone, use_cache=True).past_key_values
    ends = len(features) - sum(map(len, tiles))
    text = alone["input_ids"].shape[1] - len(features)
    assert ends > 0 and handle.ledger[0].tokens_in == sum(map(len, tiles))
    assert cached_length(cache, 1) == text + ends + 20


@torch.no_grad()
def test_onevision_gives_one_of_several_images_no_tiles() -> None:
    model, batch = in_float64(*relative("llava_onevision"))
    counts = [37, 37]  # the small whole image, and one line end
    ids = torch.tensor([[1, 7, *[IMAGE] * 37, 9, *[IMAGE] * 37, 9, 20, 21]])
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": batch["pixel_values"],
        "image_sizes": batch["image_sizes"],
        "batch_num_images": torch.tensor([2]),
    }
    with tokensieve.apply(model, "grid@out:9") as handle:
        cache = model(**given, use_cache=True).past_key_values
    assert [(row.tokens_in, row.tokens_out) for row in handle.ledger] == [(36, 9)]
    assert cached_length(cache, 0) == ids.shape[1] - sum(counts) + 2 * (9 + 1)


def test_shares_are_whole_and_in_proportion() -> None:
    made = torch.Generator().manual_seed(0)
    for _ in range(200):
        sizes = torch.randint(1, 50, (int(torch.randint(1, 8, (), generator=made)),), generator=made).tolist()
        total = int(torch.randint(1, sum(sizes) + 5, (), generator=made))
        shares = allot(total, sizes)
        assert sum(shares) == min(max(total, len(sizes)), sum(sizes))
        assert all(1 <= share <= size for share, size in zip(shares, sizes, strict=True))
        if total >= sum(sizes) / min(sizes):  # each gets one by its share alone
            exact = [Fraction(min(total, sum(sizes)) * size, sum(sizes)) for size in sizes]
            assert all(abs(share - wanted) < 1 for share, wanted in zip(shares, exact, strict=True))
    assert allot(5, [4, 4, 4]) == [2, 2, 1] and allot(2, [9, 1, 1]) == [1, 1, 1]
