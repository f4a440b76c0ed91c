"""The video model that ships: it is small, it answers, and its card tells the truth."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, LlavaOnevisionForConditionalGeneration

from tokensieve import config, embedded
from tokensieve.config import recipe
from tokensieve.embedded.clip_texts import CLIP_QUESTION_KINDS
from tokensieve.embedded.datasets import EmbeddedClips
from tokensieve.embedded.recipes import llava, llava_video

FOLDER = embedded.llava_path(embedded.LLAVA_VIDEO)


@pytest.fixture(scope="module")
def card():
    return json.loads((FOLDER / "card.json").read_text(encoding="utf-8"))


def test_it_is_small_and_of_the_expected_build(card):
    assert (FOLDER / "model.safetensors").stat().st_size < 6e6
    model = LlavaOnevisionForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32)
    assert model.config.text_config.num_hidden_layers == 6 == card["recipe"]["layers"]
    assert sum(p.numel() for p in model.parameters()) == card["parameters"]["all"]
    assert type(AutoProcessor.from_pretrained(FOLDER)).__name__ == "LlavaOnevisionProcessor"


def test_the_card_says_how_it_was_made_and_what_it_reaches(card):
    shipped = recipe.recipe(config.load(FOLDER.parents[1] / "configs" / "embedded_llava_video.yaml"))
    assert shipped.items() <= card["recipe"].items() and card["steps"] <= sum(phase["steps"] for phase in shipped["phases"])
    reached, blind = card["accuracy"]["test"], card["blind"]["test"]
    assert reached["n"] == blind["n"] == llava_video.MEASURED
    assert reached["accuracy"] - blind["accuracy"] > 5 * np.hypot(reached["accuracy_stderr"], blind["accuracy_stderr"])
    for numbers in (reached, card["accuracy"]["val"]):  # every kind has the same weight
        assert numbers["accuracy"] == pytest.approx(np.mean([numbers[kind] for kind in CLIP_QUESTION_KINDS]), abs=1e-3)
    assert card["loss_curve"][0]["answer"] > 2 * card["loss_curve"][-1]["answer"]


def test_it_answers_as_its_card_says(card):
    model = LlavaOnevisionForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()
    data = EmbeddedClips("val", length=50)
    questions = [data.ask(i)[1] for i in range(50)]
    said = llava_video.answers(model, AutoProcessor.from_pretrained(FOLDER), data)
    reached = llava.accuracy(said, questions)["accuracy"]
    known = card["accuracy"]["test"]["accuracy"]
    assert abs(reached - known) < 4 * np.sqrt(known * (1 - known) / 50)
    assert all(answer in question.answers for answer, question in zip(said, questions, strict=True))
