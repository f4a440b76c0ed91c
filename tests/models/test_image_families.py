"""Families whose decoders see images in their own ways: tiles, rows with breaks, blocks in both directions, windows.

The reference runs all tokens through the stock layers, with the stock masks, and hides the dropped ones from a layer on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tokensieve
from tests.support.rounding import assert_near
from tests.support.vlm_models import IMAGE, in_float64, llava, prompts, relative
from tokensieve import UserError
from tokensieve.core import Reduction, View
from tokensieve.cutting.handle import Handle
from tokensieve.errors import Uncuttable
from tokensieve.methods.registry import describe
from tokensieve.plan import Budget, Plan, Step, Where
from tokensieve.testing.tiny_vlms import paligemma, pixtral

Model = tuple[Any, dict[str, Tensor]]


def windowed(decoder: str) -> Model:
    """A LLaVA whose decoder has a window of 30 tokens, in all layers (Mistral) or in the last ones (Qwen2)."""
    more = {"mistral": {}, "qwen2": {"use_sliding_window": True, "max_window_layers": 2}}[decoder]
    return llava(decoder, sliding_window=30, **more), prompts((2, 1), (5, 9))


BUILDERS: dict[str, Callable[[], Model]] = {
    **{name: partial(relative, name) for name in ("internvl", "idefics3", "smolvlm", "gemma3", "mistral3")},
    "paligemma": paligemma,
    "paligemma2": partial(paligemma, 2),
    "pixtral": partial(pixtral, 1),
    "mistral with a window": partial(windowed, "mistral"),
    "qwen2 with a window": partial(windowed, "qwen2"),
}
# tokens of each image, prompt by prompt
IMAGES = {
    "internvl": [[27], [9, 18]],
    "idefics3": [[45], [9, 18]],
    "smolvlm": [[45], [9, 18]],
    "gemma3": [[9, 9], [9]],
    "mistral3": [[12], [6, 4]],
    "paligemma": [[36, 36], [36]],
    "paligemma2": [[36, 36], [36]],
    "pixtral": [[48], [24, 16]],
    "mistral with a window": [[36, 36], [36]],
    "qwen2 with a window": [[36, 36], [36]],
}
TILED = ("internvl", "idefics3", "smolvlm")  # tiles of 9 tokens
STEPS = 3000  # roundings of float64; norms, softmax and rotary tables are computed in float32 all the same


def assert_same(family: str, got: Tensor, wanted: Tensor) -> None:
    """The same up to rounding. PaliGemma 2 has eager attention, whose softmax is computed in float32 all the same."""
    if family == "paligemma2":
        assert_near(got.float(), wanted)
    else:
        assert_near(got, wanted, steps=STEPS)


def third(n: int) -> int:
    """A third of n tokens, rounded up."""
    return math.ceil(n * 0.333)


def keeps(n: int) -> Tensor:
    """An arbitrary third of n tokens."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(n))[: third(n)].sort().values


def some(view: View, keep: int) -> Reduction:
    assert keep == third(view.n)
    return Reduction.keep(keeps(view.n).expand(len(view.tokens), -1), view.n)


def at(place: str) -> Plan:
    """`some` at a place."""
    return Plan((Step(describe(some), Where.parse(place), Budget.parse("33.3%")),))


def answer(model: Any, batch: dict[str, Tensor], **kwargs: Any) -> Any:
    how = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**batch, **how, **kwargs)


def dropped(family: str, batch: dict[str, Tensor], place: str) -> Tensor:
    """The tokens that `some` drops, (B, L): of each image, or at @out of each tile."""
    gone = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    for row, images in enumerate(IMAGES[family]):
        places = (batch["input_ids"][row] == IMAGE).nonzero()[:, 0]
        for own in places.split(9 if place == "out" and family in TILED else images):
            gone[row, own] = True
            gone[row, own[keeps(len(own))]] = False
    return gone


