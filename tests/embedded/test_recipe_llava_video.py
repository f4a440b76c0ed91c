"""The video learner: a stock model that begins as the LLaVA, clips that run backwards, and what tokens have to tell."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoProcessor, LlavaForConditionalGeneration, LlavaOnevisionForConditionalGeneration

from tests.support.rounding import assert_near
from tokensieve import config, embedded, training
from tokensieve.embedded import scenes
from tokensieve.embedded.clip_texts import CLIP_QUESTION_KINDS
from tokensieve.embedded.clips import FRAMES
from tokensieve.embedded.datasets import EmbeddedClips
from tokensieve.embedded.recipes import llava, llava_video, llava_video_model
from tokensieve.errors import UserError
from tokensieve.parts.checkpoints import CHECKPOINTS
from tokensieve.training import checkpoint, loop

TINY = """
task: llava_video
output: OUTPUT
threads: 1
layers: 3
clips: 3
batch: 2
questions: 5
val_clips: 3
checkpoint_every: 2
evaluate_every: 3
evaluate: false
phases:
  - {steps: 2, lr: [1.0e-4, 1.0e-3], time_layer: 1}
  - {steps: 1, lr: [1.0e-3, 1.0e-4]}
"""


def written(folder, text=TINY):
    path = folder / "config.yaml"
    path.write_text(text.replace("OUTPUT", str(folder / "made")))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run of three steps."""
    folder = tmp_path_factory.mktemp("llava_video")
    before = torch.get_num_threads()
    training.run(written(folder), output=folder / "run", quiet=True)
    torch.set_num_threads(before)
    return folder / "run"


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    return llava_video.LlavaVideoLearner(config.load(written(tmp_path_factory.mktemp("learner"))))


def test_it_begins_with_the_llava(learner):
    llava = LlavaForConditionalGeneration.from_pretrained(embedded.llava_path(), dtype=torch.float32).model
    ours = learner.model.model
    for name in ("vision_tower", "multi_modal_projector"):
        theirs = getattr(llava, name).state_dict()
        assert all(torch.equal(value, theirs[key]) for key, value in getattr(ours, name).state_dict().items())
        assert not any(weight.requires_grad for weight in getattr(ours, name).parameters())
    kept = [llava.language_model.layers[i] for i in (3, 7, 11)]
    for layer, known in zip(ours.language_model.layers, kept, strict=True):
        assert torch.equal(layer.mlp.up_proj.weight, known.mlp.up_proj.weight)
    table, words = ours.get_input_embeddings().weight, learner.processor.tokenizer
    old = AutoProcessor.from_pretrained(embedded.llava_path()).tokenizer
    rows = llava.get_input_embeddings().weight
    for word, known in (("circle", "circle"), ("?", "?"), ("up", "above"), ("zero", "no")):
        assert torch.equal(table[words.convert_tokens_to_ids(word)], rows[old.convert_tokens_to_ids(known)])
    for word in llava_video_model.NEW_WORDS:
        assert words.convert_tokens_to_ids(word) != words.unk_token_id


def test_every_word_of_the_questions_is_known(learner):
    words = learner.processor.tokenizer
    for index in range(300):
        _, question = EmbeddedClips("val").ask(index)
        for text in (question.text, *question.answers):
            assert words.unk_token_id not in words(text)["input_ids"]


def test_a_question_in_a_pack_is_computed_as_if_it_were_asked_alone(learner):
    """The losses of two clips with their questions are those that the stock model has, one question at a time."""
    model, processor = learner.model.eval(), learner.processor
    clips, questions, tokens = learner.draw(0)
    with torch.no_grad():
        losses = []
        for clip, asked in zip(clips, questions, strict=True):
            frames = np.stack([scenes.render(scene) for scene in clip.scenes()])
            for question in asked:
                prompt = llava_video_model.PROMPT.format(question=question.text)
                text = f"{prompt} {question.answer} [EOS]"
                inputs = processor(videos=[frames], text=[text], return_tensors="pt")
                inputs = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
                length = len(processor.tokenizer(f"{question.answer} [EOS]", add_special_tokens=False)["input_ids"])
                logits = model(**inputs).logits[0, -length - 1 : -1]
                wanted = inputs["input_ids"][0, -length:]
                losses += (logits.logsumexp(-1) - logits.gather(1, wanted[:, None])[:, 0]).tolist()
        packed, _ = learner.answer(tokens, questions)
    assert float(packed["answer"]) == pytest.approx(np.mean(losses), rel=0.02)  # packs are computed in bfloat16


