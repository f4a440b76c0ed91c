"""The LLaVA that ships: stock transformers load it, it answers, and its card tells the truth."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

import tokensieve
from tokensieve import embedded
from tokensieve.embedded.datasets import EmbeddedQuestions
from tokensieve.embedded.recipes import llava, llava_model
from tokensieve.embedded.scene_texts import QUESTION_KINDS, ask
from tokensieve.parts import fit

FOLDER = embedded.llava_path()


@pytest.fixture(scope="module")
def shipped():
    return LlavaForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval(), AutoProcessor.from_pretrained(
        FOLDER
    )


@pytest.fixture(scope="module")
def card():
    return json.loads((FOLDER / "card.json").read_text(encoding="utf-8"))


def test_it_is_small_and_of_the_expected_build(shipped):
    model, processor = shipped
    assert (FOLDER / "model.safetensors").stat().st_size < 10e6
    assert model.config.text_config.num_hidden_layers == 12 and model.config.image_seq_length == 196
    assert type(processor).__name__ == "LlavaProcessor" and processor.tokenizer.padding_side == "left"


def test_every_word_of_the_questions_is_known(shipped):
    words = shipped[1].tokenizer
    for i in range(500):
        _, question = ask(0, i)
        for text in (question.text, *question.answers):
            assert words.unk_token_id not in words(text)["input_ids"]
    assert words.decode(words("left of")["input_ids"], skip_special_tokens=True) == "left of"


def test_it_answers_a_chat(shipped):
    model, processor = shipped
    image, question = EmbeddedQuestions("val")[0]
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question.text}]}]
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True)
    inputs = processor(images=image, text=prompt, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True) in question.answers


@pytest.mark.slow
@pytest.mark.parametrize("pairs", ["seen", "all"])
def test_a_slice_of_the_test_split_agrees_with_the_card(shipped, card, pairs):
    data = EmbeddedQuestions("test", pairs, length=160)
    asked = [data.ask(i)[1] for i in range(len(data))]
    measured = llava.accuracy(llava.answers(*shipped, data), asked)
    told = card["accuracy"][f"test/{pairs}"]["accuracy"]
    assert abs(measured["accuracy"] - told) < 4 * (told * (1 - told) / len(data)) ** 0.5


PLAN = "merger@out + cross@llm.3,6,9(rest=merge)"


def test_the_shipped_reducers_serve_it(shipped):
    model, processor = shipped
    image, question = EmbeddedQuestions("val")[3]
    inputs = processor(images=image, text=llava_model.PROMPT.format(question=question.text), return_tensors="pt")
    with tokensieve.apply(model, PLAN) as handle:
        ids = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert [row.tokens_out for row in handle.ledger] == [79, 48, 28, 14]
    assert processor.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True) == question.answer


@pytest.mark.slow
def test_the_shipped_reducers_answer_as_their_card_says(shipped):
    card = json.loads((fit.SHIPPED / "pruning.card.json").read_text(encoding="utf-8"))
    data = EmbeddedQuestions("val", length=200)
    asked = [data.ask(i)[1] for i in range(len(data))]
    with tokensieve.apply(shipped[0], PLAN):
        measured = llava.accuracy(llava.answers(*shipped, data), asked)
    told = card["accuracy"]["val"]["accuracy_hard"]
    assert card["plan"] == PLAN
    assert abs(measured["accuracy"] - told) < 4 * (told * (1 - told) / len(data)) ** 0.5


@pytest.mark.slow
def test_who_does_not_look_guesses(card):
    data = EmbeddedQuestions("test")
    asked = [data.ask(i)[1] for i in range(len(data))]
    guessed = llava.accuracy(llava.blind_answers(asked), asked)
    assert guessed == card["blind"]["test/seen"]
    chance = sum(1 / len(question.answers) for question in asked) / len(asked)
    assert guessed["accuracy"] < chance + 0.06


def test_the_card_tells_how_it_was_made(card):
    assert {"recipe", "seed", "steps", "pictures", "questions", "seconds", "parameters", "versions", "loss_curve"} <= set(card)
    assert card["accuracy"]["test/seen"]["accuracy"] >= 0.85
    assert card["blind"]["test/seen"]["accuracy"] < 0.35
    for measured in card["accuracy"].values():
        mean = sum(measured[kind] for kind in QUESTION_KINDS) / len(QUESTION_KINDS)
        assert measured["accuracy"] == pytest.approx(mean, abs=1e-3)
