"""Plans that do not fit are refused before any weights are loaded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.evaluation import Run
from tests.support.varying_vlms import save_varying
from tokensieve.cli import main
from tokensieve.errors import UserError
from tokensieve.evaluation.plan_check import check_plans
from tokensieve.models import loading
from tokensieve.models.loading.outline import outline
from tokensieve.plan import Plan


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(loading, "load", refuse)


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (("--model", "ViT-B-16", "--pretrained", "openai"), 12),
        (("--model_type", "timm", "--model", "vit_tiny_patch16_224.augreg_in21k", "--task", "linear_probe"), 12),
        ((), 8),
    ],
)
def test_a_layer_that_is_not_there(
    model: tuple[str, ...], blocks: int, no_loading: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *model, "--dataset", "embedded", "--plan", "anchor@60:60"]) == 2
    assert f"no layer 60 in a tower of {blocks} blocks" in capsys.readouterr().err


def test_a_budget_that_keeps_everything_is_an_error_with_strict(
    run: Run, no_loading: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "everything is kept" in run("--plan", "random:6000", "--strict", expect=2).err
    check_plans("sieve-vit-8", "open_clip", [Plan.parse("random:6000")], strict=False)


def test_folders_are_known_by_their_config(tmp_path: Any) -> None:
    folder = save_varying(tmp_path / "q", "qwen2_5_vl")
    made = outline(folder, "vlm")
    assert made is not None and all(value.device.type == "meta" for value in made.parameters())
    with pytest.raises(UserError, match="no layer 9 in a decoder of 4 layers"):
        check_plans(folder, "vlm", [Plan.parse("random@llm.9:50%")], strict=False)
    check_plans(folder, "vlm", [Plan.parse("anchor:60")], strict=False)  # uncuttable: said when it is applied
    assert outline(str(tmp_path), "hf") is None and outline("no-such-model", "open_clip") is None
