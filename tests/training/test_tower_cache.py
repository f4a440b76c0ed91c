"""Tower outputs on disk: the same bits, found by content, recomputed when damaged, not used for another model."""

import pytest
import torch

import tokensieve
from tests.support import vlm_models
from tokensieve.models.vlm import open_vlm
from tokensieve.training.pruning.tower_cache import TowerCache

BATCH = vlm_models.prompts(words=(5, 9))


@pytest.fixture
def model():
    return vlm_models.llava().requires_grad_(False)


def made(folder, model, fingerprint="weights"):
    return TowerCache(folder, open_vlm(model).tower, fingerprint)


@torch.no_grad()
def test_the_same_bits_with_and_without_a_plan_and_the_model_is_restored(model, tmp_path):
    plain = model(**BATCH).logits
    with tokensieve.apply(model, "pool@out:12"):
        pooled = model(**BATCH).logits
    for hits, misses in ((0, 2), (2, 2)):
        with (cache := made(tmp_path, model)) if not hits else cache:
            assert torch.equal(model(**BATCH).logits, plain)
        assert (cache.hits, cache.misses) == (hits, misses)
    for module in model.model.vision_tower.modules():  # what is stored is used, not computed
        if hasattr(module, "fc1"):
            module.fc1.weight.zero_()
    with cache, tokensieve.apply(model, "pool@out:12"):
        assert torch.equal(model(**BATCH).logits, pooled)
    assert not torch.equal(model(**BATCH).logits, plain)
    with made(tmp_path, model, "other weights") as other:
        assert not torch.equal(model(**BATCH).logits, plain)
    assert (other.hits, other.misses) == (0, 2)


@torch.no_grad()
def test_damaged_files_are_written_again_and_other_images_are_others(model, tmp_path):
    with made(tmp_path, model) as cache:
        plain = model(**BATCH).logits
        changed = BATCH | {"pixel_values": BATCH["pixel_values"] * torch.tensor([1.0, 1.01])[:, None, None, None]}
        model(**changed)
        assert (cache.hits, cache.misses) == (1, 3)
        paths = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(paths) == 3
        for path in paths:
            raw = bytearray(path.read_bytes())
            raw[40] ^= 1
            path.write_bytes(raw)
        assert torch.equal(model(**BATCH).logits, plain) and cache.hits == 1
        paths[0].write_bytes(b"short")
        assert torch.equal(model(**BATCH).logits, plain)
        assert torch.equal(model(**BATCH).logits, plain) and cache.hits >= 3


@torch.no_grad()
def test_without_a_folder_nothing_is_stored(model):
    cache, stock = made(None, model), model.model.vision_tower.forward
    with cache:
        model(**BATCH)
    assert (cache.hits, cache.misses) == (0, 0) and model.model.vision_tower.forward == stock
