"""The loop and the CLIP learner: stopped anywhere and resumed, a run ends with the same bits."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.paths import ROOT
from tests.support.rounding import assert_near
from tokensieve import config, training
from tokensieve.embedded import scenes
from tokensieve.embedded.recipes import clip
from tokensieve.errors import UserError
from tokensieve.training import checkpoint, loop
from tokensieve.training.muon import Muon, orthogonalize

TINY = """
task: clip
output: unused
threads: 1
workers: 0
checkpoint_every: 2
evaluate: false
optimizer: {lr: 1e-3, warmup: 2}
phases:
  - {steps: 3, batch: 4, canvas: 24, level: [0, 1]}
  - {steps: 3, batch: 4, canvas: 112, several: 0.5}
"""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def written(tmp_path, text=TINY):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def command(path, output, resume=False):
    call = f"training.run({str(path)!r}, {resume}, {str(output)!r}, True)"
    return [sys.executable, "-c", f"from tokensieve import training; {call}"]


def wait_for(path: Path, process: subprocess.Popen, seconds=300):
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, process.stderr.read()
        time.sleep(0.01)


@pytest.mark.slow
def test_the_result_is_weights_card_and_losses(tmp_path):
    out = training.run(written(tmp_path), output=tmp_path / "run", quiet=True)
    card = json.loads((out / "card.json").read_text())
    assert card["steps"] == 6 and card["pictures"] == 24 and card["loss_curve"][-1]["step"] == 5
    assert 1e6 < card["parameters"]["vision"] < 3e6
    assert (out / "scenes-v1.safetensors").stat().st_size < 10e6
    assert (out / "losses.csv").read_text().startswith("step,pair,shape,colour,acc")


@pytest.mark.slow  # quick tests of the same: test_loop.py
def test_killed_and_resumed_ends_with_the_same_bits(tmp_path):
    path = written(tmp_path)
    whole = training.run(path, output=tmp_path / "whole", quiet=True)
    with_worker = written(tmp_path, TINY.replace("workers: 0", "workers: 1"))
    broken = tmp_path / "broken"
    process = subprocess.Popen(command(with_worker, broken), stderr=subprocess.PIPE, text=True)
    wait_for(broken / "checkpoints" / "step-00000002", process)
    process.kill()
    process.communicate()
    found, _ = checkpoint.latest(broken / "checkpoints")
    assert found is not None and found.step > 0
    training.run(path, resume=True, output=broken, quiet=True)
    for name in ("scenes-v1.safetensors", "logs/log.jsonl"):
        assert (whole / name).read_bytes() == (broken / name).read_bytes()
    last, _ = checkpoint.latest(whole / "checkpoints")
    again, _ = checkpoint.latest(broken / "checkpoints")
    assert last is not None and again is not None and last.step == again.step == 6
    for part in ("muon", "adamw"):
        one, other = last.state["learner"][part]["state"], again.state["learner"][part]["state"]
        for key, state in one.items():
            assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(other[key][name])) for name, value in state.items())


@pytest.mark.slow  # quick tests of the same: test_loop.py
def test_told_to_stop_it_saves_says_where_and_exits(tmp_path):
    path = written(tmp_path, TINY.replace("steps: 3", "steps: 10000").replace("workers: 0", "workers: 1"))
    process = subprocess.Popen(command(path, tmp_path / "run"), stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for(tmp_path / "run" / "checkpoints" / "step-00000002", process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal and `timeout` do: the workers are meant too
    _, told = process.communicate(timeout=300)
    assert process.returncode == 130
    found, broken = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert found is not None and not broken and str(found.folder) in told and "--resume" in told
    assert "Traceback" not in told


@pytest.mark.slow
def test_a_crash_does_not_wait_for_the_workers(tmp_path):
    path = written(tmp_path, TINY.replace("workers: 0", "workers: 1"))
    crash = "from tokensieve.training import checkpoint; checkpoint.save = None; "
    *python, call = command(path, tmp_path / "run")
    ended = subprocess.run([*python, crash + call], stderr=subprocess.PIPE, text=True, timeout=300)
    assert ended.returncode == 1 and "TypeError" in ended.stderr


class Stub:
    """A learner of nothing: counts, and returns the losses it was given."""

    def __init__(self, losses=()):
        self.losses, self.count = losses, 0

    def step(self, index):
        self.count += 1
        return {"loss": self.losses[index] if self.losses else float(np.random.rand())}

    def state(self):
        return {"count": self.count}

    def restore(self, state):
        self.count = state["count"]


def test_the_loop_knows_nothing_of_what_is_learned(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # there are no bars elsewhere
    loop.train(Stub(), tmp_path, steps=5, checkpoint_every=2)
    found, _ = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None and found.step == 5 and found.state["learner"] == {"count": 5}
    assert "loss" in capsys.readouterr().err


def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(tmp_path):
    with pytest.raises(UserError, match="step 3"):
        loop.train(Stub([1.0, 1.0, 1.0, float("nan")]), tmp_path, steps=4, checkpoint_every=1, quiet=True)
    found, _ = checkpoint.latest(tmp_path / "checkpoints")
    assert found is not None and found.step == 3


def test_a_run_is_not_overwritten_unasked(tmp_path):
    loop.train(Stub(), tmp_path, steps=2, checkpoint_every=1, quiet=True)
    with pytest.raises(UserError, match="--resume"):
        loop.train(Stub(), tmp_path, steps=2, checkpoint_every=1, quiet=True)


def test_resuming_passes_over_a_broken_checkpoint_and_mends_the_log(tmp_path, capsys):
    np.random.seed(0)
    loop.train(Stub(), tmp_path, steps=4, checkpoint_every=1, quiet=True)
    before = (tmp_path / "logs" / "log.jsonl").read_text()
    (tmp_path / "checkpoints" / "step-00000004" / "state.json").write_text("{")
    with (tmp_path / "logs" / "log.jsonl").open("a") as log:
        log.write('{"step": 9')  # torn
    learner = Stub()
    loop.train(learner, tmp_path, steps=4, checkpoint_every=1, resume=True, quiet=True)
    assert "step-00000004" in capsys.readouterr().err
    assert learner.count == 4
    assert (tmp_path / "logs" / "log.jsonl").read_text() == before  # the generators went on where they were


def test_a_run_is_not_resumed_with_another_recipe(tmp_path):
    learner = clip.ClipLearner(config.load(written(tmp_path)))
    other = clip.ClipLearner(config.load(written(tmp_path, TINY.replace("lr: 1e-3", "lr: 2e-3"))))
    with pytest.raises(UserError, match="optimizer"):
        other.restore(learner.state())


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output"):
        loop.train(Stub(), tmp_path / "file" / "run", steps=1, checkpoint_every=1, quiet=True)


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(UserError, match="no space left"):
        loop.train(Stub(), tmp_path, steps=1, checkpoint_every=1, quiet=True)


def test_when_no_checkpoint_is_whole_it_says_so(tmp_path):
    loop.train(Stub(), tmp_path, steps=1, checkpoint_every=1, quiet=True)
    (tmp_path / "checkpoints" / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(UserError, match="no intact checkpoint"):
        loop.train(Stub(), tmp_path, steps=1, checkpoint_every=1, resume=True, quiet=True)


def test_no_training_batch_shows_a_held_out_pair(tmp_path):
    batches = clip.Batches(config.load(written(tmp_path)), start=0)
    for i in range(len(batches)):
        batch = batches[i]
        assert all(scenes.SEEN[pair] not in scenes.HELD_OUT for pair in batch["pairs"])
        for held in scenes.HELD_OUT:
            assert not any(scenes.name_of(held) in caption for caption in batch["captions"])
    assert all(scenes.name_of(pair) not in clip._PAIR_NAMES for pair in scenes.HELD_OUT)


def test_a_batch_depends_on_its_step_alone(tmp_path):
    settings = config.load(written(tmp_path))
    assert torch.equal(clip.Batches(settings, 0)[4]["images"], clip.Batches(settings, 3)[1]["images"])


def test_a_window_holds_the_object():
    rng = np.random.default_rng(0)
    for i in range(50):
        scene = scenes.single(0, i, scenes.PAIRS[i], scenes.Difficulty(0.0))
        (thing,) = scene.objects
        marked = np.zeros((112, 112, 3), np.uint8)
        y, x = np.mgrid[0:112, 0:112] + 0.5
        marked[np.hypot(x - thing.x, y - thing.y) < thing.size / 2 - 1] = 1
        assert clip.window(marked, thing, 64, rng).sum() == marked.sum()


def test_a_window_at_full_size_is_the_models_own_forward(tmp_path):
    learner = clip.ClipLearner(config.load(written(tmp_path)))
    visual, pixels = learner.model.visual.eval(), torch.randn(2, 3, 112, 112)
    with torch.no_grad():
        assert torch.equal(clip.encode_window(visual, pixels, (0, 0)), visual(pixels))
        assert clip.encode_window(visual, pixels[..., :24, :24], (3, 5)).shape == (2, 128)


def test_texts_without_their_padding_have_the_same_features(tmp_path):
    learner = clip.ClipLearner(config.load(written(tmp_path)))
    tokens = learner.tokenizer(["a red circle", "there is a blue star here"])
    with torch.no_grad():
        full = learner.model.eval().encode_text(tokens, normalize=True)
        assert_near(clip.encode_words(learner.model, tokens), full, steps=1000)


def test_contrast_is_lowest_when_each_picture_is_next_to_its_caption():
    target = torch.tensor([0, 0, 2])
    right = 30 * torch.nn.functional.one_hot(target, 4).float()
    assert clip.contrast(right, target) < 0.25 < clip.contrast(right.roll(1, 1), target)


def test_muon_makes_updates_orthogonal_and_goes_downhill():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(3, 16, 48)))
    assert values.min() > 0.5 and values.max() < 1.5
    weight, goal = torch.nn.Parameter(torch.zeros(48, 16)), torch.randn(48, 16)
    optimizer = Muon([weight], lr=0.05)
    first = (weight - goal).square().mean().item()
    for _ in range(120):
        optimizer.zero_grad()
        loss = (weight - goal).square().mean()
        loss.backward()
        optimizer.step()
    assert loss.item() < first / 4


def test_a_number_like_1e_3_is_a_number(tmp_path):
    assert config.load(written(tmp_path)).optimizer.lr == 0.001


def test_the_shipped_configuration_is_valid():
    settings = config.load(ROOT / "configs" / "embedded_clip.yaml")
    assert settings.phases[-1].canvas == 112 and settings.phases[-1].level == (1.0, 1.0)


def test_all_mistakes_are_told_at_once_with_the_nearest_key(tmp_path):
    wrong = TINY.replace("lr: 1e-3", "lr: fast").replace("canvas: 24", "canvass: 24").replace("threads: 1", "threads: 0")
    with pytest.raises(UserError) as caught:
        config.load(written(tmp_path, wrong))
    told = str(caught.value)
    assert "\n" not in told
    assert "optimizer.lr" in told and "'fast'" in told
    assert "canvass" in told and "Did you mean 'canvas'?" in told
    assert "threads" in told


@pytest.mark.parametrize(
    "text, told",
    [
        ("task: clip\noutput: x\nphases: [{steps: 1}]", "optimizer.warmup: 100 is not less than the 1 steps"),
        ("", "expected keys and values"),
        ("[1, 2]", "expected keys and values"),
        ("task: [", "not valid YAML"),
        ("task: clp", "Did you mean 'clip'?"),
        ("task: clip\noutput: x\nphases: []", "phases"),
        ("task: clip\noutput: x", "phases: missing"),
        ("task: clip\noutput: x\nphases: [{steps: 1, canvas: 50}]", "multiple of 8"),
        ("task: clip\noutput: x\nphases: [{steps: 1, canvas: 56, several: 0.5}]", "needs canvas: 112"),
        ("task: clip\noutput: x\nphases: [{steps: 1}]\noptimizer: {lr: .nan}", "optimizer.lr"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, text, told):
    with pytest.raises(UserError) as caught:
        config.load(written(tmp_path, text))
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there():
    with pytest.raises(UserError, match="no file"):
        config.load("nowhere.yaml")
