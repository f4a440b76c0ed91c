"""The examples of fine-tuning train for a few steps: with all tokens, and with a plan on."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest

from tests.support.paths import ROOT

NUMBERS = {"steps": 2, "batch": 3, "test": 4}
FLAGS = [word for name, value in NUMBERS.items() for word in (f"--{name}", str(value))]


def names_of(example: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / example))


@pytest.mark.slow
@pytest.mark.parametrize(("example", "plan"), [("finetune_clip.py", "cover@2:56"), ("finetune_llava_lora.py", "cover@out:8")])
def test_an_example_trains(example: str, plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "lora" in example:
        pytest.importorskip("peft")
    accuracies = names_of(example)["main"]([*FLAGS, "--device", "cpu", "--plan", plan])
    printed = capsys.readouterr().out
    assert {value * NUMBERS["test"] % 1 for value in accuracies.values()} == {0}  # shares of so many
    row, with_plan = (re.search(rf"^{title} +([\d.]+) +(\d+)", printed, re.MULTILINE) for title in ("all tokens", plan))
    assert row and with_plan
    assert 0 < float(with_plan[2]) < float(row[2])  # MiB
    assert re.search(rf"step 2 of 2: loss \d\.\d+ with all tokens, \d\.\d+ with {plan}", printed)


@pytest.mark.slow
def test_a_step_changes_every_adapter_and_the_answers_alone_are_learned() -> None:
    pytest.importorskip("peft")
    names = names_of("finetune_llava_lora.py")
    training = names["Training"]("cover@out:8", rank=2, rate=1e-2, device="cpu")
    pictures, questions = names["draw"]("train", 0, 2)
    batch = names["inputs_of"](training.processor, pictures, questions)
    learned = [training.processor.tokenizer.decode(row[row != -100], skip_special_tokens=True) for row in batch["labels"]]
    assert learned == [question.answer for question in questions]
    before = {name: value.clone() for name, value in training.model.named_parameters()}
    for _ in range(2):  # A changes once B is no longer 0
        training.step(batch)
    changed = {name for name, value in training.model.named_parameters() if not value.equal(before[name])}
    assert changed == {name for name in before if "lora_" in name}
