"""What ships: the data set's splits, and a CLIP that takes open_clip's ordinary path, offline."""

import json
from collections import Counter

import numpy as np
import open_clip
import pytest
import torch

from tests.support.caption_tasks import stock_generate
from tokensieve import embedded
from tokensieve.embedded import scenes
from tokensieve.embedded.datasets import (
    TEMPLATES,
    EmbeddedCaptions,
    EmbeddedQuestions,
    EmbeddedScenes,
    EmbeddedSelection,
    split_seed,
)
from tokensieve.embedded.recipes import tokenizer as embedded_tokenizer
from tokensieve.embedded.scene_texts import QUESTION_KINDS, ask, caption
from tokensieve.errors import UserError
from tokensieve.models.loading import load
from tokensieve.tasks.captioning.beam_search import CaptionTokenizer, write


@pytest.fixture(scope="module")
def clip():
    embedded.register()
    path = str(embedded.weights_path(embedded.PRETRAINED))
    model, _, preprocess = open_clip.create_model_and_transforms(embedded.MODEL, pretrained=path)
    return model.eval(), preprocess, open_clip.get_tokenizer(embedded.MODEL)


@pytest.mark.parametrize("pairs, length, kinds", [("seen", 4000, 68), ("heldout", 2000, 12)])
def test_the_test_split_is_balanced_and_never_mixes_seen_and_held_out(pairs, length, kinds):
    data = EmbeddedScenes("test", pairs)
    assert len(data) == length and len(data.classes) == 80
    counts = Counter(data.scene(i).objects[0].pair for i in range(0, length))
    assert len(counts) == kinds and max(counts.values()) - min(counts.values()) <= 1
    assert set(counts) == set(scenes.SEEN if pairs == "seen" else scenes.HELD_OUT)


def test_labels_name_what_is_drawn():
    data = EmbeddedScenes("val")
    for i in range(0, 200, 7):
        _, label = data[i]
        assert data.classes[label] == scenes.name_of(data.scene(i).objects[0].pair)
    assert all("{c}" in template for template in data.templates)


def test_splits_share_no_scene():
    seeds = [split_seed("val"), split_seed("test"), *(split_seed("train", run) for run in range(50))]
    assert len(set(seeds)) == len(seeds)
    test, held = EmbeddedScenes("test"), EmbeddedScenes("test", "heldout")
    splits = (test, held, EmbeddedScenes("val"), EmbeddedScenes("train"))
    grounds = [data.scene(i).ground_seed for data in splits for i in range(300)]
    assert len(set(grounds)) == len(grounds)


def test_a_sample_is_a_picture_or_what_the_transform_makes_of_it():
    data = EmbeddedScenes("val", transform=lambda image: np.asarray(image).shape)
    assert data[0][0] == (112, 112, 3)
    assert EmbeddedScenes("val")[0][0].size == (112, 112)
    with pytest.raises(IndexError):
        data[len(data)]


@pytest.mark.parametrize(
    "split, pairs, told", [("tset", "seen", "'test'"), ("train", "heldout", "never"), ("val", "all", "allowed")]
)
def test_what_does_not_exist_is_told(split, pairs, told):
    with pytest.raises(UserError, match=told):
        EmbeddedScenes(split, pairs)


def test_captions_and_questions():
    data = EmbeddedCaptions("test")
    image, captions = data[3]
    assert image.size == (112, 112) and len(captions) == len(data.scene(3).objects) == len(set(captions))
    assert len(data) >= 1000 and list(np.asarray(data[3][0]).flat) == list(np.asarray(image).flat)
    train = EmbeddedCaptions("train")
    assert all(t.pair in scenes.SEEN for i in range(50) for t in train.scene(i).objects)
    image, question = EmbeddedQuestions("test")[3]
    assert image.size == (112, 112) and question.answer in question.answers


@pytest.mark.parametrize(
    "split, pairs, told", [("train", "all", "never"), ("val", "heldout", "allowed"), ("tset", "seen", "test")]
)
def test_questions_that_do_not_exist_are_told(split, pairs, told):
    with pytest.raises(UserError, match=told):
        EmbeddedQuestions(split, pairs)


def test_questions_are_of_seen_pairs_or_of_all():
    pairs = {}
    for name in ("seen", "all"):
        data = EmbeddedQuestions("test", name, length=200)
        pairs[name] = {thing.pair for i in range(len(data)) for thing in data.ask(i)[0].objects}
        assert Counter(data.ask(i)[1].kind for i in range(len(data))) == dict.fromkeys(QUESTION_KINDS, 40)
    assert pairs["seen"] <= set(scenes.SEEN) and pairs["all"] & set(scenes.HELD_OUT)


def test_selection_has_two_pictures_and_a_caption_for_each():
    data = EmbeddedSelection("test", transform=lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1))
    images, captions = data[4]
    assert images.shape == (2, 3, 112, 112) and captions == [caption(scene) for scene in data.scenes(4)]
    assert torch.equal(data[4][0], images) and not torch.equal(images[0], images[1])
    assert len(data) >= 1000
    with pytest.raises(IndexError):
        data[len(data)]
    train = EmbeddedSelection("train")
    assert all(t.pair in scenes.SEEN for i in range(60) for scene in train.scenes(i) for t in scene.objects)


