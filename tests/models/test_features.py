"""Features and patch tokens of every family: the model's own, with and without a plan."""

import warnings

import pytest
import torch

import tokensieve
from tests.support import hf_models
from tests.support.rounding import assert_near
from tokensieve import UserError
from tokensieve.errors import PlanWarning
from tokensieve.models.features import encode_image, encode_text, get_image_features_with_tokens

IMAGES = torch.randn(3, 3, 48, 48, generator=torch.Generator().manual_seed(0))


def timm_vit():
    import timm

    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", img_size=48, patch_size=8, depth=4, num_classes=5).eval()


def own_feature(kind, model, images):
    """The feature as each library's documentation says to compute it."""
    if kind == "clip":
        return model.visual_projection(model.vision_model(images).pooler_output)
    if kind == "siglip":
        return model.vision_model(images).pooler_output
    if kind == "siglip2":
        from transformers import Siglip2ImageProcessor

        plain = {"do_resize": False, "do_rescale": False, "do_normalize": False}
        inputs = Siglip2ImageProcessor(patch_size=8, max_num_patches=36, **plain)(list(images), return_tensors="pt")
        return model.vision_model(
            inputs["pixel_values"], inputs["pixel_attention_mask"], inputs["spatial_shapes"]
        ).pooler_output
    if kind == "vit":
        return model.vit(images).last_hidden_state[:, 0]
    if kind == "timm":
        return model.forward_features(images)[:, 0]
    return model(images).last_hidden_state[:, 0]


@pytest.fixture(params=["clip", "siglip", "siglip2", "dinov2", "dinov3", "vit", "timm"])
def family(request):
    model = timm_vit() if request.param == "timm" else hf_models.build(request.param)
    return request.param, model


def test_image_features_are_the_librarys_own(family):
    kind, model = family
    with torch.no_grad():
        assert_near(encode_image(model, IMAGES), own_feature(kind, model, IMAGES), steps=1000)


@pytest.mark.parametrize("plan", ["none", "random@2:10", "random@2:10(rest=merge)", "random@out:10(rest=zero)"])
def test_feature_with_tokens_is_encode_image_bit_for_bit(family, plan):
    _, model = family
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        with tokensieve.apply(model, plan) as handle, handle.call(samples=torch.arange(3)):  # one random choice in both passes
            expected = encode_image(model, IMAGES)
            feature, tokens = get_image_features_with_tokens(model, IMAGES)
            assert torch.equal(feature, expected)
            assert tokens.shape[:2] == (3, 10 if "@2" in plan else 36)
            if "zero" in plan:
                there = tokens.abs().sum(-1) > 0
                assert torch.equal(there.nonzero()[:, 1].view(3, 10), handle.kept)
    assert not any(module._forward_hooks for module in model.modules())


def test_tokens_are_those_that_leave_the_last_block(tiny_clip):
    model = tiny_clip.make()[0]
    images = torch.randn(2, 3, 48, 32)
    with torch.no_grad():
        feature, tokens = get_image_features_with_tokens(model, images)
        x = model.visual._embeds(images)
        for block in model.visual.transformer.resblocks:
            x = block(x)
        assert torch.equal(feature, model.encode_image(images))
        assert_near(tokens, x[:, 1:], steps=10_000)  # it makes rounding errors much larger than they begin


def test_a_tower_that_cannot_be_opened_has_no_tokens():
    import timm

    model = timm.create_model("resnet10t").eval()
    with torch.no_grad():
        feature, tokens = get_image_features_with_tokens(model, IMAGES)
        assert_near(feature, model.forward_head(model.forward_features(IMAGES), pre_logits=True))
    assert tokens is None


def test_the_attention_of_the_last_block_comes_with_the_tokens(family):
    _, model = family
    with torch.no_grad():
        feature, tokens = get_image_features_with_tokens(model, IMAGES)
        again, same, attention = get_image_features_with_tokens(model, IMAGES, return_attention=True)
        assert torch.equal(again, feature) and torch.equal(same, tokens)
        assert attention.q.shape[0] == 3 and attention.q.shape[2] - attention.prefix == tokens.shape[1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PlanWarning)
            with tokensieve.apply(model, "anchor@out:6(k=6)") as handle:
                encode_image(model, IMAGES)
                with pytest.raises(UserError, match=r"a plan is attached to this model; remove\(\) its handle first"):
                    get_image_features_with_tokens(model, IMAGES, return_attention=True)
        if attention.has_cls and attention.prefix:
            assert torch.equal(attention.cls_row().topk(6).indices.sort().values, handle.kept)


def test_the_hook_goes_when_the_model_fails(tiny_clip):
    model = tiny_clip.make()[0]
    with pytest.raises(RuntimeError):
        get_image_features_with_tokens(model, torch.randn(1, 4, 48, 32))
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["clip", "siglip", "siglip2"])
def test_text_features_are_the_librarys_own(kind):
    model = hf_models.build(kind)
    ids = torch.tensor([[52, 1, 2, 3, 53, 53], [52, 4, 5, 6, 7, 53]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])
    with torch.no_grad():
        pooled = model.text_model(input_ids=ids).pooler_output
        own = model.text_projection(pooled) if kind == "clip" else pooled
        assert torch.equal(encode_text(model, ids), own)
        assert torch.equal(encode_text(model, {"input_ids": ids, "token_type_ids": ids}), own)
        masked = model.text_model(input_ids=ids, attention_mask=mask).pooler_output
        masked = model.text_projection(masked) if kind == "clip" else masked
        assert torch.equal(encode_text(model, {"input_ids": ids, "attention_mask": mask}), masked)


def test_models_without_a_text_tower_name_the_task_they_are_for():
    for model in (timm_vit(), hf_models.build("dinov2"), hf_models.build("vit")):
        with pytest.raises(UserError, match=r"no text tower.*--task linear_probe"):
            encode_text(model, torch.zeros(1, 4, dtype=torch.long))


def test_a_distilled_classifiers_feature_is_that_of_its_cls_token():
    from transformers import DeiTConfig, DeiTForImageClassificationWithTeacher

    model = DeiTForImageClassificationWithTeacher(DeiTConfig(**hf_models.VISION)).eval()
    with torch.no_grad():
        expected = model.deit(IMAGES).last_hidden_state[:, 0]
        feature, tokens = get_image_features_with_tokens(model, IMAGES)
    assert torch.equal(feature, expected) and tokens.shape == (3, 36, 32)


@pytest.mark.parametrize("kind", ["open_clip", "timm", "with tokens"])
def test_a_bare_open_clip_tower_is_its_own_encoder(tiny_clip, kind):
    model = tiny_clip.make()[0].visual
    if kind == "timm":
        from open_clip.timm_model import TimmModel

        model = TimmModel("test_vit", embed_dim=16, image_size=(48, 32), pool="token", proj="linear").eval()
    images = torch.randn(2, 3, 48, 32)
    with torch.no_grad(), tokensieve.apply(model, "none"):
        expected = model(images)
        model.output_tokens = kind == "with tokens"
        feature, tokens = get_image_features_with_tokens(model, images)
    assert torch.equal(feature, expected) and tokens.shape[:2] == (2, 6 if kind == "timm" else 24)


def test_what_is_no_model_of_images_says_so():
    with pytest.raises(UserError, match="Linear does not encode images to features; known are open_clip"):
        encode_image(torch.nn.Linear(2, 2), IMAGES)
