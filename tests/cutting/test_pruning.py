"""Pruning in the tower: the formula, its default position, and the names users know."""

import copy
import inspect
import pickle

import pytest
import torch
from open_clip.transformer import VisionTransformer

import tokensieve
from tests.support import hf_models
from tests.support.reference import anchor_choice, pruned_features
from tests.support.rounding import assert_near
from tokensieve import UserError
from tokensieve.errors import PlanWarning

K, M, ALPHA = 3, 6, 0.5


@pytest.fixture(scope="module")
def clip(tiny_clip):
    """In float64: its blocks make a rounding error of their input a thousand times as large."""
    return tiny_clip.make()[0].double()


@pytest.fixture(scope="module")
def images():
    return torch.randn(4, 3, 48, 32, generator=torch.Generator().manual_seed(3)).double()


@pytest.mark.parametrize("layer", [1, 2, 4])
def test_pruning_inside_the_tower_is_the_formula(clip, images, layer):
    with torch.no_grad():
        with tokensieve.apply_pruning_to_model(clip, k_anchors=K, top_m=M, alpha=ALPHA, prune_layer=layer) as handle:
            features = clip.encode_image(images)
        wanted, kept = pruned_features(clip.visual, images, layer, lambda a, x: anchor_choice(a, x, K, M, ALPHA)[0])
    assert handle.kept.tolist() == kept
    assert_near(features, wanted, steps=1e6)
    assert features.shape == (4, 16)
    assert [(row.layer, row.tokens_in, row.tokens_out) for row in handle.ledger] == [(str(layer), 24, K + M)]


def test_pruning_cuts_at_half_the_depth_by_default_and_later_blocks_run_on_fewer(clip, images):
    lengths = []
    hooks = [
        b.ln_2.register_forward_hook(lambda m, a, y: lengths.append(y.shape[1])) for b in clip.visual.transformer.resblocks
    ]
    with torch.no_grad(), tokensieve.apply_pruning_to_model(clip, K, M):
        clip.encode_image(images)
    for hook in hooks:
        hook.remove()
    assert lengths == [25, 25, 1 + K + M, 1 + K + M]


def test_pruned_vision_encoder_can_be_copied_and_pickled(images):
    tower = VisionTransformer((48, 32), 8, 32, 4, 4, 2.0, pool_type="avg").double().eval()
    encoder = tokensieve.PrunedVisionEncoder(tower, K, M, rest="merge")
    with torch.no_grad():
        for copied in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
            torch.testing.assert_close(copied(images), encoder(images), atol=0, rtol=0)


def test_every_image_gets_its_own_choice(clip, images):
    with torch.no_grad(), tokensieve.apply_pruning_to_model(clip, K, M) as handle:
        clip.encode_image(images)
        together = handle.kept
        alone = torch.cat([clip.encode_image(images[b : b + 1]) is not None and handle.kept for b in range(4)])
    assert torch.equal(together, alone)
    assert len({tuple(row) for row in together.tolist()}) > 1


def test_pruned_vision_encoder_wraps_and_leaves_the_tower_alone(clip, images):
    encoder = tokensieve.PrunedVisionEncoder(clip, k_anchors=K, top_m=M, alpha=ALPHA)
    with torch.no_grad():
        stock = clip.encode_image(images)
        pruned = encoder(images)
        assert torch.equal(stock, clip.encode_image(images)), "encode_image left patched"
        with tokensieve.apply_pruning_to_model(clip, K, M, ALPHA):
            assert torch.equal(pruned, clip.encode_image(images))
    assert pruned.shape == stock.shape and not torch.equal(pruned, stock)
    assert encoder.ledger[0].tokens_out == K + M
    names = [p.default for p in inspect.signature(tokensieve.PrunedVisionEncoder.__init__).parameters.values()]
    assert names[2:5] == [10, 50, 0.5]


