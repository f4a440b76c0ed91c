"""A model type is declared once, and loading goes through the declaration."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tokensieve import embedded
from tokensieve.errors import UserError
from tokensieve.models import loading
from tokensieve.models.loading.loaded import Loaded, no_text
from tokensieve.models.loading.registry import MODEL_TYPES, ModelType, type_of_name
from tokensieve.registry import resolve


def check_toy(model: str, pretrained: str) -> None:
    if model != "linear":
        raise UserError(f"no toy model {model!r}")


def load_toy(model: str, *, pretrained: str, cache_dir: str | None, device: str, dtype: torch.dtype | None) -> Loaded:
    return Loaded(torch.nn.Linear(2, 2).to(device=device, dtype=dtype), torch.tensor, no_text(model), pretrained)


@pytest.fixture
def toy() -> Iterator[None]:
    here = __name__
    MODEL_TYPES.add(ModelType("toy", "a toy", f"{here}:check_toy", f"{here}:load_toy", example="--model linear"))
    yield
    del MODEL_TYPES._declared["toy"]


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_declarations_are_whole(name: str) -> None:
    kind = MODEL_TYPES[name]
    named = (kind.check, kind.load, kind.architecture, kind.bench, kind.default_pretrained, kind.is_model_name)
    assert all(callable(resolve(function)) for function in named if function)
    assert kind.summary and (kind.default_model or kind.example)
    assert kind.bench_model or kind.architecture is None


def test_a_model_type_of_a_plug_in(toy: None) -> None:
    assert loading.model_pairs(["linear"], ["a"], None, "toy") == [("linear", "a")]
    with pytest.raises(UserError, match="--model_type toy needs --model, for example --model linear"):
        loading.model_pairs(None, None, None, "toy")
    with pytest.raises(UserError, match="no toy model 'other'"):
        loading.check_model("other", "", "toy")
    loaded = loading.load("linear", "a", model_type="toy", dtype=torch.float64)
    assert loaded.fingerprint == "a" and loaded.model.weight.dtype == torch.float64
    with pytest.raises(UserError, match="toy has no architectures to measure; use open_clip, hf or timm"):
        loading.architecture("linear", model_type="toy")


def test_types_without_a_model_of_their_own_need_one() -> None:
    assert loading.model_pairs(None, None, None, "vlm") == [(embedded.LLAVA, "")]
    assert loading.model_pairs(None, None, None, "reid") == [(embedded.REID, "")]
    assert loading.model_pairs(None, None, None) == [(embedded.MODEL, embedded.PRETRAINED)]
    assert loading.model_pairs(["local-dir:/a"], None, None) == [("local-dir:/a", "")]
    with pytest.raises(UserError, match=r"no model type named 'vlmm'.*Did you mean"):
        loading.model_pairs(None, None, None, "vlmm")
    with pytest.raises(UserError, match="ja_clip needs --pretrained"):
        loading.check_model("japanese-clip", "", "ja_clip")


def test_names_that_can_only_be_of_one_type() -> None:
    named = {name: resolve(kind.is_model_name) for name, kind in MODEL_TYPES.items() if kind.is_model_name}
    for model, types in ((embedded.LLAVA, ["vlm"]), (embedded.REID, ["reid"]), (embedded.MODEL, [])):
        assert [name for name, is_model_name in named.items() if is_model_name(model)] == types


def test_weights_of_every_type_come_in_the_requested_format() -> None:
    for kind in ("open_clip", "vlm", "reid"):
        (pair,) = loading.model_pairs(None, None, None, kind)
        loaded = loading.load(*pair, model_type=kind, dtype=torch.float64)
        assert next(loaded.model.parameters()).dtype == torch.float64


def test_importing_the_declarations_imports_no_torch() -> None:
    code = (
        "import sys; from tokensieve.models.loading.registry import MODEL_TYPES; from tokensieve.models import loading;"
        "list(MODEL_TYPES); loading.model_pairs(None, None, None, 'reid');"
        "print([name for name in ('torch', 'transformers', 'open_clip', 'timm', 'PIL') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        (None, None, "open_clip"),
        (None, "timm", "timm"),
        ("ViT-B-16", None, "open_clip"),
        ("sieve-llava-8", None, "vlm"),
        ("sieve-llava-8", "open_clip", "vlm"),  # the default of a flag is not told from what was typed
        ("sieve-reid-6", None, "reid"),
        ("sieve-llava-8", "hf", "hf"),
    ],
)
def test_a_name_may_decide_the_type(name: str | None, given: str | None, expected: str) -> None:
    assert type_of_name(name, given) == expected
