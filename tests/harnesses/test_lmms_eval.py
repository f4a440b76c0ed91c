"""The model for lmms-eval against a stub of its interface: the plan is attached, and errors end the run."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support import vlm_models
from tokensieve.harnesses.failures import GenerationFailed, raise_failures


class StubLlava:
    """As lmms_eval.models.chat.llava_hf.LlavaHf (0.7.3): errors of generate() are logged, and the answer is empty."""

    def __init__(self, pretrained: Any, device: str = "cuda", device_map: str = "", dtype: str = "auto", **kwargs: Any) -> None:
        assert kwargs == {}, f"Unexpected kwargs: {kwargs}"
        self.model, self.device_map = pretrained, device_map

    def generate_until(self, requests: list[Any]) -> list[str]:
        answers = []
        for inputs in requests:
            text = ""
            try:
                text = str(self.model.generate(**inputs, max_new_tokens=2, do_sample=False)[0, -2:].tolist())
            except Exception as error:
                print(error)
            answers.append(text)
        return answers


@dataclass(frozen=True)
class StubManifest:
    model_id: str
    chat_class_path: str


@pytest.fixture
def lmms_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["lmms_eval", "lmms_eval.models", "lmms_eval.models.chat", "lmms_eval.models.chat.llava_hf"]
    modules = {name: ModuleType(name) for name in [*names, "lmms_eval.models.registry_v2"]}
    modules["lmms_eval.models.chat.llava_hf"].LlavaHf = StubLlava  # type: ignore[attr-defined]
    modules["lmms_eval.models.registry_v2"].ModelManifest = StubManifest  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "tokensieve.harnesses.lmms_eval_model", raising=False)


def planned_class() -> Any:
    """The class that the manifest names, as lmms-eval finds it."""
    import importlib

    from tokensieve.harnesses.lmms_eval import manifest

    declared = manifest()
    assert declared.model_id == "tokensieve"
    module, _, name = declared.chat_class_path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_the_plan_is_attached(lmms_eval: None) -> None:
    model, batch = vlm_models.llava(), vlm_models.prompts((1,), (4,))
    planned = planned_class()(pretrained=model, plan="anchor@out(k=2;m=3)", device="cpu", seed="1")
    assert planned.is_simple is False and planned.device_map == "cpu"
    with torch.no_grad():
        answers = planned.generate_until([batch, batch])
    assert answers[0] and answers[0] == answers[1]
    assert [(row.layer, row.tokens_out) for row in planned.handle.ledger] == [("out", 5)]


def test_errors_end_the_run(lmms_eval: None) -> None:
    model, batch = vlm_models.llava(), vlm_models.prompts((1,), (4,))
    planned = planned_class()(pretrained=model, plan="grid@out:4", device="cpu")
    broken = {**batch, "pixel_values": batch["pixel_values"] * torch.nan}
    with torch.no_grad():
        with pytest.raises(SystemExit, match="NaN"):  # lmms-eval would catch an Exception, and end with exit code 0
            planned.generate_until([batch, broken, batch])
        assert planned.generate_until([batch])[0]  # and the next call works


def test_wrong_plans_are_refused_when_the_model_is_made(lmms_eval: None) -> None:
    for plan in ("grit@out:4", "grid@llm.99:4"):
        with pytest.raises(SystemExit, match="tokensieve: error"):
            planned_class()(pretrained=vlm_models.llava(), plan=plan, device="cpu")


def test_a_model_that_is_not_there_ends_the_run(lmms_eval: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: StubLlava, pretrained: str, **kwargs: Any) -> None:
        raise OSError(f"{pretrained} does not appear\nto have a file named config.json")

    monkeypatch.setattr(StubLlava, "__init__", load)
    with pytest.raises(SystemExit, match="tokensieve: error: OSError: /no/such does not appear to have a file") as ended:
        planned_class()(pretrained="/no/such", plan="grid@out:4", device="cpu")
    assert isinstance(ended.value.code, str)  # so the exit code is 1


def test_an_error_of_the_processor_ends_the_run(lmms_eval: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def process(self: StubLlava, requests: list[Any]) -> list[str]:
        raise ValueError("Image features and image tokens do not match")

    monkeypatch.setattr(StubLlava, "generate_until", process)
    planned = planned_class()(pretrained=vlm_models.llava(), plan="grid@out:4", device="cpu")
    with pytest.raises(SystemExit, match="ValueError: Image features and image tokens do not match"):
        planned.generate_until([{}])


def test_failures_are_raised_once_and_only_then() -> None:
    class Model:
        calls = 0

        def generate(self, fails: bool = False) -> str:
            self.calls += 1
            if fails:
                raise ValueError("too long")
            return "answer"

    model: Any = Model()
    with raise_failures(model):
        assert model.generate() == "answer"

    def ask_all() -> None:
        with raise_failures(model):
            for fails in (False, True, False):
                with contextlib.suppress(ValueError):
                    model.generate(fails)

    with pytest.raises(GenerationFailed, match="ValueError: too long"):
        ask_all()
    assert model.calls == 3 and model.generate() == "answer"
