"""DynamicViT, PatchMerger, SiT and Sinkhorn: formulas in float64, gradients of every weight, weights in files and plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import tokensieve
from tests.support.paths import ROOT
from tests.support.rounding import assert_near
from tokensieve import UserError, config
from tokensieve.core import View
from tokensieve.methods.registry import get_method
from tokensieve.models import loading
from tokensieve.models.registry import open_tower
from tokensieve.parts.files import save_part
from tokensieve.parts.resolve import load_parts
from tokensieve.plan import Plan
from tokensieve.testing import fresh_part, make_view
from tokensieve.training.learned_selector.learner import SelectorLearner, build_part

Array = NDArray[np.float64]
MIXING = ("patchmerger", "sit", "sinkhorn")
METHODS = ("dynamicvit", *MIXING)
IMAGES = torch.randn(2, 3, 112, 112, generator=torch.Generator().manual_seed(0))


def in_double(part: nn.Module) -> dict[str, Array]:
    return {name.removeprefix("at.4."): value.detach().double().numpy() for name, value in part.named_parameters()}


def view_of(name: str) -> View:
    return replace(make_view(width=24), part=fresh_part(get_method(name), 24), place="4")


def normed(x: Array, w: dict[str, Array]) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w["norm.weight"] + w["norm.bias"]


def softmax(x: Array, axis: int) -> Array:
    weights = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(weights / weights.sum(axis, keepdims=True))


def gelu(x: Array) -> Array:
    return np.asarray(nn.functional.gelu(torch.from_numpy(x)))


def linear(x: Array, w: dict[str, Array], name: str) -> Array:
    return np.asarray(x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0))


def outputs(name: str, x: Array, w: dict[str, Array]) -> Array:
    """The tokens that a mixing method makes of the tokens (N, D) of an image."""
    if name == "patchmerger":
        y = normed(x, w)
        return np.asarray(softmax(w["queries"] @ y.T, 1) @ y)
    if name == "sit":
        logits = linear(gelu(linear(normed(x, w), w, "hidden")), w, "out") * w["scale"][0, 0, 0]
        return np.asarray(softmax(logits, 0).T @ x)
    unit, centres = (v / np.linalg.norm(v, axis=-1, keepdims=True) for v in (x, w["centres"]))
    shares = np.exp(centres @ unit.T)  # (K, N)
    for _ in range(3):
        shares = shares / shares.sum(1, keepdims=True)
        shares = shares / shares.sum(0, keepdims=True)
    return np.asarray(shares @ unit)


@pytest.mark.parametrize("name", MIXING)
def test_the_outputs_are_those_of_the_formula(name: str) -> None:
    view = view_of(name)
    made = get_method(name).decide(view, view.part.budget("4"))
    weights = in_double(view.part)
    expected = np.stack([outputs(name, x.double().numpy(), weights) for x in view.tokens])
    assert_near(made.apply(view.tokens), torch.from_numpy(expected).float())
    whole = torch.cat([view.prefix, view.tokens], dim=1)
    assert torch.equal(made.apply(whole, 1)[:, :1], view.prefix)


def test_dynamicvit_keeps_what_its_predictor_rates_highest() -> None:
    view = view_of("dynamicvit")
    w, kept = in_double(view.part), get_method("dynamicvit").decide(view, 7)
    for b, x in enumerate(view.tokens.double().numpy()):
        h = gelu(linear(normed(x, w), w, "token"))
        z = np.concatenate([h[:, :12], np.broadcast_to(h[:, 12:].mean(0), (len(h), 12))], axis=1)
        logits = linear(gelu(linear(gelu(linear(z, w, "hidden")), w, "narrow")), w, "out")
        scores = np.log(softmax(logits, 1)[:, 0])
        assert kept.index[b].tolist() == sorted(np.argsort(-scores, kind="stable")[:7].tolist())
        assert_near(kept.scores[b], torch.from_numpy(scores).float())


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return loading.load("sieve-vit-8", "scenes-v1").model.requires_grad_(False)


def plan_of(name: str) -> str:
    return "dynamicvit@2,4,6:50%" if name == "dynamicvit" else f"{name}@4:32"


def part_of(name: str, model: nn.Module) -> Any:
    torch.manual_seed(0)
    return build_part(get_method(name), open_tower(model), [Plan.parse(plan_of(name))])


@pytest.mark.parametrize("name", METHODS)
def test_every_weight_has_a_gradient_and_the_model_has_none(name: str, model: Any) -> None:
    part = part_of(name, model).train()
    with tokensieve.apply(model, plan_of(name), weights={name: part}):
        model.encode_image(IMAGES)[:, 0].sum().backward()
    for which, parameter in part.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, which
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", METHODS)
def test_weights_are_saved_and_a_plan_uses_them(name: str, model: Any, tmp_path: Path) -> None:
    part, plan = part_of(name, model).eval(), plan_of(name)
    save_part(tmp_path / f"{name}.safetensors", name, part, model, {"plans": [plan]})
    loaded = load_parts(Plan.parse(plan), model, tmp_path / f"{name}.safetensors")[name]
    assert loaded.settings == part.settings
    with torch.no_grad():
        with tokensieve.apply(model, plan, weights={name: part}):
            expected = model.encode_image(IMAGES)
        with tokensieve.apply(model, plan, weights=tmp_path / f"{name}.safetensors") as handle:
            found = model.encode_image(IMAGES)
        assert handle.ledger[-1].tokens_out == (24 if name == "dynamicvit" else 32)
        with tokensieve.apply(model, plan, weights={name: fresh_like(part)}):
            other = model.encode_image(IMAGES)
    assert torch.equal(found, expected) and not torch.allclose(other, expected, atol=1e-3)


def fresh_like(part: Any) -> nn.Module:
    torch.manual_seed(1)
    other: nn.Module = type(part)(**part.settings).eval()
    return other


def test_weights_leave_the_number_of_tokens_that_they_were_trained_for(model: Any) -> None:
    part = part_of("sit", model).eval()
    with pytest.raises(UserError, match=r"leave 32 tokens, not 40.*train them with a plan that leaves 40"):
        tokensieve.apply(model, "sit@4:40", weights={"sit": part})
    with pytest.raises(UserError, match="trained for @4, not for @2"):
        tokensieve.apply(model, "sit@2:32", weights={"sit": part})
    with tokensieve.apply(model, "sit@4", weights={"sit": part}) as handle, torch.no_grad():
        model.encode_image(IMAGES)
    assert handle.ledger[-1].tokens_out == 32


@pytest.mark.parametrize("name", METHODS)
def test_the_shipped_config_is_valid(name: str) -> None:
    shipped = config.load(ROOT / "configs" / f"{name}.yaml")
    assert shipped.method == name


def test_one_run_trains_one_method(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    text = (ROOT / "configs" / "sit.yaml").read_text()
    path.write_text(text.replace('"sit@4:32"', '"sit@4:32", "patchmerger@4:32"'))
    with pytest.raises(UserError, match="patchmerger and sit are trained in runs of their own"):
        config.load(path)
    path.write_text(text.replace('"sit@4:32"', '"sit@4:32", "sit@4:40"'))
    with pytest.raises(UserError, match="leaves 32 tokens at 4 in another plan"):
        SelectorLearner(config.load(path))


def test_a_step_lowers_no_weight_to_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    text = (ROOT / "configs" / "sit.yaml").read_text()
    path.write_text(text.replace("batch: 32", "batch: 2").replace("steps: 60", "steps: 20"))
    learner = SelectorLearner(config.load(path))
    before = {name: value.clone() for name, value in learner.scorer.state_dict().items()}
    values = learner.step(5)
    assert set(values) == {"feature", "logits"}
    changed: list[Tensor] = [
        value for name, value in learner.scorer.state_dict().items() if not torch.equal(value, before[name])
    ]
    assert len(changed) == len(before)
