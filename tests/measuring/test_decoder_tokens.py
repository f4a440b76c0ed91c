"""The budget of a plan on a vision-language model, against the tokens that its decoder layers are seen to run on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.vlm_models import GRID, IMAGE, llava, prompts
from tokensieve.cutting.handle import apply
from tokensieve.cutting.passes import Row
from tokensieve.measuring.decoder_tokens import decoder_tokens

TOKENS = GRID**2
PLANS = {  # the vision tokens of each of the six layers
    "none": [36] * 6,
    "random@out:18": [18] * 6,
    "random@llm.2:9": [36, 36, 9, 9, 9, 9],
    "random@out:18 + random@llm.2:6": [18, 18, 6, 6, 6, 6],
    "random@1:20 + random@out:12": [12] * 6,
    "random@1:20 + random@llm.3,5:50%": [20, 20, 20, 10, 10, 5],
    "random@llm.0:7 + random@llm.-1:2": [7, 7, 7, 7, 7, 2],
    "random@out:10(rest=fuse) + random@llm.2:4(rest=fuse)": [11, 11, 5, 5, 5, 5],
    "random@out:18(rest=merge) + random@llm.2:6(rest=merge)": [18, 18, 6, 6, 6, 6],
}


@pytest.fixture(scope="module")
def model() -> Any:
    return llava()


@pytest.mark.parametrize("plan", PLANS)
def test_the_counts_are_those_that_the_layers_run_on(model: Any, plan: str) -> None:
    batch = prompts(images=(1,), words=(5,))
    text = int((batch["input_ids"] != IMAGE).sum())
    seen: list[int] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["hidden_states"].shape[1]), with_kwargs=True
        )
        for layer in model.model.language_model.layers
    ]
    try:
        with apply(model, plan) as handle, torch.inference_mode():
            model(**batch)
            ledger = handle.ledger
    finally:
        for hook in hooks:
            hook.remove()
    assert [length - text for length in seen] == PLANS[plan] == decoder_tokens(ledger, TOKENS, 6)


def test_without_a_cut_before_the_decoder_its_first_cut_tells_how_many_arrived() -> None:
    assert decoder_tokens([Row("llm.1", 99, 50)], 36, 3) == [99, 50, 50]  # an image of another size than the sample
