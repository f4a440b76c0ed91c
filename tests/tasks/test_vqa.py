"""Scores of answers as VQA defines them, and a model that answers: in batches, padded, blind."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support import vqa_files
from tests.support.pictures import picture
from tokensieve.data.vqa_items import VqaItem
from tokensieve.errors import UserError
from tokensieve.models.loading import vlm as load_vlm
from tokensieve.models.loading.vlm import LoadedVlm
from tokensieve.tasks.vqa import answering, scores
from tokensieve.tasks.vqa.answering import answer_questions, ask
from tokensieve.tasks.vqa.scores import exact_match, normalise, soft_score

# ------------------------------------------------------------------------------------------------------------------- scores


def slow_score(answer: str, answers: list[str]) -> float:
    """VQA's formula word for word: every person is left out once, and the others are counted."""
    each = []
    for left_out in range(len(answers)):
        others = [said for person, said in enumerate(answers) if person != left_out]
        agree = sum(1 for said in others if slow_words(said) == slow_words(answer))
        each.append(min(1.0, agree / 3))
    return sum(each) / len(each)


def slow_words(text: str) -> list[str]:
    """An answer as its words, letter by letter, by the published rules."""
    text = text.lower().replace("\n", " ").strip()
    thousands = bool(re.search("[0-9],[0-9]", text))
    letters = []
    for place, letter in enumerate(text):
        after = text[place + 1 : place + 2]
        if letter == "." and not after.isdigit():
            continue
        if letter in ';/[]"{}()=+\\_-><@`,?!':
            touches = any(text[i : i + 2] in (f"{letter} ", f" {letter}") for i in range(len(text)))
            letter = "" if touches or thousands else " "
        letters.append(letter)
    names = ("none", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    numbers = dict(zip(names, [0, *range(11)], strict=True))
    words = [str(numbers.get(word, word)) for word in "".join(letters).split()]
    fixed = {"dont": "don't", "isnt": "isn't", "thats": "that's", "cant": "can't"}
    return [fixed.get(word, word) for word in words if word not in ("a", "an", "the")]


ANSWERS = [
    "red",
    "Red.",
    "a red",
    "two",
    "2",
    "dont know",
    "don't know",
    "black/white",
    "black, white",
    "1,000",
    "1000",
    "0.5",
    "yes",
]


def test_the_soft_score_is_that_of_the_published_formula() -> None:
    rng = random.Random(0)
    for _ in range(500):
        answers = [rng.choice(ANSWERS) for _ in range(10)]
        given = rng.choice(ANSWERS)
        assert soft_score(given, answers) == pytest.approx(slow_score(given, answers), abs=1e-12), (given, answers)


@pytest.mark.parametrize("n", range(11))
def test_the_score_of_an_answer_that_n_of_ten_gave(n: int) -> None:
    worth = {0: 0.0, 1: 0.3, 2: 0.6, 3: 0.9}.get(n, 1.0)  # as VQA's page tells
    assert soft_score("red", ["red"] * n + ["blue"] * (10 - n)) == pytest.approx(worth)


def test_with_one_reference_both_scores_are_the_same() -> None:
    for given, told in itertools.product(ANSWERS, ANSWERS):
        assert soft_score(given, [told]) == exact_match(given, [told]) == float(slow_words(given) == slow_words(told))
    assert soft_score("red", ["red", "red"]) == 1 and soft_score("red", ["red", "blue"]) == 0.5


def test_exact_match_is_with_what_most_people_said() -> None:
    assert exact_match("2", ["two", "2", "three"]) == 1 and exact_match("three", ["two", "2", "three"]) == 0


@pytest.mark.parametrize(
    ("answer", "compared"),
    [
        ("The 2 Dogs.", "2 dogs"),
        ("two", "2"),
        ("None", "0"),
        ("100,978", "100978"),
        ("dont", "don't"),
        ("Isnt", "isn't"),
        ("girl's", "girl's"),
        ("2:50 pm", "2:50 pm"),
        ("3.5", "3.5"),
        ("U.S.", "us"),
        ("black/white", "black white"),
        ("yes, it is", "yes it is"),
        ("left\nof", "left of"),
        ("an", ""),
        ("were", "were"),  # not we're
        ("well", "well"),
    ],
)
def test_answers_are_compared_as_vqa_does(answer: str, compared: str) -> None:
    assert normalise(answer) == compared == " ".join(slow_words(answer))


def test_the_numbers_of_all_and_of_every_kind_with_the_error_of_whole_images() -> None:
    record = scores.Scored([1.0, 0.0, 0.3, 1.0], [1.0, 0.0, 0.0, 1.0], ["yes/no", "other", "other", ""], ["a", "a", "b", "c"])
    made = scores.OpenAnswers().metrics([record])
    assert made["vqa_score"] == pytest.approx(0.575) and made["exact_match"] == 0.5
    assert made["vqa_score_yes_no"] == 1 and made["vqa_score_other"] == pytest.approx(0.15) and "vqa_score_" not in made
    away = [(1 - 0.575) + (0 - 0.575), 0.3 - 0.575, 1 - 0.575]  # of the images a, b and c
    assert made["vqa_score_stderr"] == pytest.approx(sum(x * x for x in away) ** 0.5 / 4)
    alone = scores.OpenAnswers().metrics([scores.Scored([1.0, 0.0, 1.0, 1.0], [1.0] * 4, [""] * 4, list("abcd"))])
    assert alone["vqa_score_stderr"] == pytest.approx((0.75 * 0.25 / 4) ** 0.5)


# ------------------------------------------------------------------------------------------------------------------ answering


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedVlm:
    return load_vlm.load(vqa_files.save_llava(tmp_path_factory.mktemp("llava")))


def items(count: int) -> list[VqaItem]:
    asked = ["what is this ?", "is there a red dog ?", "what colour is the dog ? one word answer"]
    return [VqaItem(picture(n % 6, n), asked[n % 3], ["red"], str(n)) for n in range(count)]


def test_a_folder_is_loaded_with_its_processor(loaded: LoadedVlm, tmp_path: Path) -> None:
    assert not loaded.model.training and loaded.model.dtype == torch.float32
    assert loaded.processor.tokenizer.padding_side == "left"
    assert loaded.transform(picture(0, 0)).shape == (3, 24, 24)
    again = load_vlm.load(vqa_files.save_llava(tmp_path / "again"))
    other = load_vlm.load(vqa_files.save_llava(tmp_path / "other", seed=1))
    assert loaded.fingerprint == again.fingerprint != other.fingerprint
    half = load_vlm.load(str(tmp_path / "again"), dtype=torch.bfloat16, attn_implementation="eager")
    assert half.model.dtype == torch.bfloat16 and half.model.config._attn_implementation == "eager"
    assert len(answer_questions(half.model, half.processor, items(2), 2, 3)) == 2


def test_the_prompt_is_the_processors(loaded: LoadedVlm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_vlm.prompt(loaded.processor, "what ?") == "user : <image> what ? assistant :"
    assert load_vlm.prompt(loaded.processor, "what ?", None) == "user : what ? assistant :"
    monkeypatch.setattr(loaded.processor, "chat_template", None)
    assert load_vlm.prompt(loaded.processor, "what ?") == "USER: <image>\nwhat ? ASSISTANT:"


def test_answers_do_not_depend_on_the_batch(loaded: LoadedVlm) -> None:
    one_by_one = answer_questions(loaded.model, loaded.processor, items(7), batch_size=1, max_new_tokens=5)
    assert answer_questions(loaded.model, loaded.processor, items(7), batch_size=3, max_new_tokens=5) == one_by_one
    assert len(set(one_by_one)) > 1 and all(one_by_one)
    assert answer_questions(loaded.model, loaded.processor, [], 4) == []


def test_questions_are_padded_on_the_left_with_one_start(loaded: LoadedVlm, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = ask(loaded.processor, items(3), "{question} the answer :")
    assert inputs["attention_mask"][0].tolist()[0] == 0 and inputs["attention_mask"][:, -1].tolist() == [1, 1, 1]
    start = loaded.processor.tokenizer.bos_token_id
    assert (inputs["input_ids"] == start).sum(1).tolist() == [1, 1, 1]
    template = loaded.processor.chat_template
    monkeypatch.setattr(loaded.processor, "chat_template", "[BOS] " + template)  # as Llama 3's
    assert (ask(loaded.processor, items(1))["input_ids"] == start).sum().item() == 1


def test_blind_means_that_nothing_is_seen(loaded: LoadedVlm) -> None:
    seen, grey = (ask(loaded.processor, items(2), blind=blind) for blind in (False, True))
    assert grey["pixel_values"].abs().max() < 0.01 < seen["pixel_values"].abs().max()
    assert torch.equal(seen["input_ids"], grey["input_ids"])
    assert answering.grey(loaded.processor.image_processor, Image.new("RGB", (30, 20))).size == (30, 20)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sieve-llava-9", "Did you mean 'sieve-llava-8'"),
        ("sieve-llava-vid-8", "Did you mean 'sieve-llava-video-8'"),
        ("nobody/nothing", "not on this machine .* Connect once"),
        ("../x/y", "no id on the Hub"),
    ],
)
def test_a_name_that_is_nothing_is_explained(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_vlm.load(name)


def test_a_folder_of_something_else_is_explained(tmp_path: Path) -> None:
    from tests.support import hf_models

    with pytest.raises(UserError, match=r"no config\.json"):
        load_vlm.load(str(tmp_path))
    with pytest.raises(UserError, match="a clip, which does not answer questions"):
        load_vlm.load(hf_models.save("clip", tmp_path / "clip"))
    folder = Path(vqa_files.save_llava(tmp_path / "llava"))
    for file in folder.glob("*processor*"):
        file.unlink()
    with pytest.raises(UserError, match="processor"):
        load_vlm.load(str(folder))
    (folder / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(UserError, match="damaged"):
        load_vlm.load(str(folder))


def test_answers_come_from_the_likeliest_word_each_time(loaded: LoadedVlm) -> None:
    inputs: dict[str, Any] = ask(loaded.processor, items(1))
    ids = inputs["input_ids"]
    with torch.inference_mode():
        for _ in range(4):
            mask = torch.ones_like(ids)
            logits = loaded.model(input_ids=ids, attention_mask=mask, pixel_values=inputs["pixel_values"]).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    told = loaded.processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer_questions(loaded.model, loaded.processor, items(1), 1, 4) == [told.strip()]
