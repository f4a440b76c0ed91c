"""Plans on models as people hold them: adapters of PEFT, int8 weights of torchao, weights that accelerate keeps elsewhere, and
torch's wrappers for several processes. docs/wrapped.md has a row for each of them.

Tests of wrappers of single methods and of hooks are in test_wrappers.py.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tokensieve
from tests.support import vlm_models
from tests.support.engine_models import images, make_tower
from tests.support.processes import two_processes
from tokensieve import UserError
from tokensieve.models.features import encode_image

PLANS = {"attention": "anchor@2:8(k=3)", "inside": "anchor@2.attn:8(k=3)", "merged": "tome@1:20 + cover@3:6", "cut": "grid@2:8"}
VLM_PLANS = {"tower": "anchor@2:12(k=3)", "decoder": "fastv@llm.2:12", "both": "cover@out:20 + random@llm.3:6"}
ADAPTED = {  # layers that get an adapter, by the kind of tower
    "open_clip": ["attn", "c_fc", "c_proj"],
    "timm": ["qkv", "attn.proj", "fc1"],
    "hf": ["q_proj", "v_proj", "fc1"],
}
pytestmark = pytest.mark.filterwarnings("ignore::tokensieve.errors.PlanWarning")


def encode(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return encode_image(model, images(2, 0).to(next(model.parameters()).dtype))


def features_of(family: str, model: Any, pixels: Tensor) -> Tensor:
    """What a training calls: the model, or whatever wraps it."""
    if family == "hf":
        return model.get_image_features(pixel_values=pixels).pooler_output
    out: Tensor = model(pixels)
    return out


def logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**batch).logits
    return out


# --- PEFT ---------------------------------------------------------------------------------------------------------


def with_lora(model: nn.Module, targets: list[str]) -> Any:
    """A model in PEFT, with adapters that change what it computes (as created they change nothing)."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("family", ADAPTED)
