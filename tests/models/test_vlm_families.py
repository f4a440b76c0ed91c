"""Other vision-language models than LLaVA: their decoders can be cut, whatever they do between tower and decoder (for cuts
behind the projector see tests/cutting/test_projected.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokensieve
from tests.support.rounding import assert_near
from tests.support.vlm_models import IMAGE, VARYING, in_float64, relative
from tokensieve.cutting.cache import cached_length
from tokensieve.errors import UserError
from tokensieve.models.registry import open_vlm

PLAN = "grid@llm.0:80% + anchor@llm.2:50%(k=2)"


def answer(model: Any, batch: dict[str, Tensor], **kwargs: Any) -> Any:
    how = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**batch, **how, **kwargs)


@pytest.mark.parametrize("family", VARYING)
def test_images_of_different_sizes_are_cut_each_to_its_share(family: str) -> None:
    model, batch = in_float64(*relative(family))
    stock = answer(model, batch)
    counts = (batch["input_ids"] == IMAGE).sum(1).tolist()
    assert counts[0] != counts[1]
    ends = 12 if family.startswith("llava") else 0  # rows of tiles of the first image; their ends are never cut
    with tokensieve.apply(model, PLAN) as handle:
        cached, uncached = answer(model, batch), answer(model, batch, use_cache=False)
        layers = [row.layer for row in handle.ledger]
        beams = [answer(model, batch, num_beams=2, use_cache=cache).sequences for cache in (True, False)]
    assert layers == ["llm.0", "llm.2"]
    for a, b in zip(cached.logits, uncached.logits, strict=True):
        assert_near(a, b, steps=3000)  # their norms and softmax compute in float32 all the same
    assert torch.equal(*beams)
    assert not torch.allclose(cached.logits[0], stock.logits[0], atol=1e-2)
    lengths = [cached_length(cached.past_key_values, layer) for layer in range(4)]
    text = batch["input_ids"].shape[1] - max(counts)
    left = [-(-(counts[0] - ends) * 4 // 5)]
    left.append(-(-left[0] // 2))
    assert lengths == [text + ends + 3 + k for k in (left[0], left[0], left[1], left[1])]
    again = answer(model, batch)
    assert all(torch.equal(a, b) for a, b in zip(stock.logits, again.logits, strict=True))


@pytest.mark.parametrize("family", VARYING)
def test_what_cannot_be_cut_says_where_to_cut(family: str) -> None:
    model, _ = relative(family)
    vlm = open_vlm(model)
    assert vlm is not None and vlm.tower is None and vlm.decoder.depth == 4
    if vlm.tile_tower is None:
        with pytest.raises(UserError, match=r"try visionzip@llm\.2, or"):
            tokensieve.apply(model, "visionzip@1:4")
    place = "llm.2" if vlm.tile_tower is None else "-1"  # the last block of the tower has what @out lacks
    with pytest.raises(UserError, match=f"there are only tokens and text; try visionzip@{place}, or"):
        tokensieve.apply(model, "visionzip@out:20")
    tokensieve.apply(model, f"visionzip@{place}:20").remove()
