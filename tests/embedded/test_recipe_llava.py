"""The LLaVA learner: a stock model, questions that do not see each other, and a stopped run that ends with the same bits."""

from __future__ import annotations

import json

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoProcessor, LlavaForConditionalGeneration

from tests.support.rounding import assert_near
from tokensieve import config, embedded, training
from tokensieve.embedded import scenes
from tokensieve.embedded.datasets import EmbeddedQuestions
from tokensieve.embedded.recipes import llava, llava_model
from tokensieve.embedded.scene_texts import QUESTION_KINDS, ask_many
from tokensieve.errors import UserError
from tokensieve.training import loop

TINY = """
task: llava
output: unused
threads: 1
layers: 4
checkpoint_every: 2
evaluate: false
optimizer: {lr: 1e-3, warmup: 2}
phases:
  - {steps: 1, batch: 2, questions: 0}
  - {steps: 2, batch: 2, questions: 4, layers: 2}
  - {steps: 1, batch: 2, questions: 4, layers: 4, patches: 0.5}
"""


def written(folder, text=TINY):
    path = folder / "config.yaml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run of four steps."""
    folder = tmp_path_factory.mktemp("llava")
    before = torch.get_num_threads()
    training.run(written(folder), output=folder / "run", quiet=True)
    torch.set_num_threads(before)
    return folder / "run"


@pytest.fixture
def learner(tmp_path):
    return llava.LlavaLearner(config.load(written(tmp_path)))


def test_the_tower_is_open_clips(learner):
    embedded.register()
    visual = open_clip.create_model(embedded.MODEL, pretrained=str(embedded.weights_path())).visual.eval()
    shown = [scenes.several(0, i) for i in range(2)]
    pixels, seen = learner.pixels(shown), []
    for block in visual.transformer.resblocks:
        block.register_forward_hook(lambda _module, _inputs, out: seen.append(out))
    with torch.no_grad():
        pooled, _ = visual(pixels) if visual.output_tokens else (visual(pixels), None)
        out = learner.model.model.vision_tower(pixels, output_hidden_states=True)
    assert len(seen) == len(out.hidden_states) - 1
    for ours, theirs in zip(out.hidden_states[1:], seen, strict=True):
        assert_near(ours, theirs, steps=1000)
    assert_near(out.pooler_output @ visual.proj, pooled, steps=1000)