def test_registering_twice_is_registering_once():
    embedded.register()
    embedded.register()
    assert all(open_clip.list_models().count(model) == 1 for model in embedded.MODELS)
    assert embedded.default_weights("sieve-coca-8") == "captions-v1" and embedded.default_weights("ViT-B-32") == "scenes-v1"


def test_the_model_loads_through_open_clip_and_is_small(clip):
    model, preprocess, tokenizer = clip
    assert isinstance(model, open_clip.CLIP)
    assert model.visual.grid_size == (14, 14)
    assert 1e6 <= sum(p.numel() for p in model.visual.parameters()) <= 3e6
    assert embedded.weights_path().stat().st_size < 10e6
    image, _ = EmbeddedScenes("val")[0]
    with torch.no_grad():
        assert model.encode_image(preprocess(image)[None]).shape == (1, 128)
        assert model.encode_text(tokenizer(["a red circle"])).shape == (1, 128)


def test_it_knows_what_it_was_taught(clip):
    model, preprocess, tokenizer = clip
    data = EmbeddedScenes("val", transform=preprocess)
    images, labels = zip(*(data[i] for i in range(68)), strict=True)
    with torch.no_grad():
        prompts = [[t.format(c=name) for t in TEMPLATES] for name in data.classes]
        words = torch.stack([model.encode_text(tokenizer(texts), normalize=True).mean(0) for texts in prompts])
        guess = (model.encode_image(torch.stack(images)) @ words.T).argmax(1)
    assert (guess == torch.tensor(labels)).float().mean() > 0.8


def test_the_card_tells_how_it_was_made():
    card = embedded.card()
    assert {"recipe", "seed", "seconds", "loss_curve", "accuracy", "parameters"} <= set(card)
    assert card["accuracy"]["test/seen"]["n"] == 4000 and card["accuracy"]["test/heldout"]["n"] == 2000


@pytest.fixture(scope="module")
def coca():
    return load(embedded.CAPTIONER, embedded.CAPTIONER_PRETRAINED)


def test_the_captioner_is_open_clips_coca_on_the_clips_own_tower(coca, clip):
    assert isinstance(coca.model, open_clip.CoCa)
    assert embedded.weights_path(embedded.CAPTIONER_PRETRAINED).stat().st_size < 10e6
    ours, theirs = coca.model.visual.state_dict(), clip[0].visual.state_dict()
    assert all(torch.equal(ours[name], value.half().float()) for name, value in theirs.items())
    card = embedded.card(embedded.CAPTIONER_PRETRAINED)
    assert {"recipe", "seed", "seconds", "loss_curve", "accuracy", "parameters"} <= set(card)
    assert card["accuracy"]["test"]["n"] == 1000


@pytest.mark.slow
@torch.inference_mode()
def test_the_captioner_tells_what_is_there(coca):
    data = EmbeddedCaptions("val", transform=coca.transform)
    images = torch.stack([data[i][0] for i in range(24)])
    words = CaptionTokenizer.of(coca.tokenizer)
    told = [words.text(ids) for ids in write(coca.model, images, words)]
    assert all(word in embedded_tokenizer.WORDS for text in told for word in text.split())
    shown = [thing for i in range(24) for thing in data.scene(i).objects]
    named = [thing for i in range(24) for thing in data.scene(i).objects if scenes.name_of(thing.pair) in told[i]]
    assert len(named) / len(shown) > 0.4
    with stock_generate():  # open_clip's own code, told of this tokenizer's tokens, writes the same
        ids = coca.model.generate(images[:4], sot_token_id=words.start, eos_token_id=words.end, seq_len=24)
    assert [words.text(row) for row in ids.tolist()] == told[:4]


@pytest.mark.parametrize(
    "text", ["", " ", "a red circle", "zürich 中文 🙂", "a" * 1000, "word " * 200, "\x00\t\n", "[EOS] [PAD]"]
)
def test_any_string_can_be_encoded_and_ends_with_the_token_that_is_read(text):
    embedded.register()
    tokens = open_clip.get_tokenizer(embedded.MODEL)([text])
    end = len(embedded_tokenizer.WORDS) + 3
    assert tokens.shape == (1, 24)
    assert tokens.max() == end and tokens[0, 0] == 2


def test_every_word_that_scenes_use_is_known(tmp_path):
    embedded.register()
    tokenizer = open_clip.get_tokenizer(embedded.MODEL)
    texts = [t.format(c=scenes.name_of(pair)) for t in TEMPLATES for pair in scenes.PAIRS]
    texts += [caption(scenes.several(0, i)) for i in range(200)]
    for i in range(100):
        _, question = ask(0, i)
        texts += [question.text, *question.answers]
    tokens = tokenizer(texts)
    assert not (tokens == 1).any()
    assert (tokens[:, -1] != len(embedded_tokenizer.WORDS) + 3).all() or (tokens == 0).any(1).all()  # none was cut short


def test_the_tokenizer_can_be_written_again(tmp_path):
    embedded_tokenizer.write(tmp_path)
    shipped = embedded.weights_path().parent / "tokenizer"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((shipped / name).read_text())


def test_unknown_weights_are_told():
    with pytest.raises(UserError, match="scenes-v1"):
        embedded.weights_path("scenes-v2")