def test_what_apply_pruning_returns_is_a_handle_with_the_authors_names(clip, images):
    with torch.no_grad():
        stock = clip.encode_image(images)
        pruned = tokensieve.apply_pruning_to_model(clip, K, M, ALPHA)
        assert isinstance(pruned, tokensieve.Handle) and pruned.is_attached
        assert (pruned.model, pruned.k_anchors, pruned.top_m, pruned.alpha) == (clip, K, M, ALPHA)
        features = clip.encode_image(images)
        assert torch.equal(pruned.encode_image(images), features) and not torch.equal(features, stock)
        assert [(row.tokens_in, row.tokens_out) for row in pruned.ledger] == [(24, K + M)]
        pruned.remove()
        assert torch.equal(clip.encode_image(images), stock)
        assert torch.equal(pruned.encode_image_with_pruning(images), features), "pruned also while the plan is removed"
        assert torch.equal(clip.encode_image(images), stock) and not pruned.is_attached
        unit = pruned.encode_image(images, normalize=True)
        torch.testing.assert_close(unit, features / features.norm(dim=-1, keepdim=True))
        with pruned.register_hooks() as again:
            assert again is pruned and torch.equal(clip.encode_image(images), features)
        assert torch.equal(clip.encode_image(images), stock)


def test_the_encoder_has_the_authors_names(clip, images):
    encoder = tokensieve.PrunedVisionEncoder(clip, K, M, ALPHA)
    assert (encoder.model, encoder.k_anchors, encoder.top_m, encoder.alpha) == (clip, K, M, ALPHA)
    assert set(encoder.state_dict()) == {f"visual.{name}" for name in clip.visual.state_dict()}, "the tower's weights, once"
    with torch.no_grad():
        stock, features = clip.encode_image(images), encoder.encode_image(images)
        assert torch.equal(features, encoder(images)) and torch.equal(features, encoder.encode_image_with_pruning(images))
        assert torch.equal(clip.encode_image(images), stock)
        handle = encoder.register_hooks()
        assert torch.equal(clip.encode_image(images), features) and encoder.register_hooks() is handle
        assert torch.equal(encoder.encode_image(images), features) and encoder.ledger == handle.ledger
        with pytest.raises(UserError, match="remove"):
            copy.deepcopy(encoder)
        handle.remove()
        assert torch.equal(clip.encode_image(images), stock)
        assert torch.equal(copy.deepcopy(encoder).encode_image(images), features)


def test_pruning_a_model_of_another_library_has_the_same_names():
    model, images = hf_models.build("clip"), torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        stock = model.get_image_features(images)
        with tokensieve.apply_pruning_to_model(model, 2, 3) as pruned:
            features = pruned.encode_image(images)
        assert features.shape == getattr(stock, "pooler_output", stock).shape
        assert torch.equal(tokensieve.PrunedVisionEncoder(model, 2, 3).encode_image(images), features)


def test_pruning_notes_are_warned(clip):
    with pytest.warns(PlanWarning, match="everything is kept"):
        tokensieve.apply_pruning_to_model(clip).remove()
    with pytest.warns(PlanWarning, match="everything is kept"):
        tokensieve.PrunedVisionEncoder(clip)


def test_where_everything_is_kept_the_stock_blocks_run(clip, images):
    """Defaults of k + m = 60 on 24 patches: nothing is computed for the choice, and the feature is the stock one."""
    calls = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, tuple) or (isinstance(out, torch.Tensor) and out.numel() > len(images)):  # numbers of images
                calls.append(str(func))
            return out

    counts = []
    with torch.no_grad():
        for plan in ("none", "anchor", "anchor@out(rest=zero)", "anchor@2.attn"):
            calls.clear()
            if plan == "none":
                with Count():
                    stock = clip.encode_image(images)
            else:
                with pytest.warns(PlanWarning, match="everything is kept"):
                    handle = tokensieve.apply(clip, plan)
                with handle, Count():
                    assert torch.equal(clip.encode_image(images), stock)
                assert [(row.tokens_in, row.tokens_out) for row in handle.ledger] == [(24, 24)]
            counts.append(list(calls))
    assert all(count == counts[0] for count in counts)
