"""The oracle of a plan in a vision-language model: the stock model, on as many tokens as the plan leaves in every layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import vlm_models
from tokensieve.measuring import family_models, generation, suite_models
from tokensieve.measuring.oracle import StockOracle
from tokensieve.measuring.phases import generate_answer, read_prompt
from tokensieve.measuring.rounds import detached_handle
from tokensieve.models.registry import open_vlm
from tokensieve.testing import tiny_vlms

PLANS = [
    "none",
    "random@out:18",
    "random@llm.0:7",
    "grid@out:18(rest=merge) + random@llm.2,4:50%",
    "random@2:20 + random@out:12 + random@llm.0:5",
    "random@1.attn:20(rest=merge)",
    "resize(scale=0.5) + random@llm.1:4",
]


@pytest.fixture(scope="module")
def model() -> Any:
    return vlm_models.llava()


def make_oracle(model: Any, inputs: Any, plan: str) -> tuple[StockOracle, list[int]]:
    """The oracle of a plan, and the lengths of the plan's cache."""
    vlm, handle = open_vlm(model), detached_handle(model, plan)
    assert vlm is not None and StockOracle.refusal(vlm, handle, inputs) is None
    lengths = read_prompt(vlm, handle, model, inputs)[0]["tokens"]
    return StockOracle(vlm, handle, inputs, lengths), lengths


def lengths_of_oracle(model: Any, oracle: StockOracle) -> list[int]:
    vlm = open_vlm(model)
    assert vlm is not None
    return read_prompt(vlm, oracle, model, oracle.inputs)[0]["tokens"]


@pytest.mark.parametrize("plan", PLANS)
def test_every_layer_gets_as_many_tokens_as_with_the_plan(model: Any, plan: str) -> None:
    inputs = generation.prompts(model, 2, 6)
    oracle, lengths = make_oracle(model, inputs, plan)
    assert lengths_of_oracle(model, oracle) == lengths
    seen: list[int] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
        for layer in model.model.language_model.layers
    ]
    try:
        with oracle:
            generate_answer(model, oracle.inputs, 3)()
    finally:
        for hook in hooks:
            hook.remove()
    assert seen == lengths + [1] * 2 * len(lengths)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("plan", ["random@llm.0:7", "random@llm.1:50% + random@llm.2:4"])
def test_models_that_take_images_of_any_size(family: str, plan: str) -> None:
    """Qwen3-VL adds deep features to the layers that are cut."""
    model, _ = tiny_vlms.relative(family)
    inputs = suite_models.qwen_prompts(model, 2, 4, 6)
    oracle, lengths = make_oracle(model, inputs, plan)
    assert lengths_of_oracle(model, oracle) == lengths
    with oracle:
        generate_answer(model, oracle.inputs, 3)()


@pytest.mark.parametrize("plan", ["grid@out:25%", "random@out:50% + random@llm.2:25%", "grid@llm.2:25%"])
@pytest.mark.parametrize("family", family_models.names())
def test_every_family_behind_its_projector(family: str, plan: str) -> None:
    """As many tokens in every layer, and the stock model's logits for the first tokens of each image."""
    model, inputs = family_models.build(family, 64, 64)
    oracle, lengths = make_oracle(model, inputs, plan)
    assert lengths_of_oracle(model, oracle) == lengths
    whole = inputs["input_ids"].shape[1]
    assert lengths[0] < whole or "out" not in plan
    with oracle:
        generate_answer(model, oracle.inputs, 3)()
    with torch.no_grad():
        before = model(**inputs).logits
    assert before.shape[1] == whole  # it is left as it was


def test_a_projector_hands_over_the_first_tokens_of_each_image() -> None:
    model, inputs = family_models.build("gemma3", 128, 64)
    oracle, _ = make_oracle(model, inputs, "random@out:25%")
    image = {"pixel_values": inputs["pixel_values"], "return_dict": True}
    with torch.no_grad():
        features = model.model.get_image_features(**image).pooler_output  # (2 images, 64, E)
        with oracle:
            found = model.model.get_image_features(**image).pooler_output
    assert torch.equal(found.flatten(0, 1), features[:, :16].flatten(0, 1))