def hidden_from(layer: int, gone: Tensor) -> Callable[..., Any]:
    """A hook on a decoder layer that hides tokens (B, L), if it is this one or a later one."""

    def hide(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if module.self_attn.layer_idx < layer:
            return None
        mask, length = kwargs["attention_mask"], gone.shape[1]
        if mask is None:
            mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if mask.dtype == torch.bool:
            return args, kwargs | {"attention_mask": mask & ~gone[:, None, None]}
        return args, kwargs | {"attention_mask": mask.masked_fill(gone[:, None, None], torch.finfo(mask.dtype).min)}

    return hide


def decoder_of(model: Any) -> Any:
    inner = model.model
    return inner.text_model if hasattr(inner, "text_model") else inner.language_model


def hidden(model: Any, batch: dict[str, Tensor], layer: int, gone: Tensor) -> Tensor:
    """The logits of the stock model with tokens (B, L) hidden from a layer on."""
    hooks = [one.register_forward_pre_hook(hidden_from(layer, gone), with_kwargs=True) for one in decoder_of(model).layers]
    with torch.no_grad():
        logits: Tensor = model(**batch).logits
    for hook in hooks:
        hook.remove()
    return logits


@pytest.mark.parametrize("place", ["out", "llm.0", "llm.2"])
@pytest.mark.parametrize("family", BUILDERS)
def test_a_cut_is_that_of_all_tokens_with_the_dropped_ones_hidden(family: str, place: str) -> None:
    model, batch = in_float64(*BUILDERS[family]())
    gone = dropped(family, batch, place)
    with torch.no_grad(), Handle(model, at(place)) as handle:
        fast = model(**batch).logits
    slow = hidden(model, batch, 2 if place == "llm.2" else 0, gone)
    with torch.no_grad():
        stock = model(**batch).logits
    stays = batch["attention_mask"].bool() & ~gone
    assert_same(family, fast[stays], slow[stays])
    assert not torch.allclose(fast[stays], stock[stays], atol=1e-2)
    images = [n for prompt in IMAGES[family] for n in prompt]
    left = [third(n) for n in images]
    row = handle.ledger[0]
    assert (row.layer, row.tokens_in, row.tokens_out) == (place, max(images), max(left))
    if len(set(images)) > 1:
        assert (row.least_out, row.mean_out) == (min(left), sum(left) / len(left))  # type: ignore[attr-defined]
    if place == "out" and family in TILED:
        assert (row.tiles, row.most_of_tile, row.least_of_tile) == (max(images) // 9, 3, 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize("plan", ["grid@llm.0:80% + anchor@llm.3:50%(k=2)", "grid@out:60%(rest=merge) + grid@llm.2:50%"])
@pytest.mark.parametrize("family", BUILDERS)
def test_with_cache_or_without_padded_or_alone(family: str, plan: str) -> None:
    model, batch = in_float64(*BUILDERS[family]())
    stock = answer(model, batch)
    with tokensieve.apply(model, plan):
        cached, uncached = answer(model, batch), answer(model, batch, use_cache=False)
        alone = [answer(model, one_prompt(family, batch, row)) for row in range(2)]
    for a, b in zip(cached.logits, uncached.logits, strict=True):
        assert_same(family, a, b)
    for row, own in enumerate(alone):
        for a, b in zip(cached.logits, own.logits, strict=True):
            assert_same(family, a[row : row + 1], b)
    assert not torch.allclose(cached.logits[0], stock.logits[0], atol=1e-2)
    again = answer(model, batch)
    assert all(torch.equal(a, b) for a, b in zip(stock.logits, again.logits, strict=True))


def one_prompt(family: str, batch: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One prompt of a batch without padding, with its own images."""
    real, images = batch["attention_mask"][row].bool(), IMAGES[family]
    first = len(images[0]) if row else 0
    own = slice(first, first + len(images[row]))
    if family == "internvl":  # tiles
        own = slice(3, 6) if row else slice(0, 3)
    if family in ("idefics3", "smolvlm"):  # prompt by prompt
        own = slice(row, row + 1)
    made = {}
    for name, value in batch.items():
        is_text = value.dim() == 2 and name != "image_sizes"
        made[name] = value[row : row + 1, real] if is_text else value[own]
    return made


@pytest.mark.parametrize("family", ["idefics3", "gemma3", "pixtral"])
def test_beams_are_those_without_a_cache(family: str) -> None:
    model, batch = in_float64(*BUILDERS[family]())
    with tokensieve.apply(model, "grid@out:50% + grid@llm.1:50%"):
        assert torch.equal(*(answer(model, batch, num_beams=2, use_cache=cache).sequences for cache in (True, False)))


@pytest.mark.parametrize(
    ("family", "layer"), [("gemma3", 2), ("gemma3", 3), ("paligemma", 3), ("paligemma2", 2), ("paligemma2", 3)]
)
def test_the_attention_that_a_method_sees_is_that_of_the_layer(family: str, layer: int) -> None:
    """Windows, blocks and capped logits: the row of the last token, and those of the words, as eager attention has them."""
    model, batch = BUILDERS[family]()
    model.set_attn_implementation("eager")
    batch = one_prompt(family, batch, 0)
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    def look(view: View, keep: int) -> Reduction:
        assert view.attention is not None
        found.append((view.attention.cls_row(), view.attention.cls_heads(), view.attention.text_heads()))
        return some(view, keep)

    step = Step(describe(look, needs=("attention", "text")), Where.parse(f"llm.{layer}"), Budget.parse("33.3%"))
    with torch.no_grad():
        wanted = model(**batch, output_attentions=True).attentions[layer]  # (1, H, L, L)
        with Handle(model, Plan((step,))):
            model(**batch)
    row, heads, text = found[0]
    ids = batch["input_ids"][0]
    images = (ids == IMAGE).nonzero()[:, 0].split(IMAGES[family][0])
    words = (ids != IMAGE).nonzero()[:, 0]
    for i, own in enumerate(images):
        assert_near(row[i], wanted[0].mean(0)[-1, own])
        assert_near(heads[i], wanted[0][:, -1, own])
        sees = wanted[0][0][words, own[-1]] > 0  # a word in front of the image has zeros
        assert_near(text[i], wanted[0][:, words][:, :, own] * sees[:, None])


def test_tiles_are_those_of_one_image() -> None:
    """Without the prompt, nothing tells which tiles are of one image: each counts as one."""
    for family, n in (("internvl", 6), ("idefics3", 8)):
        model, batch = BUILDERS[family]()
        with torch.no_grad(), tokensieve.apply(model, "grid@llm.0:50%") as handle:
            model(**batch)
            assert handle.samples is not None and len(handle.samples) == 3
            model.model.get_image_features(
                **{name: batch[name] for name in batch if name.startswith("pixel")}, return_dict=True
            )
            assert len(handle.samples) == n


def test_paligemma_needs_to_know_its_prefix() -> None:
    model, batch = paligemma()
    del batch["token_type_ids"]
    with tokensieve.apply(model, "grid@llm.1:50%"), pytest.raises(UserError, match="token_type_ids"):
        model(**batch)


def test_paligemma_is_cut_in_its_tower_too() -> None:
    model, batch = in_float64(*paligemma())
    with torch.no_grad(), tokensieve.apply(model, "anchor@2:12(k=2) + grid@llm.1:6") as handle:
        cached, uncached = answer(model, batch), answer(model, batch, use_cache=False)
        assert [(row.layer, row.tokens_in, row.tokens_out) for row in handle.ledger] == [("2", 36, 12), ("llm.1", 12, 6)]
    for a, b in zip(cached.logits, uncached.logits, strict=True):
        assert_near(a, b, steps=STEPS)


def test_a_generation_goes_on_behind_a_window() -> None:
    """More text after the first answer, with the cache of what came before, whose layers with a window have dropped tokens."""
    model, batch = in_float64(*relative("gemma3"))
    more = torch.tensor([[11, 12, 13], [21, 22, 23]])
    ids = torch.cat([batch["input_ids"], more], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(more)], dim=1)
    types = torch.cat([batch["token_type_ids"], torch.zeros_like(more)], dim=1)
    with torch.no_grad(), tokensieve.apply(model, "grid@llm.1:50%"):
        whole = model(input_ids=ids, attention_mask=mask, token_type_ids=types, pixel_values=batch["pixel_values"]).logits[
            :, -3:
        ]
        cache = model(**batch, use_cache=True).past_key_values
        after = model(input_ids=more, attention_mask=mask, past_key_values=cache).logits
    assert_near(after, whole, steps=STEPS)


def test_blocks_are_found_as_the_stock_model_finds_them() -> None:
    from transformers.models.gemma3.modeling_gemma3 import get_block_sequence_ids_for_mask

    from tokensieve.models.image_blocks import image_runs

    types = torch.tensor([[0, 1, 1, 0, 1, 1, 1], [1, 1, 0, 0, 0, 1, 0]])
    assert torch.equal(image_runs({"token_type_ids": types}, 7), get_block_sequence_ids_for_mask(types))
    assert image_runs({}, 7) is None


@pytest.mark.parametrize(("family", "why"), [("llama4", "its number among the tokens"), ("mllama", "cross-attention")])
def test_a_model_that_can_be_cut_nowhere_says_why(family: str, why: str) -> None:
    model, _ = relative(family)
    for plan in ("grid@out:5", "grid@llm.2:5"):
        with pytest.raises(Uncuttable, match=why):
            tokensieve.apply(model, plan)


@pytest.mark.parametrize("family", ["internvl", "idefics3", "gemma3", "mistral3", "pixtral"])
def test_a_tower_that_cannot_be_cut_says_where_to_cut(family: str) -> None:
    model, _ = BUILDERS[family]()
    for plan in ("grid@2:5", "grid@0:5"):
        with pytest.raises(Uncuttable, match="use @out or @llm"):
            tokensieve.apply(model, plan)


@pytest.mark.parametrize("family", ["gemma3", "paligemma", "paligemma2", "mistral3", "pixtral"])
def test_several_images_are_cut_as_one_by_one(family: str) -> None:
    model, batch = in_float64(*BUILDERS[family]())
    images = {name: batch[name] for name in ("pixel_values", "image_sizes") if name in batch}
    with torch.no_grad(), tokensieve.apply(model, "divprune@out:50%"):
        together = list(model.model.get_image_features(**images, return_dict=True).pooler_output)
        for i, features in enumerate(together):
            own = {name: value[i : i + 1] for name, value in images.items()}
            alone = model.model.get_image_features(**own, return_dict=True).pooler_output[0]
            assert_near(features, alone, steps=STEPS)
            assert 0 < int((alone == 0).all(1).sum()) < len(alone)  # what is cut has zeros


def one_image(family: str, batch: dict[str, Tensor], image: int) -> dict[str, Tensor]:
    """The second prompt of a family with tiles, with one of its two images."""
    ids = batch["input_ids"][1, batch["attention_mask"][1].bool()].tolist()
    ends = [at for at, token in enumerate(ids) if token == 9]  # behind each image
    spans = [ids[2 : ends[0] + 1], ids[ends[0] + 1 : ends[1] + 1]]
    kept = torch.tensor([[*ids[:2], *spans[image], *ids[ends[1] + 1 :]]])
    tiles = slice(0, 1) if image == 0 else slice(1, 3)
    own = {name: batch[name] for name in batch if name.startswith("pixel")}
    own = {name: x[3:][tiles] if family == "internvl" else x[1:, tiles] for name, x in own.items()}
    return {"input_ids": kept, "attention_mask": torch.ones_like(kept), **own}


@pytest.mark.parametrize("plan", ["divprune@out:50%", "divprune@out:4/tile", "cover@out:33%"])
@pytest.mark.parametrize("family", TILED)
def test_images_of_several_tiles_are_cut_as_one_by_one(family: str, plan: str) -> None:
    """Which tiles are of one image is read from the prompt, so the images are those that the language model gets."""
    model, batch = in_float64(*BUILDERS[family]())
    seen: list[Tensor] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["inputs_embeds"])

    hook = decoder_of(model).register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad(), tokensieve.apply(model, plan):
        for given in (one_prompt(family, batch, 1), one_image(family, batch, 0), one_image(family, batch, 1)):
            model(**given)
            seen[-1] = seen[-1][given["input_ids"] == IMAGE]
    hook.remove()
    together, *alone = seen
    assert [len(each) for each in alone] == IMAGES[family][1]
    assert_near(together, torch.cat(alone), steps=STEPS)
    for features in alone:
        assert 0 < int((features == 0).all(1).sum()) < len(features)  # what is cut has zeros
