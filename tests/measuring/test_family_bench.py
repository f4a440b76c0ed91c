"""bench --model_type vlm --family: every family is measured at @out and in the decoder, beside its oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tokensieve import cli
from tokensieve.measuring import family_bench, family_models
from tokensieve.measuring.phases import open_model
from tokensieve.models.families import VLM_FAMILIES


@pytest.mark.slow
def test_all_families(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "families.json"
    words = ["bench", "--model_type", "vlm", "--family", "all", "--quick", "--device", "cpu", "--new_tokens", "2"]
    assert cli.main([*words, "--output", str(output)]) == 0
    said, written = capsys.readouterr(), json.loads(output.read_text())
    expected = [(name, plan) for name in family_models.names() for plan in family_bench.PLANS]
    assert [(row["family"], row["plan"]) for row in written["rows"]] == expected
    assert {family.name for family in VLM_FAMILIES.values() if not family.no_cut} < {name for name, _ in expected}
    for row in written["rows"]:
        assert row["no_oracle_reason"] is None and row["changed"]
        assert all(row["realized"][phase] > 0 for phase in ("first", "decode"))
        depth = len(row["cache"]["tokens"])
        cut = 0 if row["plan"].startswith("grid@out") else 2
        shorter = [row["cache"]["tokens"][layer] < row["cache_full"]["tokens"][layer] for layer in range(depth)]
        assert shorter == [layer >= cut for layer in range(depth)]
    assert "InternVL" in said.out and "[13/13]" in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["families.json"]  # written after every model, one file


@pytest.mark.parametrize("family", ["qwen3_vl", "llava_next"])
def test_features_are_computed_once_and_equal_the_stock_ones(family: str) -> None:
    model, inputs = family_models.build(family, 64, 64)
    tower = model.model.visual if family == "qwen3_vl" else model.model.vision_tower
    calls: list[int] = []
    hook = tower.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        expected = model(**inputs).logits
        with family_bench._constant_features(open_model(model), inputs):
            found = [model(**inputs).logits for _ in range(3)]
    hook.remove()
    assert len(calls) == 2 and all(torch.equal(logits, expected) for logits in found)
    assert "get_image_features" not in vars(model.model)


@pytest.mark.parametrize("name", family_models.names())
@pytest.mark.parametrize("tokens", [64, 300])
def test_prompts_have_about_so_many_tokens(name: str, tokens: int) -> None:
    model, inputs = family_models.build(name, tokens, 64)
    found = int((inputs["input_ids"] == model.config.image_token_id).sum())
    assert 0.3 * tokens <= found <= max(1.1 * tokens, 2 * family_models.TILE**2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model_type vlm --family qwen3", "qwen3_vl"),
        ("--model_type vlm --family llama4", "scale each query"),
        ("--family all", "add --model_type vlm"),
        ("--model_type vlm --family all --model sieve-llava-8", "--model does not go with --family"),
        ("--model_type vlm --family all --batch_size 4", "--batch_size does not go with --family"),
        ("--model_type vlm --family all --width 100", "--width 100 is no multiple of 64"),
        ("--model_type vlm --vision_tokens 576", "go with --family alone"),
    ],
)
def test_flags_that_do_not_go_together(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *flags.split()]) == 2
    assert message in capsys.readouterr().err