def test_images_of_different_sizes_have_no_oracle_behind_a_projector() -> None:
    model, inputs = tiny_vlms.relative("qwen2_vl")
    row = generation.measure(
        model, {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}, "grid@out:50%", 1, 2
    )
    assert row["no_oracle_reason"] == "the prompts have different numbers of vision tokens"


def test_without_a_cut_it_is_the_stock_model(model: Any) -> None:
    inputs = generation.prompts(model, 2, 6)
    oracle, _ = make_oracle(model, inputs, "none")
    with torch.no_grad(), oracle:
        logits = model(**oracle.inputs).logits
    assert oracle.inputs is inputs and torch.equal(logits, model(**inputs).logits)


def test_a_cut_before_the_decoder_is_a_shorter_prompt_of_the_stock_model(model: Any) -> None:
    """The first image tokens, and a prompt with so many placeholders: the numbers of the stock model with these features."""
    inputs = generation.prompts(model, 2, 6)
    oracle, _ = make_oracle(model, inputs, "random@out:18")
    with torch.no_grad():
        features = model.model.get_image_features(inputs["pixel_values"]).pooler_output
        short = oracle.inputs["input_ids"]
        embedded = model.get_input_embeddings()(short).masked_scatter(
            (short == vlm_models.IMAGE)[..., None], torch.cat([feature[:18] for feature in features])
        )
        expected = model(inputs_embeds=embedded, attention_mask=oracle.inputs["attention_mask"]).logits
        with oracle:
            found = model(**oracle.inputs).logits
    assert torch.allclose(found, expected, atol=1e-5)


def test_the_model_is_left_as_it_was(model: Any) -> None:
    inputs = generation.prompts(model, 1, 6)
    with torch.no_grad():
        before = model(**inputs).logits
        oracle, _ = make_oracle(model, inputs, "random@1:20 + random@llm.2:4")
        with oracle:
            pass  # its hooks never fire
        with pytest.raises(ZeroDivisionError), oracle:
            model(**oracle.inputs)
            _ = 1 / 0
        assert torch.equal(model(**inputs).logits, before)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_where_there_is_no_oracle_the_row_says_why(model: Any) -> None:
    padded = vlm_models.prompts((1, 1), (5, 3))
    row = generation.measure(model, padded, "random@llm.2:9", 1, 2)
    assert row["no_oracle_reason"] == "the prompts have padding"
    assert row["seconds_oracle"] is None and set(row["realized"].values()) == {None}
    vlm, inputs = open_vlm(model), generation.prompts(model, 2, 6)
    assert vlm is not None
    handle = detached_handle(model, "random@llm.2:9")
    inputs["input_ids"][0, 1] = 7  # one placeholder fewer
    assert StockOracle.refusal(vlm, handle, inputs) == "the prompts have different numbers of vision tokens"
    eager = vlm_models.llava(implementation="eager")
    vlm = open_vlm(eager)
    assert vlm is not None and "eager" in str(StockOracle.refusal(vlm, handle, generation.prompts(eager, 1, 6)))
    qwen, inputs = tiny_vlms.relative("qwen2_vl")
    vlm, inputs = open_vlm(qwen), suite_models.qwen_prompts(qwen, 1, 4, 6)
    assert vlm is not None
    assert "smaller images" in str(StockOracle.refusal(vlm, detached_handle(qwen, "resize(scale=0.75)"), inputs))


def test_a_plan_and_its_oracle_are_measured_at_the_same_counts_of_the_tower(model: Any) -> None:
    inputs = generation.prompts(model, 1, 6)
    oracle, _ = make_oracle(model, inputs, "random@2:20 + random@out:12")
    assert oracle.tower is not None
    with torch.no_grad(), oracle:
        model(**oracle.inputs)
    assert [(row.layer, row.tokens_out) for row in oracle.tower.ledger] == [("2", 20), ("3", 12)]  # out: block 3 of 4 is used
