"""Plans in a model's config: what vLLM can carry out, what is refused with which reason, and how many tokens are kept."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.paths import ROOT
from tokensieve.embedded import llava_path
from tokensieve.errors import UserError
from tokensieve.methods import list_methods
from tokensieve.serving.served_plan import read_served_plan

LLAVA = json.loads((llava_path() / "config.json").read_text())
QWEN: dict[str, Any] = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": {}, "vision_config": {}}


def config(base: dict[str, Any] = LLAVA, **keys: Any) -> dict[str, Any]:
    return base | keys


def served(plan: str, base: dict[str, Any] = LLAVA, **keys: Any) -> Any:
    return read_served_plan(config(base, tokensieve_plan=plan, **keys))


@pytest.mark.parametrize("keys", [{}, {"tokensieve_plan": "none"}, {"tokensieve_plan": ""}, {"image_pruning_rate": 0}])
def test_without_a_plan_there_is_none(keys: dict[str, Any]) -> None:
    assert read_served_plan(config(**keys)) is None


def test_a_model_that_is_not_served_is_no_error_without_a_plan() -> None:
    assert read_served_plan({"architectures": ["LlamaForCausalLM"]}) is None
    with pytest.raises(UserError, match=r"LlamaForCausalLM cannot be cut in vLLM.*LLaVA-1.5.*Qwen3-VL"):
        served("cover@llm.0:25%", {"architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize(
    ("plan", "base", "name", "kept"),
    [
        ("cover@out:49", LLAVA, "out", 49),
        ("cover@out:25%", LLAVA, "out", 49),
        ("anchor@out:-96", LLAVA, "out", 100),
        ("divprune@llm.0:40", LLAVA, "llm.0", 40),
        ("divprune@out:40(rest=fuse)", LLAVA, "out", 41),
        ("visionzip@out:64", LLAVA, "out", 63),
        ("fastervlm", LLAVA, "out", 49),
        ("cover@llm.0:300", QWEN, "llm.0", 196),
    ],
)
def test_plans_that_are_served(plan: str, base: dict[str, Any], name: str, kept: int) -> None:
    found = served(plan, base)
    assert found.cut.name == name and found.kept(196) == kept and not found.compact
    assert str(found.step) == found.text


@pytest.mark.parametrize(
    ("plan", "base", "reason"),
    [
        ("cover@4:49", LLAVA, "can be cut at @out .before the projector. and @llm.0"),
        ("cover:49", LLAVA, "for example cover@out:25%"),
        ("cover@llm.2:49", LLAVA, "every layer of the language model has the same tokens"),
        ("cover@out:49", QWEN, "Qwen2.5-VL can be cut at @llm.0; for example cover@llm.0:25%"),
        ("cover@out:100 + cover@llm.0:49", LLAVA, "has 2 steps"),
        ("resize(size=56)", LLAVA, "send smaller images"),
        ("cross@llm.0:49", QWEN, "trained part"),
        ("learned@out:49", LLAVA, "trained part"),
        ("prumerge@out:49", LLAVA, "decides for each image how many tokens stay"),
        ("pixelprune@0:49", LLAVA, "decides for each image how many"),
        ("trim@out:49", LLAVA, "decides for each image"),
        ("mmtok@out:49", LLAVA, "before it knows which question they belong to"),
        ("dart@llm.0:49", QWEN, "before it knows which question"),
        ("repshift@out:49", LLAVA, "before and after the MLP"),
        ("anchor@llm.0:49", QWEN, "needs the attention of a layer before the cut"),
        ("divprune@out:49(rest=zero)", LLAVA, "rest=zero keeps the number of tokens"),
        ("cover@out:-196", LLAVA, "leaves no token of an image that has 196"),
        ("cver@out:49", LLAVA, "Did you mean"),
    ],
)
def test_plans_that_are_refused(plan: str, base: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        served(plan, base)


def test_towers_that_cannot_be_cut_are_refused() -> None:
    def with_vision(**vision: Any) -> dict[str, Any]:
        return LLAVA | {"vision_config": LLAVA["vision_config"] | vision}

    siglip = with_vision(model_type="siglip_vision_model")
    assert served("cover@out:49", siglip).kept(196) == 49
    with pytest.raises(UserError, match="SigLIP tower has without a CLS token"):
        served("anchor@out:49", siglip)
    with pytest.raises(UserError, match="is a pixtral; LLaVA can be cut with"):
        served("cover@out:49", with_vision(model_type="pixtral"))
    with pytest.raises(UserError, match="several layers"):
        served("cover@out:49", LLAVA, vision_feature_layer=[-2, -1])
    with pytest.raises(UserError, match='only "default" can be cut'):
        served("cover@out:49", LLAVA, vision_feature_select_strategy="full")


@pytest.mark.parametrize(
    ("plan", "keys", "reason"),
    [
        ("cover@out:49", {"vision_config": None}, "num_hidden_layers in the vision_config of the model's config is missing"),
        ("cover@out:49", {"vision_config": {}}, "num_hidden_layers in the vision_config of the model's config is missing"),
        ("cover@out:49", {"vision_config": 3}, "vision_config in the model's config is an object of keys and values, not 3"),
        ("cover@out:49", {"architectures": 3}, "architectures in the model's config is a list of names, not 3"),
        ("cover@out:49", {"architectures": [3]}, "architectures in the model's config is a list of names"),
        ("cover@out:49", {"text_config": []}, r"text_config in the model's config is an object"),
        ("cover@out:49", {"text_config": {"rope_parameters": 1e4}}, "rope_parameters in the model's config is an object"),
    ],
)
def test_configs_that_cannot_be_read_name_the_key(plan: str, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        served(plan, **keys)


@pytest.mark.parametrize("wrong", [[28, 28], "112", 0, 1.5, None, True])
@pytest.mark.parametrize("key", ["image_size", "patch_size", "num_hidden_layers"])
def test_numbers_of_the_tower_that_are_none_name_the_key(key: str, wrong: Any) -> None:
    with pytest.raises(UserError, match=f"{key} in the vision_config of the model's config is .*a whole number above 0"):
        served("cover@out:49", vision_config=LLAVA["vision_config"] | {key: wrong})


@pytest.mark.parametrize(
    ("rate", "base", "text"),
    [(0.75, LLAVA, "cover@out:25%"), (0.5, QWEN, "cover@llm.0:50%"), (0.9, LLAVA, "cover@out:10%")],
)
def test_the_alias_image_pruning_rate(rate: float, base: dict[str, Any], text: str) -> None:
    assert read_served_plan(config(base, image_pruning_rate=rate)).text == text  # type: ignore[union-attr]


@pytest.mark.parametrize("rate", [1, -0.1, 1.5, "half", True, [0.5]])
def test_wrong_rates_are_refused(rate: Any) -> None:
    with pytest.raises(UserError, match=r"image_pruning_rate=.*is not a share"):
        read_served_plan(config(image_pruning_rate=rate))


def test_contradictions_are_refused() -> None:
    with pytest.raises(UserError, match="both given"):
        served("cover@out:49", image_pruning_rate=0.5)
    with pytest.raises(UserError, match=r"tokensieve_positions='compct' is not one of.*Did you mean 'compact'"):
        served("cover@out:49", tokensieve_positions="compct")
    with pytest.raises(UserError, match="is a text such as"):
        read_served_plan(config(tokensieve_plan=64))


def test_scaled_positions_need_compact() -> None:
    scaled = LLAVA | {"text_config": LLAVA["text_config"] | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}}
    with pytest.raises(UserError, match=r"rope_type llama3.*tokensieve_positions=compact"):
        served("cover@out:49", scaled)
    assert served("cover@out:49", scaled, tokensieve_positions="compact").compact


def test_the_identity_of_a_plan_tells_plans_apart() -> None:
    texts = ["cover@out:49", "cover@out:50", "cover@llm.0:49"]
    plans = [served(text) for text in texts] + [served(texts[0], tokensieve_positions="compact")]
    assert len({plan.identity for plan in plans}) == 4
    assert served("cover@out:49").identity == served(" cover @ out : 49 ").identity


@pytest.mark.parametrize(
    ("plan", "loses"),
    [
        ("cover@out:49", True),
        ("cover@out:49(sizes=no)", False),
        ("divprune@out:49", False),
        ("divprune@out:49(rest=merge)", True),
    ],
)
def test_merging_plans_lose_their_sizes(plan: str, loses: bool) -> None:
    assert served(plan).loses_sizes is loses


def test_every_method_is_served_or_refused_with_a_reason() -> None:
    """What is refused is what the declaration of the method says."""
    for method in list_methods():
        if method.on_image or method.name == "none":
            continue
        blocked = method.part is not None or method.adaptive or set(method.needs) - {"attention", "values"}
        try:
            plan = served(f"{method.name}@out:60")
        except UserError as error:
            assert blocked, f"{method.name}: {error}"
            assert len(str(error)) > 40
        else:
            assert not blocked and 1 <= plan.kept(196) <= 196


def test_the_documentation_lists_what_is_served() -> None:
    """docs/serving.md, by benchmarks/tables.py."""
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    table = page.partition("<!-- table:serving_methods -->")[2].partition("<!-- /table -->")[0]
    names = {row.split("|")[1].strip(): set(re.findall("`([a-z0-9_]+)`", row)) for row in table.splitlines() if "`" in row}
    everywhere, with_attention = names["without attention"], names["with attention"]
    for method in list_methods():
        if method.on_image or method.name == "none":
            continue
        for base, place in ((QWEN, "llm.0"), (LLAVA, "llm.0"), (LLAVA, "out")):
            try:
                served(f"{method.name}@{place}:60", base)
                is_served = True
            except UserError:
                is_served = False
            listed = everywhere | with_attention if place == "out" else everywhere
            assert is_served == (method.name in listed), (method.name, place)


@pytest.mark.parametrize("scope", ["tile", "prompt"])
def test_a_budget_is_of_each_image(scope: str) -> None:
    with pytest.raises(UserError, match=f"leave /{scope} out"):
        served(f"cover@out:64/{scope}")
