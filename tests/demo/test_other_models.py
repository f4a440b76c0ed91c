"""Models of other families on the page: without a text tower, and vision-language models whose tower cannot be cut."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from tests.support import hf_models
from tests.support.varying_vlms import save_varying
from tokensieve.demo.session import Session
from tokensieve.demo.subject import ModelName

SAMPLE = {"image": "sample:3"}


@pytest.mark.parametrize("kind", ["clip", "dinov2"])
def test_hugging_face_models(tmp_path: Path, kind: str) -> None:
    model = hf_models.save(kind, tmp_path / "model")
    session = Session([ModelName(model, "", "hf")], "cpu")
    setup = session.setup("")
    assert setup["places"][-1]["where"] == "out" and setup["plan"] == "cover:25%"
    answer = session.run(model, SAMPLE, {}, setup["samples"][0]["prompt"], [setup["plan"], "random@2:9"])
    for outcome in answer["plans"]:
        assert outcome["images"]["image"]["stages"][-1]["tokens_out"] == 9 and -1 <= outcome["says"]["likeness"] <= 1.001
    assert bool(answer["full"]["says"]["rows"]) == (kind == "clip") == bool(setup["prompt_label"])


@pytest.mark.parametrize("family", ["llava_next", "qwen2_vl"])
def test_models_whose_language_model_alone_is_cut(tmp_path: Path, family: str) -> None:
    model = save_varying(tmp_path / "model", family)
    session = Session([ModelName(model, "", "vlm")], "cpu")
    setup = session.setup("")
    assert setup["plan"] == "fastv" and {place["where"][:4] for place in setup["places"]} == {"llm."}
    answer = session.run(
        model, SAMPLE | {"image": f"sample:{setup['samples'][0]['number']}"}, {}, "what?", ["random@llm.1:50%"]
    )
    (outcome,) = answer["plans"]
    assert "error" not in outcome and outcome["gflops"] < answer["full"]["gflops"]
    assert isinstance(outcome["says"]["answer"], str)
    band = outcome["images"]["image"]
    (stage,) = band["stages"]
    assert stage["tokens_out"] < stage["tokens_in"] and len(stage["states"]) == band["grid"][0] * band["grid"][1]
