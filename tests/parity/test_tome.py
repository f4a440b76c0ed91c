"""tome gives the numbers of the released code, at one cut and through a whole model."""

from __future__ import annotations

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import tokensieve
from tests.parity.golden import CASES, Arrays, assert_golden, assert_same_partition, read
from tokensieve import Reduction, View
from tokensieve.cutting.passes import Row
from tokensieve.methods.tome import tome
from tokensieve.scoring import Attention


@pytest.fixture(scope="module")
def cut() -> Arrays:
    return read("tome")


@pytest.fixture(scope="module")
def whole_model() -> Arrays:
    return read("tome_model")


def make_view(arrays: Arrays, case: str, prefix: int, sized: bool = False) -> View:
    """The stored tokens; without a CLS token, the released code saw the patches alone."""
    start = 1 - prefix
    x, keys = arrays[f"{case}_in_x"][:, start:], arrays[f"{case}_in_keys"][:, :, start:]
    return View(
        tokens=x[:, prefix:],
        prefix=x[:, :prefix],
        grid=None,
        attention=Attention(torch.zeros_like(keys), keys, prefix, scale=1.0),
        sizes=arrays[f"{case}_in_size"][:, 1:, 0] if sized else None,
        has_cls=prefix > 0,
    )


def check(view: View, reduction: Reduction, arrays: Arrays, name: str) -> None:
    golden, golden_sizes = arrays[f"{name}_tokens"], arrays[f"{name}_sizes"]
    outputs = torch.cat([view.prefix, reduction.apply(view.tokens)], dim=1)
    assert_golden(outputs, golden)  # in the same order too, on which the next block's matching depends
    assert reduction.sizes is not None
    assert torch.equal(reduction.sizes, golden_sizes[:, view.prefix.shape[1] :])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("r", "name", "sized"), [(24, "r24", False), (24, "r24_sized", True), (60, "r60", False), (60, "r60_sized", True)]
)
def test_one_cut(cut: Arrays, case: str, r: int, name: str, sized: bool) -> None:
    view = make_view(cut, case, prefix=1, sized=sized)
    reduction = tome(view, view.n - r)
    check(view, reduction, cut, f"{case}_out_{name}")
    assert_same_partition(reduction.groups, cut[f"{case}_out_r{r}_group"][:, 1:])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("r", "name"), [(500, "nocls"), (40, "nocls40")])
def test_one_cut_without_cls(cut: Arrays, case: str, r: int, name: str) -> None:
    view = make_view(cut, case, prefix=0)
    check(view, tome(view, view.n - r), cut, f"{case}_out_{name}")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("schedule", "prop"), [("r16", True), ("r16", False), ("r12dec", True)])
@pytest.mark.filterwarnings("ignore::tokensieve.errors.PlanWarning")  # the schedule ends with 0
def test_a_whole_model(whole_model: Arrays, case: str, schedule: str, prop: bool) -> None:
    model = VisionTransformer(img_size=56, patch_size=4, embed_dim=48, depth=4, num_heads=4, mlp_ratio=2, num_classes=10).eval()
    model.load_state_dict({key[2:].replace("__", "."): value for key, value in whole_model.items() if key.startswith("w_")})
    numbers = whole_model[f"hp_schedule_{schedule}"].tolist()
    options = "" if prop else ",prop_attn=false"
    plan = f"tome(schedule={'/'.join(map(str, numbers))}{options})"
    if schedule == "r12dec":  # the pair (12, -1)
        assert [row.tokens_in - row.tokens_out for row in _ledger(model, "tome:-12(inflect=-1)", whole_model)] == numbers
    images, golden = whole_model[f"{case}_in_image"], f"{case}_out_{schedule}_{'prop' if prop else 'noprop'}"
    with torch.no_grad():
        assert_golden(model(images), whole_model[f"{case}_out_unpatched_logits"])
        with tokensieve.apply(model, plan) as handle:
            tokens = model.forward_features(images)
            assert_golden(model.forward_head(tokens), whole_model[f"{golden}_logits"])
        channels = whole_model[f"{golden}_normed_tokens"]
        assert_golden(tokens[..., : channels.shape[2]], channels)
        assert [row.tokens_in - row.tokens_out for row in handle.ledger] == numbers
        assert handle.groups is not None and handle.reduction is not None
        assert_same_partition(handle.groups, whole_model[f"{golden}_group"][:, 1:])
        assert torch.equal(handle.reduction.sizes, whole_model[f"{golden}_sizes"][:, 1:])


def _ledger(model: VisionTransformer, plan: str, arrays: Arrays) -> list[Row]:
    with torch.no_grad(), tokensieve.apply(model, plan) as handle:
        model(arrays["rand_in_image"])
    return handle.ledger
