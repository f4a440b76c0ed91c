"""SigLIP2's flat patches: put back into images, resized by its processor's rule, and run by the stock model's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

import tokensieve
from tests.support.hf_models import build
from tests.support.rounding import assert_near
from tests.support.states import assert_untouched, snapshot
from tokensieve import UserError
from tokensieve.drawing.band import make_band
from tokensieve.models.siglip2 import fit_grid, to_images, to_patches

PATCH, LONGEST = 8, 40
GRIDS = [(4, 6), (6, 4), (3, 7), (2, 2)]
HALF = [(2, 3), (3, 2), (2, 4), (1, 1)]  # of scale=0.5: of 3 x 7, 2 x 4 by rounding, and the processor's rule keeps it


def pictures(grids: list[tuple[int, int]], seed: int = 0) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(3, PATCH * h, PATCH * w, generator=made) for h, w in grids]


def shrunk(images: list[Tensor], grids: list[tuple[int, int]], antialias: bool = False) -> list[Tensor]:
    sizes = [(PATCH * h, PATCH * w) for h, w in grids]
    return [F.interpolate(x[None], size, mode="bicubic", antialias=antialias)[0] for x, size in zip(images, sizes, strict=True)]


def processed(images: list[Tensor], longest: int = LONGEST) -> dict[str, Tensor]:
    """The batch that SigLIP2's own processor makes of images of these sizes."""
    from transformers import Siglip2ImageProcessor

    processor = Siglip2ImageProcessor(
        patch_size=PATCH, max_num_patches=longest, do_resize=False, do_rescale=False, do_normalize=False, do_convert_rgb=False
    )
    return dict(processor(images=images, return_tensors="pt"))


@torch.no_grad()
def run(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The pooled features, and the output tokens of each image without padding."""
    out = model.get_image_features(**batch)
    lengths = [min(int(n), out.last_hidden_state.shape[1]) for n in batch["spatial_shapes"].prod(1)]
    return out.pooler_output, [tokens[:n] for tokens, n in zip(out.last_hidden_state, lengths, strict=True)]


def test_patches_are_those_of_the_processor_and_go_back() -> None:
    images = torch.stack(pictures([(3, 5)] * 2))
    patches = to_patches(images, PATCH)
    assert torch.equal(patches, processed(list(images), longest=15)["pixel_values"])
    assert torch.equal(to_images(patches, (3, 5), PATCH), images)


def test_grids_are_those_of_the_processors_rule() -> None:
    from transformers.models.siglip2.image_processing_siglip2 import get_image_size_for_max_num_patches

    for h in range(1, 10):
        for w in range(1, 14):
            assert fit_grid((h, w), h * w) == (h, w)
            for most in range(1, h * w, 1 + h * w // 5):
                height, width = get_image_size_for_max_num_patches(h * PATCH, w * PATCH, PATCH, most)
                assert fit_grid((h, w), most) == (height // PATCH, width // PATCH), (h, w, most)


@pytest.mark.parametrize("antialias", ["no", "yes"])
def test_resized_is_the_stock_model_on_images_resized_before(antialias: str) -> None:
    model = build("siglip2")
    images = pictures(GRIDS)
    batch, smaller = processed(images), processed(shrunk(images, HALF, antialias == "yes"))
    before, (full, _) = snapshot(model), run(model, batch)
    feature, tokens = run(model, smaller)
    with tokensieve.apply(model, f"resize(scale=0.5,antialias={antialias})") as handle:
        got, got_tokens = run(model, batch)
        assert [(row.layer, row.tokens_in, row.tokens_out) for row in handle.ledger] == [("image", 24, 6)]
        assert handle.grid is None  # different between images
        assert_near(got, feature, steps=1000)
        for mine, stock in zip(got_tokens, tokens, strict=True):
            assert_near(mine[: len(stock)], stock, steps=1000)
    assert not torch.allclose(got, full)
    assert_untouched(model, before)
    assert torch.equal(run(model, batch)[0], full)


def test_the_vision_model_alone_without_a_mask_or_with_one() -> None:
    model: Any = build("siglip2").vision_model
    images = pictures([(4, 6)] * 3)
    small = to_patches(torch.stack(shrunk(images, [(2, 3)] * 3)), PATCH)
    shapes = torch.tensor([[2, 3]] * 3)
    with torch.no_grad():
        expected = model(small, None, shapes).pooler_output
        with tokensieve.apply(model, "resize(size=16)") as handle:
            bare = model(to_patches(torch.stack(images), PATCH), None, torch.tensor([[4, 6]] * 3)).pooler_output
            padded = model(**processed(images)).pooler_output
            assert handle.grid == (2, 3)
    assert_near(bare, expected, steps=1000)
    assert_near(padded, expected, steps=1000)


def test_images_that_are_small_enough_stay_as_they_are() -> None:
    model = build("siglip2")
    batch = processed(pictures(GRIDS))
    full = run(model, batch)[0]
    for size in (32, 100):  # the shorter sides are 32, 32, 24 and 16 pixels
        with tokensieve.apply(model, f"resize(size={size})"):
            assert torch.equal(run(model, batch)[0], full)
    images = pictures(GRIDS)
    expected = run(model, processed([*shrunk(images[:2], [(3, 4), (4, 3)]), *images[2:]]))[0]
    with tokensieve.apply(model, "resize(size=24)"):
        got = run(model, batch)[0]
    assert_near(got, expected, steps=1000)
    assert not torch.allclose(got[:2], full[:2])


def test_cuts_behind_it_see_the_smaller_grid() -> None:
    model = build("siglip2")
    images = pictures([(4, 6)] * 3)
    for plan in ("cover@2:4", "anchor@1:50%(k=2,rest=merge) + random@out:2"):
        with tokensieve.apply(model, plan) as handle:
            expected, kept = run(model, processed(shrunk(images, [(2, 3)] * 3)))[0], handle.kept
        with tokensieve.apply(model, f"resize(scale=0.5) + {plan}") as handle:
            got = run(model, processed(images))[0]
            assert torch.equal(handle.kept, kept) and handle.grid == (2, 3)
            assert handle.ledger[0].tokens_in == 24 and handle.ledger[1].tokens_in == handle.ledger[0].tokens_out == 6
        assert_near(got, expected, steps=1000)
    with (
        tokensieve.apply(model, "resize(scale=0.5) + grid@2:2"),
        pytest.raises(UserError, match=r"different grids.*2 x 3, 3 x 2"),
    ):
        run(model, processed(pictures([(4, 6), (6, 4)])))


def test_its_patches_are_drawn_in_the_original_image() -> None:
    model = build("siglip2")
    with tokensieve.apply(model, "resize(scale=0.5) + cover@2:4") as handle:
        run(model, processed(pictures([(4, 6)])))
        band = make_band(handle, Image.new("RGB", (96, 64)))
        assert band.tokens == "24 → 6 → 4 patch tokens"
        assert band.patches[-1].tolist() == pytest.approx([64, 32, 96, 64])
    with tokensieve.apply(model, "resize(scale=0.5)") as handle:
        run(model, processed(pictures(GRIDS)))
        assert make_band(handle, Image.new("RGB", (96, 64))).tokens == "24 → 6 patch tokens"
