"""`resize` in a plan: the stock model on smaller images, by the libraries' own means, and everything else as before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import tokensieve
from tests.support.rounding import assert_near
from tests.support.states import assert_untouched, snapshot
from tests.support.vlm_models import llava, prompts
from tokensieve import Plan, UserError
from tokensieve.drawing.band import make_band
from tokensieve.errors import Uncuttable
from tokensieve.models.registry import open_tower
from tokensieve.plan.mixes import MIXES
from tokensieve.testing import tiny_models

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SMALL = F.interpolate(IMAGES, (24, 24), mode="bicubic", antialias=False)
HF = ("CLIPVision", "SiglipVision", "ViT", "DeiT", "Dinov2", "Dinov2WithRegisters", "DINOv3ViT")


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    if family in HF:
        return tiny_models.hf_model(family).eval()
    made = {"open_clip": tiny_models.open_clip_model, "timm": tiny_models.timm_model, "eva": tiny_models.eva_model}
    made["open_clip_timm"] = tiny_models.open_clip_timm_model
    return made[family]().eval()


def feature(model: Any, images: Tensor, **named: Any) -> Tensor:
    with torch.no_grad():
        out = model.encode_image(images) if hasattr(model, "encode_image") else model(images, **named)
    return out if isinstance(out, Tensor) else out.last_hidden_state


def stock_on_small_images(family: str, model: Any) -> Tensor:
    """What the library itself makes of the smaller images."""
    if family in HF:
        named = {} if family.lower().startswith("dino") else {"interpolate_pos_encoding": True}
        return feature(model, SMALL, **named)
    if family == "open_clip":
        from open_clip.model import resize_pos_embed

        smaller, state = tiny_models.open_clip_model(image_size=24).eval(), model.state_dict()
        resize_pos_embed(state, smaller)
        smaller.load_state_dict(state)
        return feature(smaller, SMALL)
    if family == "open_clip_timm":
        other = copy.deepcopy(model)
        other.visual.trunk = tiny_models.timm_model(dynamic_img_size=True).eval()
        other.visual.trunk.load_state_dict(model.visual.trunk.state_dict())
        return feature(other, SMALL)
    dynamic = (tiny_models.timm_model if family == "timm" else tiny_models.eva_model)(dynamic_img_size=True).eval()
    dynamic.load_state_dict(model.state_dict())
    return feature(dynamic, SMALL)


@pytest.mark.parametrize("family", ["open_clip", "open_clip_timm", "timm", "eva", *HF])
def test_the_librarys_own_smaller_images(family: str) -> None:
    model = build(family)
    before, full = snapshot(model), feature(model, IMAGES)
    expected = stock_on_small_images(family, model)
    with tokensieve.apply(model, "resize(size=24)") as handle:
        assert_near(feature(model, IMAGES), expected, steps=200)
        assert [(row.layer, row.tokens_in, row.tokens_out) for row in handle.ledger] == [("image", 16, 9)]
        assert handle.grid == (3, 3) and handle.kept is None
    assert_untouched(model, before)
    assert torch.equal(feature(model, IMAGES), full)


@pytest.mark.parametrize("family", ["open_clip", "timm", "eva", "CLIPVision", "DINOv3ViT"])
def test_with_a_cut_behind_it(family: str) -> None:
    model = build(family)
    full = feature(model, IMAGES)
    with tokensieve.apply(model, "resize(size=24) + cover@2:4") as handle:
        feature(model, IMAGES)
        rows = [(row.layer, row.tokens_in, row.tokens_out) for row in handle.ledger]
        assert rows == [("image", 16, 9), ("2", 9, 4)]
        assert handle.kept is not None and handle.kept.shape == (2, 4) and int(handle.kept.max()) < 9
    assert torch.equal(feature(model, IMAGES), full)


def test_scale_and_antialias() -> None:
    model = build("CLIPVision")
    with tokensieve.apply(model, "resize(size=24)"):
        plain = feature(model, IMAGES)
    with tokensieve.apply(model, "resize(scale=0.7)") as handle:  # 22.4 pixels, rounded to 3 patches of 8
        assert torch.equal(feature(model, IMAGES), plain)
        assert handle.grid == (3, 3)
    with tokensieve.apply(model, "resize(size=24,antialias=yes)"):
        smooth = feature(model, IMAGES)
    filtered = F.interpolate(IMAGES, (24, 24), mode="bicubic", antialias=True)
    assert_near(smooth, feature(model, filtered, interpolate_pos_encoding=True), steps=200)
    assert not torch.allclose(smooth, plain)


@pytest.mark.parametrize("name", MIXES)
def test_named_mixes_fit_the_depth_and_the_grid(name: str) -> None:
    assert str(Plan.parse(name)) == str(Plan.parse(MIXES[name]))
    for family in ("open_clip", "timm", "DINOv3ViT"):
        model = build(family)
        with tokensieve.apply(model, name) as handle:
            feature(model, IMAGES)
            image, cut = handle.ledger
            assert image.layer == "image" and image.tokens_out < image.tokens_in == 16
            assert cut.layer == str(open_tower(model).depth // 2) and cut.tokens_out < cut.tokens_in == image.tokens_out


def test_a_named_mix_in_a_llava() -> None:
    model, batch = llava(), prompts()
    with torch.no_grad(), tokensieve.apply(model, "2x") as handle:
        model(**batch)
        image, cut = handle.ledger[:2]
        assert image.layer == "image" and image.tokens_out < image.tokens_in
        assert cut.tokens_out < cut.tokens_in == image.tokens_out


def test_pictures_count_from_the_full_image() -> None:
    model = build("open_clip")
    picture = Image.new("RGB", (32, 32))
    for plan, tokens in {
        "resize(size=24) + cover@2:4": "16 → 9 → 4 patch tokens",
        "resize(size=24)": "16 → 9 patch tokens",
        "cover@2:4": "16 → 4 patch tokens",
    }.items():
        with tokensieve.apply(model, plan) as handle:
            feature(model, IMAGES)
            assert make_band(handle, picture).tokens == tokens


def test_an_unknown_mix_names_those_that_exist() -> None:
    with pytest.raises(UserError, match="2x, 3x"):
        Plan.parse("5x")


def test_a_llava_reads_fewer_tokens() -> None:
    model, batch = llava(), prompts()
    with torch.no_grad():
        full = model(**batch).logits
        size = model.config.vision_config.image_size
        smaller = size // 2
        with tokensieve.apply(model, f"resize(size={smaller})") as handle:
            logits = model(**batch).logits
            assert handle.ledger[0].tokens_in == 4 * handle.ledger[0].tokens_out
            words = model.generate(**batch, max_new_tokens=3, do_sample=False)
            assert words.shape[1] == batch["input_ids"].shape[1] + 3
            alone = {name: value[:1] for name, value in batch.items()}
            assert_near(model(**alone).logits[0], logits[0], steps=2000)
        assert not torch.allclose(full, logits)
        with tokensieve.apply(model, f"resize(size={smaller}) + cover@out:2 + random@llm.1:1") as handle:
            model(**batch)
            assert [row.tokens_out for row in handle.ledger][1:] == [2, 1]
        assert torch.equal(model(**batch).logits, full)


def test_what_cannot_be_resized_says_why() -> None:
    model = build("open_clip")
    for plan, reason in {
        "resize": "how large",
        "resize(size=24,scale=0.5)": "how large",
        "resize(scale=1.5)": "at most 1",
        "resize(size=-4)": "at least 1",
        "resize(size=48)": "32 x 32",
        "resize@2(size=24)": "leave its position",
        "resize:4(size=24)": "leave its position",
        "resize(size=24) + resize(size=16)": "once",
    }.items():
        with pytest.raises(UserError, match=reason):
            tokensieve.apply(model, plan)
    with pytest.raises(Uncuttable, match="several layers"):
        tokensieve.apply(llava(layer=[1, 2]), "resize(size=12)")


def test_sizes_are_whole_patches_and_rounding_is_noted() -> None:
    model = build("open_clip")
    with pytest.warns(tokensieve.errors.PlanWarning, match="rounded to 24 x 24"):
        handle = tokensieve.apply(model, "resize(size=22)")
    handle.remove()
    assert str(Plan.parse("resize(size=22) + cover@2:4")) == "resize(size=22) + cover@2:4"


def test_pictures_and_the_oracle_know_of_it() -> None:
    from PIL import Image

    from tokensieve.drawing.band import make_band
    from tokensieve.measuring.oracle import oracle

    model = build("open_clip")
    with torch.no_grad(), tokensieve.apply(model, "resize(size=24) + cover@2:4") as handle:
        model.encode_image(IMAGES)
        band = make_band(handle, Image.new("RGB", (64, 64)))
        assert band.patches.shape == (9, 4) and band.patches[-1].tolist() == pytest.approx([64 * 2 / 3, 64 * 2 / 3, 64, 64])
        assert str(oracle(handle)) == "resize(size=24) + first@2:4"