def test_a_clip_that_runs_backwards_has_the_tokens_of_its_frames(learner):
    seen = dict(learner.picked(0) + learner.picked(1))
    assert len(seen) == 3  # all clips once, before any comes again
    turned = {number: backwards for number, backwards in learner.picked(1)[1:] + learner.picked(2)}
    assert any(turned[number] != seen[number] for number in turned)
    for index in range(3):
        clips, _, tokens = learner.draw(index)
        for clip, row in zip(clips, tokens, strict=True):
            assert_near(row, learner.clip_tokens.compute(clip).half().float(), steps=1000)


def test_tokens_tell_what_their_object_does(learner):
    clips, _, _ = learner.draw(0)
    told = set()
    for clip in clips:
        labels = learner.doings(clip).reshape(FRAMES, 7, 7)
        for actor in clip.actors:
            for frame in (0, FRAMES - 1):
                thing = actor.at(frame)
                label = labels[frame, int(thing.y // 16), int(thing.x // 16)]
                if label == -100:  # what covers a bit only, or moves and has only begun
                    continue
                word = learner.said[label]
                there = actor.doing.shown(frame)
                wanted = {
                    "appear": "appear" if there else "background",
                    "vanish": "stay" if there else "vanish",
                    "stay": "stay",
                }
                if thing.shape not in ("ring", "crescent"):  # in their middle is the background
                    assert word == wanted.get(actor.doing.name, actor.doing.way)
                    told.add(word)
    assert len(told) > 1


def test_what_ships_is_a_stock_model(run):
    folder = run / embedded.LLAVA_VIDEO
    weights = load_file(folder / "model.safetensors")
    assert all(value.dtype == torch.float16 for value in weights.values()) and "lm_head.weight" not in weights
    model = LlavaOnevisionForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    assert type(processor).__name__ == "LlavaOnevisionProcessor" and len(model.model.language_model.layers) == 3
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert len(llava_video.answers(model, processor, EmbeddedClips("val", length=2), batch=2)) == 2
    card = json.loads((folder / "card.json").read_text())
    assert {"recipe", "seed", "seconds", "loss_curve", "accuracy", "blind", "parameters"} <= set(card)
    assert card["steps"] == 3 and 12 <= card["questions"] <= 30
    columns, *rows = (run / "losses.csv").read_text().splitlines()
    assert columns.startswith("step,answer,time,doing") and len(rows) == 3


def test_the_chat_template_gives_the_prompt_of_training(learner):
    chat = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "how many?"}]}]
    prompt = llava_video_model.PROMPT.format(question="how many?")
    assert learner.processor.apply_chat_template(chat, add_generation_prompt=True) == prompt


@pytest.mark.slow
def test_stopped_and_resumed_it_ends_with_the_same_bits(run, tmp_path):
    first = llava_video.LlavaVideoLearner(config.load(written(tmp_path)))
    loop.train(first, tmp_path / "run", steps=2, checkpoint_every=2, quiet=True)
    training.run(written(tmp_path), resume=True, output=tmp_path / "run", quiet=True)
    # the last states, not what ships: stopping evaluates once more, and of equal accuracies the first is the best
    last = (checkpoint.load(folder / CHECKPOINTS / "step-00000003") for folder in (run, tmp_path / "run"))
    whole, parts = (one.state["learner"]["model"] for one in last)
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)


def test_files_that_cannot_be_are_told(tmp_path):
    with pytest.raises(UserError, match="clips: 1 are less than the 2 of a step"):
        config.load(written(tmp_path, TINY.replace("clips: 3\nbatch", "clips: 1\nbatch")))
    with pytest.raises(UserError, match="time_layer"):
        config.load(written(tmp_path, TINY.replace("time_layer: 1", "time_layer: 4")))


def test_blind_answers_are_the_commonest():
    asked = [EmbeddedClips("val").ask(i)[1] for i in range(500)]
    guessed = llava.accuracy(llava_video.blind_answers(asked, n_train=1000), asked)
    assert guessed["n"] == 500 and 0.2 < guessed["accuracy"] < 0.45 and set(CLIP_QUESTION_KINDS) <= set(guessed)
    assert llava.accuracy([question.answer for question in asked], asked)["accuracy"] == 1.0