def test_a_tower_with_lora_is_as_its_merged_weights(family: str, plan: str) -> None:
    base = make_tower(family).double()
    with tokensieve.apply(base, plan):
        unadapted = encode(base)
    adapted = with_lora(base, ADAPTED[family])
    merged = copy.deepcopy(adapted).merge_and_unload()
    with tokensieve.apply(merged, plan) as handle:
        expected, kept = encode(merged), handle.kept
    for held in (adapted, adapted.get_base_model()):  # what the user holds, and the model inside
        with tokensieve.apply(held, plan) as handle:
            torch.testing.assert_close(encode(adapted.get_base_model()), expected, rtol=1e-10, atol=1e-10)
            assert torch.equal(handle.kept, kept)
            with adapted.disable_adapter():
                torch.testing.assert_close(encode(adapted.get_base_model()), unadapted, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(unadapted, expected)


@pytest.mark.parametrize("family", ADAPTED)
def test_lora_is_trained_with_a_plan_on(family: str) -> None:
    """The gradient of A and B is that of the merged weight W + s B A: s dW A^T and s B^T dW."""
    adapted = with_lora(make_tower(family).double(), ADAPTED[family])
    merged = copy.deepcopy(adapted).merge_and_unload().requires_grad_(True)
    pixels, plan = images(2, 0).double(), PLANS["attention"]
    for model in (adapted, merged):
        with tokensieve.apply(model, plan):
            features_of(family, model, pixels).square().sum().backward()
    weights = dict(merged.named_parameters())
    checked = 0
    for name, module in adapted.get_base_model().named_modules():
        if not hasattr(module, "lora_A"):
            continue
        path = name.replace("base_layer.", "")
        weight = weights.get(f"{path}.in_proj_weight", weights.get(f"{path}.weight"))
        assert weight is not None, name
        if weight.grad is None:  # of the text tower
            assert module.lora_B["default"].weight.grad is None
            continue
        a, b, scale = module.lora_A["default"].weight, module.lora_B["default"].weight, module.scaling["default"]
        torch.testing.assert_close(b.grad, scale * weight.grad @ a.T, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(a.grad, scale * b.T @ weight.grad, rtol=1e-8, atol=1e-10)
        checked += int(b.grad.abs().sum() > 0)
    assert checked >= 3 * 4 - 1  # 4 blocks; the last one may have a projection that its feature does not use


@pytest.mark.parametrize("plan", VLM_PLANS.values(), ids=VLM_PLANS)
def test_a_vision_language_model_with_lora(plan: str) -> None:
    base, batch = vlm_models.in_float64(vlm_models.llava(), vlm_models.prompts())
    adapted = with_lora(base, ["q_proj", "k_proj", "v_proj", "up_proj", "fc1"])
    merged = copy.deepcopy(adapted).merge_and_unload()
    with tokensieve.apply(merged, plan) as handle:
        expected, ledger = logits(merged, batch), handle.ledger
        words = merged.generate(**batch, max_new_tokens=4, do_sample=False)
    assert ledger[-1].tokens_out < ledger[0].tokens_in
    with tokensieve.apply(adapted, plan) as handle:
        torch.testing.assert_close(logits(adapted, batch), expected, rtol=1e-8, atol=1e-8)
        assert handle.ledger == ledger
        assert torch.equal(adapted.generate(**batch, max_new_tokens=4, do_sample=False), words)
        adapted(**batch, labels=batch["input_ids"]).loss.backward()
    assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora_" in name and "vision" not in name)


def test_learned_prompts_are_refused() -> None:
    peft = pytest.importorskip("peft")
    sizes = {"token_dim": 32, "num_layers": 6, "num_attention_heads": 4}
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, **sizes)
    adapted = peft.get_peft_model(vlm_models.llava(), config)
    with pytest.raises(UserError, match="learned tokens before the prompt"):
        tokensieve.apply(adapted, "random@llm.2:8")


# --- torchao ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("family", ADAPTED)
def test_int8_weights_of_torchao(family: str, plan: str) -> None:
    """As the model with the rounded weights as plain numbers."""
    quantization = pytest.importorskip("torchao.quantization")
    tower = make_tower(family)
    quantization.quantize_(tower, quantization.Int8WeightOnlyConfig())
    plain, rounded = make_tower(family), 0
    with torch.no_grad():
        for weight, own in zip(tower.parameters(), plain.parameters(), strict=True):
            if type(weight) is not nn.Parameter:
                own.copy_(weight.dequantize())
                rounded += 1
    assert rounded >= 8  # two layers of the MLP of each block
    with tokensieve.apply(plain, plan) as handle:
        expected, kept = encode(plain), handle.kept
    with tokensieve.apply(tower, plan) as handle:
        torch.testing.assert_close(encode(tower), expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(handle.kept, kept)


@pytest.mark.parametrize("plan", VLM_PLANS.values(), ids=VLM_PLANS)
def test_a_vision_language_model_with_int8_weights(plan: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model, batch, plain = vlm_models.llava(), vlm_models.prompts(), vlm_models.llava()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with torch.no_grad():
        for weight, own in zip(model.parameters(), plain.parameters(), strict=True):
            if type(weight) is not nn.Parameter:
                own.copy_(weight.dequantize())
    with tokensieve.apply(plain, plan) as handle:
        expected, ledger = logits(plain, batch), handle.ledger
    with tokensieve.apply(model, plan) as handle:
        torch.testing.assert_close(logits(model, batch), expected, rtol=1e-3, atol=1e-4)
        assert handle.ledger == ledger


# --- accelerate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("plan", VLM_PLANS.values(), ids=VLM_PLANS)
def test_a_device_map_with_offload(plan: str, place: str, tmp_path: Path) -> None:
    """The tower and half of the decoder are kept elsewhere; the plan is applied before or after that."""
    from accelerate import dispatch_model

    batch, outputs = vlm_models.prompts(), []
    for when in ("never", "before the plan", "with the plan on"):
        model: Any = vlm_models.llava()
        layers = {f"model.language_model.layers.{n}": place if n % 2 else "cpu" for n in range(6)}
        device_map = {
            "model.vision_tower": place,
            "model.multi_modal_projector": "cpu",
            "model.language_model.embed_tokens": place,
            "model.language_model.norm": "cpu",
            "model.language_model.rotary_emb": "cpu",
            "lm_head": place,
            **layers,
        }

        def spread(model: Any = model, device_map: dict[str, str] = device_map) -> None:
            dispatch_model(model, device_map, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
            is_away = place == "disk"
            assert (model.lm_head.weight.device.type == "meta") == is_away

        if when == "before the plan":
            spread()
        with tokensieve.apply(model, plan) as handle:
            if when == "with the plan on":
                spread()
            outputs.append((logits(model, batch), handle.ledger, model.generate(**batch, max_new_tokens=3, do_sample=False)))
    (first, ledger, words), *others = outputs
    for out, its_ledger, its_words in others:
        assert torch.equal(out, first) and its_ledger == ledger and torch.equal(its_words, words)


# --- several devices and processes --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: make_tower("timm"), vlm_models.llava], ids=["tower", "vlm"])
def test_data_parallel_is_refused(make: Any) -> None:
    """In a DataParallel, and in one that comes after the plan (its replicas are tested in test_wrappers.py)."""
    model = nn.DataParallel(make())
    with pytest.raises(UserError, match=r"DataParallel cannot run.*use DistributedDataParallel"):
        tokensieve.apply(model, "random:8")


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """DistributedDataParallel, FullyShardedDataParallel and fully_shard against one process with both halves of the batch."""
    done = two_processes(["-m", "tests.support.wrapped_worker", str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        differences = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(differences) == 18
        for name, each in differences.items():
            assert each["kept"] and each["output"] < 1e-10 and each["gradient"] < 1e-10, name
