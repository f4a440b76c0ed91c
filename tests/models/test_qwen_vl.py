"""`resize` in a Qwen-VL: the stock model on images resized before, with the prompt that its processor would have made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tokensieve
from tests.support.rounding import assert_near
from tests.support.states import assert_untouched, snapshot
from tests.support.vlm_models import IMAGE, PAD, relative
from tokensieve import UserError
from tokensieve.errors import PlanWarning, Uncuttable
from tokensieve.models.qwen_vl import QwenImages

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PATCH, MERGE = 4, 2
UNIT = PATCH * MERGE
SIZES = [(6, 4), (4, 8), (8, 6), (4, 6)]  # of images, in tokens
HALF = [(3, 2), (2, 4), (4, 3), (2, 3)]
HOW: dict[str, Any] = {
    "max_new_tokens": 4,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def pictures(sizes: list[tuple[int, int]] = SIZES) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(3, UNIT * h, UNIT * w, generator=made) for h, w in sizes]


def shrunk(images: list[Tensor], sizes: list[tuple[int, int]] = HALF, antialias: bool = False) -> list[Tensor]:
    pixels = [(UNIT * h, UNIT * w) for h, w in sizes]
    return [
        F.interpolate(x[None], size, mode="bicubic", antialias=antialias)[0] for x, size in zip(images, pixels, strict=True)
    ]


def processed(images: list[Tensor]) -> dict[str, Tensor]:
    """What Qwen's own processor makes of images of these sizes."""
    from transformers import Qwen2VLImageProcessor

    processor = Qwen2VLImageProcessor(
        patch_size=PATCH, merge_size=MERGE, do_resize=False, do_rescale=False, do_normalize=False, do_convert_rgb=False
    )
    return dict(processor(images=images, return_tensors="pt"))


