"""The CoCa learner: the tower stays as it was, the rest learns, and a run that was stopped ends with the same bits."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tokensieve import config, embedded, training
from tokensieve.embedded.datasets import EmbeddedCaptions
from tokensieve.embedded.recipes import captions
from tokensieve.embedded.scene_texts import captions as scene_captions
from tokensieve.errors import UserError
from tokensieve.training import loop

TINY = """
task: captions
output: unused
threads: 1
checkpoint_every: 2
evaluate: false
pictures: 8
batch: 4
steps: 4
optimizer: {lr: 1e-3, warmup: 2}
"""


def written(folder, text=TINY):
    path = folder / "config.yaml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run of four steps."""
    folder = tmp_path_factory.mktemp("captions")
    before = torch.get_num_threads()
    training.run(written(folder), output=folder / "run", quiet=True)
    torch.set_num_threads(before)
    return folder / "run"


def test_what_ships_is_written(run):
    weights = load_file(run / "captions-v1.safetensors")
    clip = load_file(embedded.weights_path())
    assert all(value.dtype == torch.float16 for value in weights.values())
    for name, value in clip.items():
        if name.startswith("visual."):
            assert torch.equal(weights[name], value.half())  # frozen
    assert not torch.equal(weights["text.token_embedding.weight"], clip["token_embedding.weight"].half())
    assert (run / "captions-v1.safetensors").stat().st_size < 10e6
    card = json.loads((run / "captions-v1.card.json").read_text())
    assert {"recipe", "seed", "seconds", "loss_curve", "accuracy", "parameters"} <= set(card)
    assert (run / "losses.csv").read_text().splitlines()[0] == "step,caption,contrast"


@pytest.mark.slow
def test_stopped_and_resumed_it_ends_with_the_same_bits(run, tmp_path):
    settings = config.load(written(tmp_path))
    first = captions.CaptionLearner(settings)
    loop.train(first, tmp_path / "run", steps=2, checkpoint_every=2, quiet=True)
    training.run(written(tmp_path), resume=True, output=tmp_path / "run", quiet=True)
    whole, parts = (load_file(folder / "captions-v1.safetensors") for folder in (run, tmp_path / "run"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_every_trained_parameter_gets_a_gradient(tmp_path):
    learner = captions.CaptionLearner(config.load(written(tmp_path)))
    assert not any(parameter.requires_grad for parameter in learner.model.visual.parameters())
    learner.step(0)
    missing = [name for name, p in learner.model.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []
    with pytest.raises(UserError, match="steps"):
        learner.restore(captions.CaptionLearner(config.load(written(tmp_path, TINY.replace("steps: 4", "steps: 5")))).state())


def test_a_batch_takes_pictures_in_turn_with_captions_that_are_true_of_them(tmp_path):
    learner = captions.CaptionLearner(config.load(written(tmp_path)))
    latents = torch.cat([learner._batch(step)[0] for step in (0, 1)])
    every = torch.stack([learner.pictures[i][0] for i in range(8)])
    assert sorted(latents[:, 0].tolist()) == sorted(every[:, 0].tolist())  # an epoch is every picture once
    again = learner._batch(0)
    assert all(torch.equal(a, b) for a, b in zip(again, learner._batch(0), strict=True))
    data = EmbeddedCaptions("train", length=8)
    allowed = learner.tokenizer([text for i in range(8) for text in scene_captions(data.scene(i))]).tolist()
    assert all(row in allowed for row in again[2].tolist())


def test_quality_of_a_model_that_tells_the_truth(monkeypatch):
    model = SimpleNamespace(visual=SimpleNamespace(preprocess_cfg={"mean": (0.5,) * 3, "std": (0.5,) * 3}))
    told = iter([scene_captions(EmbeddedCaptions("val").scene(i))[-1] for i in range(50)])
    monkeypatch.setattr(captions, "EmbeddedCaptions", lambda split: EmbeddedCaptions(split, length=50))
    monkeypatch.setattr(captions, "write", lambda model, images, words: [None] * len(images))
    words = SimpleNamespace(text=lambda ids: next(told))
    found = captions.quality(model, words, "val")
    assert (found["exact"], found["objects"], found["places"], found["n"]) == (1, 1, 1, 50)
    told = iter(["a red circle"] * 50)
    found = captions.quality(model, words, "val")
    assert found["exact"] == 0 and found["objects"] < 0.1 and found["places"] == 0


def test_a_batch_larger_than_the_pictures_is_told(tmp_path):
    with pytest.raises(UserError, match="more than the 3 pictures"):
        config.load(written(tmp_path, TINY.replace("pictures: 8", "pictures: 3")))
