"""S5's training: losses against loops, what moves, what is chosen and written, resuming, processes, modalities and plans."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

import tokensieve
from tests.support.processes import two_processes
from tests.support.reid_worker import learner, settings
from tokensieve import UserError, training
from tokensieve.cli import main
from tokensieve.models.loading import timm as load_timm
from tokensieve.reid import loading
from tokensieve.reid import losses as reid_losses
from tokensieve.reid import training as reid_training
from tokensieve.reid.config import ReidTraining
from tokensieve.reid.training import ReidLearner
from tokensieve.training import checkpoint
from tokensieve.training.processes import start_accelerator


def same(some, others):
    return all(torch.equal(value, others[name]) for name, value in some.items())


def slow_triplet(features, labels):
    """By the definition, a pair at a time, in float64."""
    points, losses = features.double().tolist(), []
    for a, anchor in enumerate(points):
        distance = [sum((x - y) ** 2 for x, y in zip(anchor, other, strict=True)) ** 0.5 for other in points]
        mine = [d for d, label in zip(distance, labels.tolist(), strict=True) if label == labels[a]]
        others = [d for d, label in zip(distance, labels.tolist(), strict=True) if label != labels[a]]
        if others:
            losses.append(np.logaddexp(0, max(mine) - min(others)))
    return float(np.mean(losses)) if losses else 0.0


@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 2, 2], [0, 1, 2, 3, 3, 3], [5, 5, 5, 5, 5, 2], [1] * 6], ids=str)
def test_triplets_are_the_hardest_ones_with_a_soft_margin(labels):
    torch.manual_seed(1)
    features, labels = 3 * torch.randn(6, 7), torch.tensor(labels)
    assert float(reid_losses.hard_triplet(features, labels)) == pytest.approx(
        slow_triplet(features, labels), rel=1e-4, abs=1e-6
    )


def test_the_slope_of_triplets_is_that_of_the_definition():
    torch.manual_seed(2)
    features, labels = torch.randn(8, 5, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    found = features.float().requires_grad_()
    reid_losses.hard_triplet(found, labels).backward()
    step = 1e-5
    for place in ((0, 0), (3, 2), (7, 4)):
        moved = [features.clone(), features.clone()]
        moved[0][place] += step
        moved[1][place] -= step
        slope = (slow_triplet(moved[0], labels) - slow_triplet(moved[1], labels)) / (2 * step)
        assert float(found.grad[place]) == pytest.approx(slope, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
def test_gradients_are_finite_where_features_coincide(scale):
    features = (scale * torch.ones(6, 4)).requires_grad_()
    loss = reid_losses.hard_triplet(features, torch.tensor([0, 0, 1, 1, 2, 2]))
    loss.backward()
    # |a|^2 + |b|^2 - 2 ab of equal vectors is 0 but for rounding, of which the distance is the root
    rounding = (8 * torch.finfo(torch.float32).eps * 4 * scale**2) ** 0.5
    assert loss.item() == pytest.approx(np.log(2), abs=1e-3 + rounding) and bool(features.grad.isfinite().all())


def test_the_identity_is_smoothed():
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 4), torch.tensor([0, 3, 1, 1, 2])
    log = logits.double().log_softmax(1)
    wanted = [-(0.9 * log[i, label] + 0.1 * log[i].mean()) for i, label in enumerate(labels.tolist())]
    assert float(reid_losses.identity(logits, labels, 0.1)) == pytest.approx(float(sum(wanted)) / 5, rel=1e-5)


def test_every_weight_learns_with_its_own_rate_and_all_is_told(root):
    made = learner(root)
    assert (made.batches.steps_per_epoch, made.steps, made.warmup) == (3, 12, 3)
    assert (made.checkpoint_every, made.evaluate_every) == (3, 6) and str(made.handle.plan) == "sdtps@out"
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    told = made.step(0)
    assert list(told) == ["loss", "ce_plain", "triplet_plain", "ce_tokens", "triplet_tokens", "accuracy"]
    factors = {"plain": 1.0, "tokens": 2.0}  # SDTPS_LOSS_WEIGHT
    wanted = sum(factor * (0.25 * told[f"ce_{branch}"] + told[f"triplet_{branch}"]) for branch, factor in factors.items())
    assert told["loss"] == pytest.approx(wanted, rel=1e-5)
    for name, parameter in made.model.named_parameters():
        assert not parameter.requires_grad or parameter.grad.abs().max() > 0, name
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
    backbone, new = made.optimizer.param_groups
    assert backbone["lr"] == pytest.approx(0.34 * 1e-3) and new["lr"] == pytest.approx(0.34 * 2e-3)
    assert len(backbone["params"]) + len(new["params"]) == sum(p.requires_grad for p in made.model.parameters())
    assert {id(p) for p in backbone["params"]} == {id(p) for p in made.model.backbones.parameters()}
    assert made.model.training and bool((made.model.branches["plain"].neck["RGB"].running_mean != 0).any())


def test_weights_of_the_losses_are_the_file_s(root):
    weights = {"ID_LOSS_WEIGHT": 2.0, "TRIPLET_LOSS_WEIGHT": 0.0, "LABEL_SMOOTH": 0.0, "SDTPS_LOSS_WEIGHT": 3.0}
    told = learner(root, model=weights).step(0)
    assert told["loss"] == pytest.approx(2 * (told["ce_plain"] + 3 * told["ce_tokens"]), rel=1e-5)


@pytest.fixture(scope="module")
def uncut(root, tmp_path_factory):
    """The folder of a training without a plan."""
    folder = tmp_path_factory.mktemp("uncut")
    loading.save(learner(root, model={"USE_SDTPS": False}).model, folder)
    return folder


def slow_imitation(features, wanted):
    """sum |s - t|^2 / sum |t - mean t|^2 of unit vectors, object by object in float64."""
    units = [[row / row.norm() for row in rows.double()] for rows in (features, wanted)]
    mean = sum(units[1]) / len(units[1])
    far = sum(float((s - t).square().sum()) for s, t in zip(*units, strict=True))
    return far / sum(float((t - mean).square().sum()) for t in units[1])


def test_a_teacher_s_features_are_imitated(root, uncut):
    """The distance from what the teacher gives for the same images with all tokens; alone it is enough to learn."""
    only = {"ID_LOSS_WEIGHT": 0.0, "TRIPLET_LOSS_WEIGHT": 0.0, "TEACHER": str(uncut), "TEACHER_LOSS_WEIGHT": 4.0}
    made = learner(root, model={"PLAN": "sdtps@1(aggregation=merge)", **only})
    images, _, _ = made._batches_from(0, 1)[0]
    teacher = loading.read(str(uncut))
    with torch.no_grad():
        wanted = teacher.features(images)
        with made.handle, made.handle.call(samples=torch.arange(8)):
            found = made.model.features(images)
    losses = {branch: slow_imitation(found[branch], wanted[branch]) for branch in wanted}
    before = {name: value.clone() for name, value in made.model.backbones.state_dict().items()}
    told = made.step(0)
    for branch, loss in losses.items():
        assert told[f"teacher_{branch}"] == pytest.approx(loss, rel=1e-2)
    assert told["loss"] == pytest.approx(4 * sum(losses.values()), rel=1e-2)
    assert not same(before, made.model.backbones.state_dict())
    assert "distance from the features of" in " ".join(made.objectives)
    assert same(made.teacher.state_dict(), teacher.state_dict())  # it does not learn


def test_a_training_starts_from_an_earlier_one(root, uncut):
    """Everything that both have; the weights of SDTPS are new."""
    earlier = loading.read(str(uncut)).state_dict()
    made = learner(root, model={"INIT_FROM": str(uncut), "PLAN": "sdtps@1(aggregation=merge)"}).model.state_dict()
    assert all(torch.equal(made[name], value) for name, value in earlier.items())
    assert {name.split(".")[0] for name in set(made) - set(earlier)} == {"parts"}
    other = learner(root, model={"INIT_FROM": str(uncut)}, DATASETS=data_of(root, 4)).model.state_dict()
    assert torch.equal(other["camera"], earlier["camera"])
    name = "branches.plain.classifier.weight"  # of other identities
    assert other[name].shape != earlier[name].shape


def data_of(root, val_identities):
    return {"NAMES": "RGBNT201", "ROOT_DIR": str(root), "VAL_IDENTITIES": val_identities}


def test_a_teacher_or_a_start_that_does_not_fit_is_told(root, uncut):
    for key, told in (("TEACHER", "TEACHER: no/such is no folder"), ("INIT_FROM", "INIT_FROM: no/such is no folder")):
        with pytest.raises(UserError, match=told):
            learner(root, model={key: "no/such"})
    with pytest.raises(UserError, match=r"TEACHER: .*: its modalities are \('RGB', 'NI', 'TI'\), this model's \('RGB',\)"):
        learner(root, model={"TEACHER": str(uncut), "MODALITIES": ["RGB"]})
    wide = {"patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 2}
    with pytest.raises(UserError, match=r"INIT_FROM: .* is \(.*32.*\), not \(.*48.*\); train from a model with"):
        learner(root, model={"INIT_FROM": str(uncut), "ARGUMENTS": wide})


def test_gradients_are_clipped_where_it_is_asked(root):
    for clip, small in ((None, False), (1e-3, True)):
        made = learner(root, how={"CLIP": clip})
        made.step(0)
        norm = torch.stack([p.grad.norm() for p in made.model.parameters() if p.grad is not None]).norm()
        assert (norm < 1.1e-3) == small


def test_every_object_of_a_run_has_noise_of_its_own(root):
    made = learner(root, model={"PLAN": "random@out:5"})
    seen = []
    for step in range(3):
        made.step(step)
        seen += (made.handle.samples.view(3, -1)[0] // 3).tolist()  # objects, of three images each
        assert made.handle.kept.shape == (3 * 8, 5)
    assert seen == list(range(24))
    made.evaluate(3)
    kept = made.handle.kept.clone()
    made.evaluate(3)
    assert torch.equal(kept, made.handle.kept) and made.model.training


@pytest.mark.parametrize(
    "model, loader",
    [
        ({"MODALITIES": ["RGB"]}, {}),
        ({"MODALITIES": ["RGB", "TI"]}, {}),
        ({"SHARED_BACKBONE": False}, {}),
        ({"SDTPS_USE_GUMBEL": True}, {}),
        ({"PLAN": "sdtps@1"}, {}),
        ({"PLAN": "sdtps@1(aggregation=merge)"}, {}),
        ({"USE_SDTPS": False, "SIE_CAMERA": False}, {}),
        ({}, {"DROP_MODALITY": 0.6}),
    ],
    ids=["one modality", "two", "separate backbones", "gumbel", "inside the tower", "merge", "no plan", "modalities missing"],
)
def test_every_kind_of_model_learns_and_is_measured(root, model, loader):
    made = learner(root, model=model, loader=loader)
    for step in range(3):
        assert np.isfinite(made.step(step)["loss"])
    gradients = {name: p.grad for name, p in made.model.named_parameters() if p.requires_grad}
    if "DROP_MODALITY" not in loader:
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients.values())
    told = made.evaluate(3)
    assert 0 < told["mAP"] <= 1 and told["queries"] == 12 and told["unreadable"] == 0
    left = {"PLAN": 1, "USE_SDTPS": 0}
    assert len(made.handle.ledger) == left.get(next(iter(model), ""), 1)
    assert all(row.tokens_out == 7 for row in made.handle.ledger)


def test_validation_is_by_loops_what_it_says(root):
    """mAP by a slow ranking of the exported features."""
    made = learner(root)
    made.step(0)
    told, pairs = made.evaluate(1), made._encode()
    shots = [made.val_data.shots[number] for number, _ in pairs]
    features = [feature.double() / feature.double().norm() for _, feature in pairs]
    precisions, first = [], []
    for query, shot in zip(features, shots, strict=True):
        others = [
            (float((query - feature).square().sum()), other.pid == shot.pid)
            for feature, other in zip(features, shots, strict=True)
            if not (other.pid == shot.pid and other.camera == shot.camera)
        ]
        right = [correct for _, correct in sorted(others, key=lambda pair: pair[0])]
        places = [place for place, correct in enumerate(right, 1) if correct]
        precisions.append(np.mean([number / place for number, place in enumerate(places, 1)]))
        first.append(right[0])
    assert told["mAP"] == pytest.approx(np.mean(precisions)) and told["rank_1"] == pytest.approx(np.mean(first))
    train = {made.train_data.pids[label] for label in range(len(made.train_data.pids))}
    assert not train & {shot.pid for shot in shots} and made.model.settings.identities == 6


def write(tmp_path, made):
    path = tmp_path / "my file.yml"
    path.write_text(yaml.safe_dump(made))
    return path


@pytest.mark.slow
def test_a_run_learns_and_writes_what_was_promised(root, tmp_path, capsys):
    run = tmp_path / "run"
    path = write(tmp_path, settings(root, run, how={"MAX_EPOCHS": 14, "EVAL_PERIOD": 7}))
    assert main(["train", str(path), "--quiet"]) == 0
    rows = [json.loads(row) for row in (run / "logs/log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 42 and np.mean(losses[-6:]) < 0.6 * np.mean(losses[:6])
    measured = [row["evaluation"]["mAP"] for row in rows if "evaluation" in row]
    result = json.loads((run / "result.json").read_text())
    assert len(measured) == 2 and result["mAP"] == max(measured) and result["step"] in (21, 42) and result["steps"] == 42
    card = json.loads((run / "card.json").read_text())
    assert card["recipe"]["SOLVER"]["MAX_EPOCHS"] == 14 and card["plan"] == "sdtps@out" and card["loss_curve"]
    assert card["accuracy"]["val"]["mAP"] == round(result["mAP"], 4)
    state = torch.load(run / f"checkpoints/best/model_step_{result['step']}.pt", weights_only=True)
    loaded = loading.load(str(run), torch.device("cpu"))
    assert same(loaded.model.state_dict(), state)
    assert loaded.model.plan == "sdtps@out" and not loaded.model.training
    inputs = {name: torch.randn(2, 3, 32, 16) for name in ("RGB", "TI")}
    with torch.no_grad(), tokensieve.apply(loaded.model, loaded.model.plan) as handle:
        assert loaded.model.encode(inputs).isfinite().all()
    assert [(row.layer, row.tokens_in, row.tokens_out) for row in handle.ledger] == [("out", 32, 7)]
    assert main(["train", str(path), "--quiet"]) == 2 and "--resume" in capsys.readouterr().err
    # the backbone of this run can begin another
    other = learner(root, model={"PRETRAINED": str(run), "PLAN": "none", "MODALITIES": ["RGB", "NI"]})
    assert same(other.model.backbones.state_dict(), loaded.model.backbones.state_dict())


@pytest.mark.slow
def test_without_validation_the_last_weights_are_taken(root, tmp_path):
    run = tmp_path / "run"
    made = settings(root, run, how={"MAX_STEPS": 4, "WARMUP_EPOCHS": 0, "MAX_EPOCHS": 3})
    made["DATASETS"]["VAL_IDENTITIES"] = 0
    training.run(write(tmp_path, made), quiet=True)
    result = json.loads((run / "result.json").read_text())
    assert result["step"] == result["steps"] == 4 and "mAP" not in result
    last, _ = checkpoint.latest(run / "checkpoints")
    trained = loading.load(str(run), torch.device("cpu")).model
    weights, loaded = run / "sdtps.safetensors", trained.state_dict()
    assert same(loaded, last.state["learner"]["model"])
    assert len(last.state["learner"]["recipe"]["fingerprints"]) == 1
    inputs, made = {name: torch.randn(2, 3, 32, 16) for name in ("RGB", "TI")}, []
    for own in (True, False):  # the model's own part, then that of the file
        with torch.no_grad(), tokensieve.apply(trained, "sdtps@out", weights=None if own else weights):
            made.append(trained.encode(inputs))
        for parameter in trained.parts.parameters():
            parameter.data.zero_()
    assert torch.equal(*made)
    next(trained.backbones.parameters()).data.add_(1)
    tokensieve.apply(trained, "sdtps@out", weights=weights).remove()  # what is before the blocks is not signed
    trained.backbones["shared"].blocks[0].attn.qkv.weight.data.mul_(2)
    with pytest.raises(UserError, match=r"sdtps was trained on vit_tiny_patch16_224, and this model .* other weights"):
        tokensieve.apply(trained, "sdtps@out", weights=weights)


@pytest.mark.slow
def test_the_best_step_is_chosen_by_validation(root, tmp_path, monkeypatch):
    run, found = tmp_path / "run", iter([0.9, 0.2])
    monkeypatch.setattr(ReidLearner, "evaluate", lambda self, index: {"mAP": next(found)})
    training.run(ReidTraining.model_validate(settings(root, run)), quiet=True)
    result = json.loads((run / "result.json").read_text())
    assert (result["step"], result["mAP"]) == (6, 0.9)
    kept = torch.load(run / "checkpoints/best/model_step_6.pt", weights_only=True)
    last = torch.load(run / "checkpoints/model_step_12.pt", weights_only=True)
    loaded = loading.load(str(run), torch.device("cpu")).model.state_dict()
    assert same(loaded, kept) and not same(loaded, last)


@pytest.mark.parametrize("model", [{"SDTPS_USE_GUMBEL": True}, {"PLAN": "random@1:9"}], ids=["gumbel", "random"])
def test_a_resumed_run_is_the_same_to_the_bit(root, tmp_path, model):
    """By way of the disk; with evaluations in between, another epoch, and other generators moved."""
    given = {"model": model, "loader": {"DROP_MODALITY": 0.3}}
    one = learner(root, **given)
    for step in range(5):
        one.step(step)
        if step == 1:
            checkpoint.save(tmp_path, 2, one.state())
            one.evaluate(2)
    torch.manual_seed(77)
    other = learner(root, **given)
    found, _ = checkpoint.latest(tmp_path)
    other.restore(found.state)
    torch.rand(3)
    for step in (2, 3, 4):
        other.step(step)
    assert same(one.model.state_dict(), other.model.state_dict())
    mine, theirs = (made.optimizer.state_dict()["state"] for made in (one, other))
    assert all(torch.equal(mine[i]["exp_avg_sq"], theirs[i]["exp_avg_sq"]) for i in mine)
    with pytest.raises(UserError, match=r"other values of MODEL.SDTPS_BETA, SOLVER.BASE_LR"):
        learner(root, model=model | {"SDTPS_BETA": 0.1}, how={"BASE_LR": 1e-3}, loader=given["loader"]).restore(found.state)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(root, tmp_path):
    """SIGKILL after a checkpoint, by the command line, with a worker that reads ahead."""
    made = settings(root, tmp_path / "whole", how={"MAX_EPOCHS": 8}, loader={"NUM_WORKERS": 1, "KEEP_IN_MEMORY": False})
    path = write(tmp_path, made)
    command = [sys.executable, "-m", "tokensieve", "train", str(path), "--quiet"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    cut = tmp_path / "cut"
    process = subprocess.Popen([*command, "--output", str(cut)], env=environment, start_new_session=True)
    try:
        end = time.monotonic() + 300
        while not any(cut.glob("checkpoints/step-*")) and time.monotonic() < end:
            assert process.poll() is None
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    begun, _ = checkpoint.latest(cut / "checkpoints")
    assert begun is not None and 0 < begun.step < 24
    training.run(path, resume=True, output=cut, quiet=True)
    training.run(path, quiet=True)
    one, other = (torch.load(tmp_path / run / "checkpoints/model_step_24.pt", weights_only=True) for run in ("whole", "cut"))
    assert same(one, other)
    results = [json.loads((tmp_path / run / "result.json").read_text()) for run in ("whole", "cut")]
    assert results[0]["mAP"] == results[1]["mAP"]


TWO = """
import sys, torch
torch.set_num_threads(1)
from tests.support.reid_worker import learner
made = learner(sys.argv[1])
seen = []
for step in range(3):
    made.step(step)
    seen += (made.handle.samples.view(3, -1)[0] // 3).tolist()  # objects, of three images each
    if step == 0:
        gradients = {name: p.grad.clone() for name, p in made.model.named_parameters() if p.grad is not None}
mine = torch.cat([value.flatten().float() for value in made.model.state_dict().values()])
assert torch.equal(made.accelerator.gather(mine).view(2, -1)[0], mine)
means = made.model.branches["plain"].neck["RGB"].running_mean
assert torch.equal(made.accelerator.gather(means).view(2, -1)[1], means)
first = made.accelerator.process_index * 4
assert seen == [8 * step + first + i for step in range(3) for i in range(4)], seen
measured = made.evaluate(3)
assert measured["queries"] == 12, measured
if made.accelerator.is_main_process:
    numbers = {"mAP": torch.tensor(measured["mAP"])}
    torch.save({"gradients": gradients, "model": made.model.state_dict(), "numbers": numbers}, sys.argv[2])
made.accelerator.end_training()
"""


@pytest.mark.slow
def test_two_processes_hold_one_model(root, tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    ran = two_processes([str(tmp_path / "two.py"), str(root), str(tmp_path / "two.pt")], tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = torch.load(tmp_path / "two.pt", weights_only=True)
    one = learner(root)
    one.model.load_state_dict(found["model"])
    assert one.evaluate(3)["mAP"] == pytest.approx(float(found["numbers"]["mAP"]), abs=1e-6)
    # the gradient of the first step is the mean of those of the two shares of its batch
    one, (inputs, labels, _) = learner(root), made_of(root)
    for share in (slice(0, 4), slice(4, 8)):
        with one.handle:
            told = one.model({name: value[share] for name, value in inputs.items()})
        (one._losses(told, labels[share], {})[0] / 2).backward()
    for name, parameter in one.model.named_parameters():
        if parameter.requires_grad:
            largest = float(parameter.grad.abs().max())
            torch.testing.assert_close(found["gradients"][name], parameter.grad, atol=1e-4 * largest, rtol=1e-3, msg=name)


def made_of(root):
    """The first batch."""
    return learner(root)._batches_from(0, 1)[0]


@pytest.mark.parametrize(
    "given, told",
    [
        (
            {"model": {"STRIDE_SIZE": [2, 2]}},
            r"MODEL: STRIDE_SIZE: \[2, 2\], but .* 4 x 4 pixels, without overlap; write \[4, 4\]",
        ),
        ({"INPUT": {"SIZE": [34, 16]}}, "INPUT.SIZE: 34 x 16 is not a multiple"),
        ({"model": {"TRANSFORMER_TYPE": "vit_tny"}}, "MODEL: timm has no model 'vit_tny'"),
        ({"model": {"PRETRAINED": "no/such/folder"}}, "MODEL: PRETRAINED no/such/folder: there is no such file"),
        ({"model": {"PLAN": "random@out:100%"}}, "MODEL: random@out:100%: .* everything is kept, so there is nothing to learn"),
        ({"model": {"PLAN": "sdtps@out:5"}}, "MODEL: sdtps@out:5: its weights leave 7 tokens, not 5"),
        ({"model": {"PLAN": "sdtps@5"}}, "MODEL: sdtps@5: no layer 5 in a tower of 2 blocks"),
        ({"model": {"PLAN": "learned@1:4"}}, "MODEL: learned@1:4"),
        ({"model": {"PLAN": "sdtps@1", "SHARED_BACKBONE": False}}, "MODEL: sdtps@1: .*@out"),
        ({"how": {"IMS_PER_BATCH": 20}}, "SOLVER.IMS_PER_BATCH: a batch of 10 identities cannot be drawn from the 6"),
        ({"how": {"MAX_STEPS": 3}}, "SOLVER.WARMUP_EPOCHS: 1 are 3 steps, not less than the 3"),
        ({"how": {"MIXED_PRECISION": "fp16"}}, "fp16 needs a GPU"),
        ({"how": {"DEVICE": "cpux"}}, "SOLVER.DEVICE: .*cpux"),
    ],
)
def test_what_cannot_be_trained_is_told_before_the_first_step(root, given, told):
    with pytest.raises(UserError, match=told):
        learner(root, **given)


def test_a_process_needs_two_identities_for_its_triplets(root, monkeypatch):
    alone = start_accelerator("cpu", "no", 1, "")
    four = SimpleNamespace(device=alone.device, mixed_precision="no", num_processes=4, process_index=1, is_main_process=False)
    monkeypatch.setattr(reid_training, "start_accelerator", lambda *args, **named: four)
    with pytest.raises(UserError, match=r"SOLVER.IMS_PER_BATCH: 4 identities for 4 processes .*; write 16"):
        learner(root)
    made = learner(root, model={"TRIPLET_LOSS_WEIGHT": 0})
    monkeypatch.setattr(
        reid_training.training_start, "processes", lambda made: SimpleNamespace(all_gather=lambda value: [3, 4, 0, 0])
    )
    made.restore(made.state())
    assert made.broken == 4


def test_what_libraries_remark_is_printed_and_another_number_format_is_another_run(root, monkeypatch, capsys):
    stock = load_timm.create

    def create(*args, **more):
        warnings.warn("a remark", stacklevel=1)
        return stock(*args, **more)

    monkeypatch.setattr(load_timm, "create", create)
    made = learner(root)
    assert capsys.readouterr().err == "a remark\n"
    begun = made.state()
    begun["recipe"]["SOLVER"]["MIXED_PRECISION"] = "fp16"
    with pytest.raises(UserError, match=r"started with other values of SOLVER.MIXED_PRECISION"):
        made.restore(begun)


def test_too_many_identities_for_validation(root):
    made = settings(root)
    made["DATASETS"]["VAL_IDENTITIES"] = 9
    with pytest.raises(UserError, match="DATASETS: RGBNT201 has 9 identities for training; 9 of them cannot be held out"):
        ReidLearner(ReidTraining.model_validate(made))


def test_broken_images_are_replaced_and_counted(root, tmp_path, capsys):
    import shutil

    shutil.copytree(root, tmp_path / "data")
    pids = learner(tmp_path / "data").val_data.pids
    train = next(pid for pid in range(1, 10) if pid not in pids)
    folder = tmp_path / "data/RGBNT201/train_171"
    for modality, pid in (("TI", train), ("NI", pids[0])):
        (folder / modality / f"{pid:06d}_cam1_0_00.jpg").write_bytes(b"no image")
    made = learner(tmp_path / "data", loader={"MAX_BROKEN": 0.2})
    for step in range(3):
        made.step(step)
    assert (
        made.broken
        and made.state()["broken"] == [made.broken]
        and "another shot of the same identity" in capsys.readouterr().err
    )
    told = made.evaluate(3)
    assert told["unreadable"] == 1 and told["queries"] == 11
    made = learner(tmp_path / "data", loader={"MAX_BROKEN": 0.0})
    with pytest.raises(UserError, match=r"objects could not be read, the last .*; of the 96 .* at most 0 are allowed"):
        [made.step(step) for step in range(3)]
    with pytest.raises(UserError, match="1 of 12 validation objects could not be read; at most 0 are allowed"):
        made.evaluate(3)


def test_a_loss_that_is_not_finite_ends_the_run(root, tmp_path):
    made = ReidTraining.model_validate(settings(root, tmp_path / "run", how={"WARMUP_EPOCHS": 0}))
    rates = made.SOLVER.model_copy(update={"BASE_LR": 1e30, "BACKBONE_LR": 1e30})  # a file may not have such
    with pytest.raises(UserError, match=r"step \d+: .*(finite|NaN).* checkpoint"):
        training.run(made.model_copy(update={"SOLVER": rates}), quiet=True)


def test_shots_that_are_left_out_count_as_broken(root, tmp_path):
    folder = shutil.copytree(root, tmp_path / "data") / "RGBNT201" / "train_171"
    made = learner(tmp_path / "data")
    assert (made.model.settings.data, made.model.settings.val_identities) == ("RGBNT201", 3)
    for shot in ("000001_cam1_0_00", "000001_cam1_0_01"):
        (folder / "TI" / f"{shot}.jpg").unlink()
    (folder / "RGB" / "1.jpg").write_bytes(b"")
    with pytest.raises(
        UserError, match=r"of 25 shots of RGBNT201 \(train\) 2 lack a modality and 1 are misnamed; at most 1 are allowed"
    ):
        learner(tmp_path / "data")
    assert len(learner(tmp_path / "data", loader={"MAX_BROKEN": 0.1}).train_data) == 22