def prompts(images: list[Tensor], rows: tuple[int, ...] = (1, 2, 1), words: tuple[int, ...] = (2, 4, 3)) -> dict[str, Tensor]:
    """Left-padded prompts with so many of the images each, and so many words behind them."""
    batch = processed(images)
    counts = iter((batch["image_grid_thw"].prod(1) // MERGE**2).tolist())
    ids = []
    for row, n_words in zip(rows, words, strict=True):
        parts = [torch.tensor([1, 7])]
        for _ in range(row):
            parts += [torch.tensor([61]), torch.full((next(counts),), IMAGE), torch.tensor([60])]
        ids.append(torch.cat([*parts, torch.arange(10, 10 + n_words)]))
    length = max(map(len, ids))
    batch["input_ids"] = torch.stack([F.pad(row, (length - len(row), 0), value=PAD) for row in ids])
    batch["attention_mask"] = (batch["input_ids"] != PAD).long()
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).int()
    return batch


def text_logits(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The logits of all tokens that are neither padding nor image."""
    return logits[batch["attention_mask"].bool() & (batch["input_ids"] != IMAGE)]


def test_patches_go_back_into_images() -> None:
    images = QwenImages(None, PATCH, MERGE, 2)
    picture = pictures()[2]
    flat = processed([picture])["pixel_values"]
    frames = images._to_images(flat, 1, 16, 12)
    assert torch.equal(frames, picture.expand(2, -1, -1, -1))
    assert torch.equal(images._to_patches(frames, 1), flat)


def test_sizes_are_those_of_the_processors_rule() -> None:
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    model, _ = relative("qwen2_vl")
    images = QwenImages(model.model, PATCH, MERGE, 2)
    for scale in (0.3, 0.5, 0.72, 0.9, 1.0):
        seen: list[tuple[int, int]] = []
        with tokensieve.apply(model, f"resize(scale={scale})") as handle:
            rule = handle._decoder.resize  # type: ignore[union-attr]
            for h, w in SIZES:
                seen += images._shrink(torch.tensor([[1, 2 * h, 2 * w]]), rule)[:, 1:].tolist()
        wanted = [smart_resize(h * UNIT * scale, w * UNIT * scale, UNIT, min_pixels=1) for h, w in SIZES]  # type: ignore[arg-type]
        assert [[h * PATCH, w * PATCH] for h, w in seen] == [list(size) for size in wanted]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("antialias", ["no", "yes"])
def test_resized_is_the_stock_model_on_images_resized_before(family: str, antialias: str) -> None:
    model, _ = relative(family)
    batch, smaller = prompts(pictures()), prompts(shrunk(pictures(), antialias=antialias == "yes"))
    before = snapshot(model)
    with torch.no_grad():
        full, expected = model(**batch).logits, model(**smaller).logits
        stock = [model.generate(**smaller, **HOW, **more) for more in ({}, {"num_beams": 2})]
        model.model.rope_deltas = None
        with tokensieve.apply(model, f"resize(scale=0.5,antialias={antialias})") as handle:
            got = model(**batch).logits
            assert [(row.layer, row.tokens_in, row.tokens_out) for row in handle.ledger] == [
                ("image", 48, 12)
            ]  # of the largest image
            mine = [model.generate(**batch, **HOW, **more) for more in ({}, {"num_beams": 2})]
            uncached = model.generate(**batch, **HOW, use_cache=False)
        again = model(**batch).logits
    assert got.shape == full.shape
    assert_near(text_logits(got, batch), text_logits(expected, smaller), steps=3000)
    assert not torch.allclose(text_logits(got, batch), text_logits(full, batch), atol=1e-2)
    for a, b in zip([*mine, uncached], [*stock, stock[0]], strict=True):
        assert torch.equal(a.sequences[:, -4:], b.sequences[:, -4:])
        assert torch.equal(a.sequences[:, :-4], batch["input_ids"].repeat_interleave(len(a.sequences) // 3, 0))
        for one, other in zip(a.logits, b.logits, strict=True):
            assert_near(one, other, steps=3000)
    assert_untouched(model, before)
    assert torch.equal(again, full)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_and_the_loss_are_those_of_the_shorter_prompt(family: str) -> None:
    model, _ = relative(family)
    batch, smaller = prompts(pictures()), prompts(shrunk(pictures()))
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
    shorter, deltas = model.model.get_rope_index(**{name: smaller[name] for name in names})
    labels = [torch.where(given["mm_token_type_ids"] == 1, -100, given["input_ids"]) for given in (batch, smaller)]
    labels = [ids.masked_fill(ids <= 1, -100) for ids in labels]  # padding, and the first token, which nothing predicts
    with torch.no_grad(), tokensieve.apply(model, "resize(scale=0.5)"):
        positions, later = model.model.get_rope_index(**{name: batch[name] for name in names})
        loss = model(**batch, labels=labels[0]).loss
    with torch.no_grad():
        assert_near(loss, model(**smaller, labels=labels[1]).loss, steps=1000)
    for row in range(3):
        real, short = batch["attention_mask"][row].bool(), smaller["attention_mask"][row].bool()
        text, short_text = batch["mm_token_type_ids"][row] == 0, smaller["mm_token_type_ids"][row] == 0
        assert torch.equal(positions[:, row, real & text], shorter[:, row, short & short_text])
        dropped = int(real.sum() - short.sum())
        assert int(later[row]) == int(deltas[row]) - dropped


@pytest.mark.parametrize("family", FAMILIES)
def test_cuts_of_the_decoder_behind_it(family: str) -> None:
    model, _ = relative(family)
    batch, smaller = prompts(pictures()), prompts(shrunk(pictures()))
    plan = "cover@llm.1:50% + anchor@llm.2:2(k=1)"
    with torch.no_grad():
        with tokensieve.apply(model, plan):
            expected = model.generate(**smaller, **HOW)
        with tokensieve.apply(model, f"resize(scale=0.5) + {plan}") as handle:
            got = model.generate(**batch, **HOW)
            assert [row.layer for row in handle.ledger] == ["image", "llm.1", "llm.2"]
            assert handle.ledger[1].tokens_in == handle.ledger[0].tokens_out == 12  # of the largest image
    for one, other in zip(got.logits, expected.logits, strict=True):
        assert_near(one, other, steps=3000)


def test_images_that_are_small_enough_stay_as_they_are() -> None:
    model, _ = relative("qwen2_5_vl")
    batch = prompts(pictures())
    with torch.no_grad():
        full = model(**batch).logits
        for plan in ("resize(scale=1.0)", "resize(size=64)"):
            with tokensieve.apply(model, plan):
                assert_near(text_logits(model(**batch).logits, batch), text_logits(full, batch), steps=1000)
        with tokensieve.apply(model, f"resize(size={4 * UNIT})"):  # the third alone has a longer shorter side
            got = model(**batch).logits
        sizes = [*SIZES[:2], (5, 4), SIZES[3]]
        smaller = prompts(shrunk(pictures(), sizes))
        assert_near(text_logits(got, batch), text_logits(model(**smaller).logits, smaller), steps=3000)


def test_images_that_end_a_prompt_and_prompts_without_one() -> None:
    model, _ = relative("qwen2_vl")
    batch, smaller = (prompts(images[:2], (1, 1), (0, 0)) for images in (pictures(), shrunk(pictures())))
    for given in (batch, smaller):  # the tokens of an image are the last ones
        for name in ("input_ids", "attention_mask", "mm_token_type_ids"):
            given[name] = given[name][:, :-1]
    text = {"input_ids": torch.tensor([[1, 7, 12, 13]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    with torch.no_grad():
        expected, alone = model.generate(**smaller, **HOW), model(**text).logits
        with tokensieve.apply(model, "resize(scale=0.5)"):
            got = model.generate(**batch, **HOW)
            with pytest.warns(PlanWarning, match="the prompt has no image"):
                assert torch.equal(model(**text).logits, alone)
    for one, other in zip(got.logits, expected.logits, strict=True):
        assert_near(one, other, steps=3000)


def test_what_cannot_be_resized_says_why() -> None:
    model, _ = relative("qwen2_vl")
    batch = prompts(pictures())
    with torch.no_grad(), tokensieve.apply(model, "resize(scale=0.5)"):
        with pytest.raises(UserError, match="image_cu_seqlens was computed for images before they are resized"):
            model(**batch, image_cu_seqlens=torch.tensor([0, 4]))
        with pytest.raises(UserError, match="image_grid_thw has 416 patches, pixel_values 512"):
            model(**batch | {"image_grid_thw": batch["image_grid_thw"][:3]})
    with torch.no_grad(), tokensieve.apply(model, "resize(scale=0.1)"), pytest.warns(PlanWarning, match="min_pixels"):
        model(**batch)
    for family in ("llava_next", "llava_onevision"):
        with pytest.raises(Uncuttable, match=r"resize\(scale=0.5\): its processor cuts images into tiles"):
            tokensieve.apply(relative(family)[0], "resize(scale=0.5)")