def test_the_processor_makes_the_pictures_that_training_sees(learner):
    shown = [scenes.several(0, i) for i in range(3)]
    images = [Image.fromarray(scenes.render(scene)) for scene in shown]
    pixels = learner.processor(images=images, text=["<image>"] * 3, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(pixels, learner.pixels(shown), atol=1e-5, rtol=1e-5)


def test_a_question_in_a_pack_is_computed_as_if_it_were_asked_alone(learner):
    for layer in learner.model.model.language_model.layers:  # new layers do nothing: give them something to do
        torch.nn.init.normal_(layer.self_attn.o_proj.weight, std=0.2)
        torch.nn.init.normal_(layer.mlp.down_proj.weight, std=0.2)
    model, processor = learner.model.eval(), learner.processor
    asked = [ask_many(5, i, number)[1] for i, number in ((3, 6), (4, 3))]
    shown = [ask_many(5, i, 0)[0] for i in (3, 4)]
    pixels = learner.pixels(shown)
    batch = learner.packing(asked)
    labels, owner = batch.pop("labels"), batch.pop("question")
    with torch.no_grad():
        packed = model(**batch, pixel_values=pixels).logits
        for b, questions in enumerate(asked):
            for number, question in enumerate(questions):
                prompt = llava_model.PROMPT.format(question=question.text)
                ids = processor(
                    images=[np.zeros((112, 112, 3), np.uint8)], text=[f"{prompt} {question.answer}"], return_tensors="pt"
                )["input_ids"]
                alone = model(input_ids=ids, pixel_values=pixels[b : b + 1]).logits[0]
                here = owner[b] == number
                assert_near(packed[b, here], alone[-int(here.sum()) :], steps=1000)
                told = labels[b, here]
                assert processor.decode(told[told != -100]) == f"{question.answer} [EOS]"


def test_what_ships_is_a_stock_model(run):
    folder = run / embedded.LLAVA
    weights = load_file(folder / "model.safetensors")
    assert all(value.dtype == torch.float16 for value in weights.values()) and "lm_head.weight" not in weights
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(folder)
    assert type(processor).__name__ == "LlavaProcessor"
    assert model.lm_head.weight is model.get_input_embeddings().weight
    data = EmbeddedQuestions("val", length=3)
    assert len(llava.answers(model, processor, data, batch=2)) == 3
    card = json.loads((folder / "card.json").read_text())
    assert {"recipe", "seed", "seconds", "loss_curve", "accuracy", "blind", "parameters"} <= set(card)
    assert card["steps"] == 4 and card["pictures"] == 8 and 12 <= card["questions"] <= 24
    columns, *rows = (run / "losses.csv").read_text().splitlines()
    assert columns.startswith("step,patch_colour,patch_shape,patch_place,answer,") and len(rows) == 4
    assert set(QUESTION_KINDS) <= set(columns.split(","))


def test_the_chat_template_gives_the_prompt_of_training(learner):
    parts = [{"type": "image"}, {"type": "text", "text": "how many objects are there?"}]
    chat = [{"role": "user", "content": parts}]
    prompt = llava_model.PROMPT.format(question="how many objects are there?")
    assert learner.processor.apply_chat_template(chat, add_generation_prompt=True) == prompt
    chat.append({"role": "assistant", "content": [{"type": "text", "text": "two"}]})
    assert learner.processor.apply_chat_template(chat).strip() == f"{prompt} two"


@pytest.mark.slow
def test_stopped_and_resumed_it_ends_with_the_same_bits(run, tmp_path):
    first = llava.LlavaLearner(config.load(written(tmp_path)))
    loop.train(first, tmp_path / "run", steps=2, checkpoint_every=2, quiet=True)
    training.run(written(tmp_path), resume=True, output=tmp_path / "run", quiet=True)
    whole, parts = (load_file(folder / embedded.LLAVA / "model.safetensors") for folder in (run, tmp_path / "run"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_layers_that_wait_stay_as_they_were(learner, tmp_path):
    before = {name: value.clone() for name, value in learner.model.state_dict().items()}
    learner.step(1)
    now = learner.model.state_dict()
    learned = {
        int(name.split(".")[3]) for name in now if "language_model.layers" in name and not torch.equal(now[name], before[name])
    }
    assert learned == {1, 3} and len(learner.model.model.language_model.layers) == 4
    with pytest.raises(UserError, match="phases"):
        learner.restore(llava.LlavaLearner(config.load(written(tmp_path, TINY.replace("steps: 2", "steps: 3")))).state())


def test_a_phase_has_its_own_learning_rate_and_its_own_kinds_of_questions(tmp_path):
    last = "- {steps: 3, batch: 2, questions: 4, kinds: [place], lr: [4e-3, 2e-3]}"
    settings = config.load(written(tmp_path, TINY.replace("phases:", "horizon: 4\nphases:") + f"  {last}\n"))
    assert [llava.rate_of(settings, i) for i in range(4)] == [settings.optimizer.rate(i, 4) for i in range(4)]
    assert [llava.rate_of(settings, i) for i in (4, 5, 6)] == pytest.approx([4e-3, 3e-3, 2e-3])
    shown, asked = llava.LlavaLearner(settings).draw(5)
    for scene, questions in zip(shown, asked, strict=True):
        things = {f"where is the {scenes.name_of(thing.pair)} in the picture?": thing for thing in scene.objects}
        assert {question.text for question in questions} == set(things)
        for question in questions:
            thing = things[question.text]
            dx, dy = thing.x - 56, thing.y - 56
            told = max([(-dx, "left"), (dx, "right"), (-dy, "above"), (dy, "below")])[1]
            assert question.answer == told


@pytest.mark.parametrize(
    "before, after, told",
    [
        ("layers: 2", "layers: 5", "no more than the 4 layers"),
        ("layers: 2", "kinds: [position]", "one object has no positions"),
        ("layers: 2", "kinds: [size]", "kinds"),
    ],
)
def test_phases_that_cannot_be_are_told(tmp_path, before, after, told):
    with pytest.raises(UserError, match=told):
        config.load(written(tmp_path, TINY.replace(before, after)))


def test_a_patch_tells_what_lies_there_and_where_it_lies(learner):
    """Tokens that are made of the right words' embeddings do it with little loss, others do not."""
    scene = scenes.several(0, 1, count=3)
    words = learner.model.get_input_embeddings().weight
    torch.nn.init.orthogonal_(words)
    one_word = learner.processor.tokenizer.convert_tokens_to_ids
    tokens = []
    for index, place in enumerate(scenes.cells(scene, llava_model.PATCH).ravel()):
        pair = scene.objects[place].pair if place >= 0 else ("background", "background")
        across, down = index % 14 / 14 - 0.46, index // 14 / 14 - 0.46
        sides = across * (words[one_word("right")] - words[one_word("left")])
        sides = sides + down * (words[one_word("below")] - words[one_word("above")])
        tokens.append(sum(words[one_word(word)] for word in pair) + sides / 2)
    right = torch.stack(tokens)[None]
    good, bad = learner.name_patches(right, [scene]), learner.name_patches(right.roll(70, 1), [scene])
    assert all(good[name] < 0.1 < 0.5 < bad[name] for name in ("patch_colour", "patch_shape"))
    assert 0.5 < good["patch_place"] < 0.56 < 0.6 < bad["patch_place"]


@pytest.mark.slow
def test_blind_answers_are_the_commonest():
    asked = [EmbeddedQuestions("val").ask(i)[1] for i in range(1000)]
    guessed = llava.accuracy(llava.blind_answers(asked, known=5000), asked)
    assert guessed["n"] == 1000 and 0.15 < guessed["accuracy"] < 0.36
    assert llava.accuracy([question.answer for question in asked], asked)["accuracy"] == 1.0
