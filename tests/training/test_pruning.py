"""Training of two-stage VLM pruning: what is trained, losses, schedule, resuming, two processes, what it writes and refuses."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch
import yaml

import tokensieve
from tests.support.paths import ROOT
from tests.support.processes import two_processes
from tests.support.pruning_worker import gradients, learner, settings, weights
from tokensieve import UserError, config, training
from tokensieve.config.pruning import Pruning, PruningTraining
from tokensieve.config.pruning_steps import DeepLearning
from tokensieve.data import vqa
from tokensieve.data.images import BrokenImage
from tokensieve.models.loading import vlm as load_vlm
from tokensieve.parts import resolve
from tokensieve.tasks.vqa import answering
from tokensieve.training import checkpoint, processes
from tokensieve.training.pruning import batches, evaluation
from tokensieve.training.pruning.batches import NO_ANSWER, Collate
from tokensieve.training.pruning.discriminator import Discriminator, critic_loss
from tokensieve.training.pruning.evaluation import Evaluator


def test_every_weight_learns_the_model_does_not_and_all_is_logged(backbone):
    made = learner(backbone)
    assert made.steps == 12 and made.vision_tokens == 49 and str(made.plan) == "merger@out + cross@llm.1,3"
    stock = {name: value.clone() for name, value in made.model.state_dict().items()}
    before = {name: value.clone() for name, value in weights(made).items()}
    told = made.step(0)
    wanted = "merge_sparsity_loss adv_loss task_loss real_loss fake_loss temperature disc_prob_real disc_prob_fake"
    assert set(wanted.split()) | {"mask_sparsity_loss", "tokens_llm.1", "tokens_llm.3"} <= set(told)
    for name, part in made.groups.items():
        for key, parameter in part.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, (name, key)
    assert all(not torch.equal(value, before[name]) for name, value in weights(made).items() if "temperature" not in name)
    assert all(torch.equal(value, stock[name]) for name, value in made.model.state_dict().items())
    assert all(p.grad is None for p in made.model.parameters()) and not made.model.training


@pytest.mark.parametrize(
    "method, groups",
    [
        ({"merger_type": "none"}, {"layer_pruners", "discriminator"}),
        ({"pruning_layers": []}, {"token_merger", "discriminator"}),
        ({"adv_loss_weight": 0}, {"token_merger", "layer_pruners"}),
        (
            {"merger_type": "simple", "distill_loss_weight": 1.0, "hard_share": 1.0},
            {"token_merger", "layer_pruners", "discriminator"},
        ),
    ],
    ids=["no merger", "no pruners", "no discriminator", "distilled and hard"],
)
def test_each_part_can_be_left_out(backbone, method, groups):
    made = learner(backbone, method=method | ({"target_prune_tokens": [15, 6]}))
    told = made.step(0)
    assert set(made.groups) == groups
    assert ("adv_loss" in told) == ("discriminator" in groups)
    assert ("merge_sparsity_loss" in told) == ("token_merger" in groups)
    assert ("mask_sparsity_loss" in told) == ("layer_pruners" in groups and not method.get("hard_share"))
    assert ("distill_loss" in told) == bool(method.get("distill_loss_weight"))
    measured = made.evaluate(1)
    assert measured["avg_merged_tokens"] == (25 if "token_merger" in groups else 49)


def test_no_more_tokens_than_the_cap_enter_the_language_model(backbone):
    """Without a merger they are merged by cover, also where a head prunes the first layer; a merger leaves no more."""
    for method, plan, left in (
        (
            {"merger_type": "none", "pruning_layers": [0, 2], "max_vision_tokens": 30},
            "cover@llm.0:30 + cross@llm.0,2",
            [("llm.0", 30), ("llm.0", 15), ("llm.2", 6)],
        ),
        ({"max_vision_tokens": 20}, "merger@out + cross@llm.1,3", [("out", 20), ("llm.1", 15), ("llm.3", 6)]),
        ({"max_vision_tokens": 60}, "merger@out + cross@llm.1,3", [("out", 25), ("llm.1", 15), ("llm.3", 6)]),
    ):
        made = learner(backbone, method=method | {"hard_share": 1.0})
        assert str(made.plan) == plan
        losses = made.step(0)
        assert all(np.isfinite(value) for value in losses.values())
        assert [(row.layer, row.tokens_out) for row in made.handle.ledger] == left
        for group in made.parts.values():
            assert all(p.grad is not None and p.grad.abs().max() > 0 for p in group.parameters())
        with made.evaluator._evaluation_mode():
            cost = made.evaluator.costs()
        assert cost["avg_original_tokens"] == 49 and cost["tokens_cut_at_end"] == 1 - 6 / 49


def test_the_critic_and_what_it_judges_are_moved_apart(backbone):
    """The adversarial loss moves merger and heads only, the critic's own losses the critic only."""
    made = learner(backbone)
    batch, _ = next(made._loader(0))
    made._start_step(0)
    gradients = []
    for weight in (0.0, 1.0):
        made.pruning = made.pruning.model_copy(update={"adv_loss_weight": weight})
        for part in made.groups.values():
            part.zero_grad()
        made._backward(batch, 1)
        gradients.append({name: [p.grad.clone() for p in part.parameters()] for name, part in made.groups.items()})
    assert all(map(torch.equal, gradients[0]["discriminator"], gradients[1]["discriminator"]))
    for name in ("token_merger", "layer_pruners"):
        assert any(not torch.equal(a, b) for a, b in zip(gradients[0][name], gradients[1][name], strict=True))


def test_heads_learn_to_decide(backbone):
    """At one temperature: the masks of more tokens than the target begin undecided and end near 0 or 1."""
    method = {"target_prune_tokens": [9, 3], "task_loss_weight": 0.01, "adv_loss_weight": 0}
    rates = {name: {"lr": 0.1} for name in ("token_merger", "layer_pruners")}
    made = learner(
        backbone, how={"epochs": 80, "optimizers": rates}, method=method | {"temperature_min": 1.0, "hard_share": 0.0}
    )
    told = [made.step(i) for i in range(60)]
    first, last = (
        {name: sum(one[name] for one in some) / 5 for name in ("mask_sparsity_loss", "tokens_llm.1")}
        for some in (told[:5], told[-5:])
    )
    assert first["tokens_llm.1"] > 11 and last["mask_sparsity_loss"] < 0.9 * first["mask_sparsity_loss"], (first, last)
    assert last["tokens_llm.1"] < first["tokens_llm.1"] - 1


def test_on_the_hard_path_counts_are_exact_and_have_no_loss(backbone):
    made = learner(backbone, method={"hard_share": 0.5})
    soft, hard = made.step(0), made.step(6)
    assert "mask_sparsity_loss" in soft and "mask_sparsity_loss" not in hard
    assert (hard["tokens_llm.1"], hard["tokens_llm.3"]) == (15, 6) and soft["tokens_llm.1"] > 15


def test_the_full_model_runs_only_if_a_loss_compares_with_it(backbone, monkeypatch):
    passes = []
    for method in ({}, {"adv_loss_weight": 0}, {"adv_loss_weight": 0, "distill_loss_weight": 1.0}):
        made = learner(backbone, method=method)
        count = []
        made.model.model.language_model.register_forward_hook(lambda *_, count=count: count.append(1))
        made.step(0)
        passes.append(len(count))
    assert passes == [2, 1, 2]


def test_the_merger_has_a_temperature_of_its_own(backbone):
    made = learner(backbone)
    made._start_step(11)
    assert float(made.parts["merger"].temperature) == pytest.approx(0.1)
    assert float(made.parts["cross"].temperature) == pytest.approx(0.1)
    made._start_step(0)
    assert float(made.parts["merger"].temperature) == pytest.approx(0.1) and float(made.parts["cross"].temperature) == 1.0


def test_images_are_encoded_once(backbone, tmp_path):
    """With a cache of the tower: the same steps to the bit; a second run encodes nothing."""
    plain, cached = (
        learner(backbone),
        learner(backbone, backbone_settings={"name": str(backbone), "tower_cache": str(tmp_path)}),
    )
    for made in (plain, cached):
        made.step(0)
    assert all(torch.equal(value, weights(cached)[name]) for name, value in weights(plain).items())
    assert (cached.tower_cache.hits, cached.tower_cache.misses) == (4, 4)  # the full model's pass, then the pruned one's
    again = learner(backbone, backbone_settings={"name": str(backbone), "tower_cache": str(tmp_path)})
    again.step(0)
    assert (again.tower_cache.hits, again.tower_cache.misses) == (8, 0) and again.recipe == plain.recipe


def test_the_discriminator_tells_apart_and_begins_anew():
    torch.manual_seed(0)
    critic, words = Discriminator(24, 16), torch.ones(32, 7, dtype=torch.bool)
    words[:, 5:] = False
    adam = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for _ in range(60):
        real, fake = torch.randn(32, 7, 24) + 0.5 * torch.eye(24)[0] * 4, torch.randn(32, 7, 24)
        loss = critic_loss(critic(real, words), real=True) + critic_loss(critic(fake, words), real=False)
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert loss < 0.4
    other = fake.clone()
    other[:, 5:] = 9.0
    assert torch.equal(critic(other, words), critic(fake, words))  # what is no word is not looked at
    state = torch.get_rng_state()
    critic.reset_parameters(5)
    first = {name: value.clone() for name, value in critic.state_dict().items()}
    critic.reset_parameters(5)
    assert all(torch.equal(first[name], value) for name, value in critic.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert critic_loss(critic(real, words), real=True) + critic_loss(critic(fake, words), real=False) > 1.0


def test_a_new_discriminator_now_and_then(backbone):
    made = learner(backbone, method={"disc_reinit_prob": 1.0})
    made._start_step(0)
    first = made.groups["discriminator"].read.weight.clone()
    made._start_step(1)
    assert not torch.equal(first, made.groups["discriminator"].read.weight) and not made.optimizers["discriminator"].state
    made._start_step(0)
    assert torch.equal(first, made.groups["discriminator"].read.weight)


def test_the_temperature_falls_over_half_of_the_steps():
    goal = Pruning()
    assert [round(goal.temperature_at(step, 100), 3) for step in (0, 25, 50, 99)] == [1.0, 0.55, 0.1, 0.1]
    how = DeepLearning(schedule="cosine", warmup_steps=4)
    assert [how.rate(step, 24) for step in (0, 3)] == [0.25, 1.0] and how.rate(23, 24) < 0.05 < how.rate(14, 24)
    assert DeepLearning().rate(7, 9) == 1.0


def test_a_batch_knows_question_and_answer(backbone):
    processor = load_vlm.load(str(backbone)).processor
    items = [vqa.load("embedded", split="val")[i] for i in (0, 3)]  # of different lengths
    batch = Collate(processor, "{question}", processor.tokenizer.image_token_id, None)(items, torch.arange(2))
    words, ids = processor.tokenizer, batch.inputs["input_ids"]
    assert (ids == words.image_token_id).sum(1).tolist() == [49, 49]
    for b, item in enumerate(items):
        said = batch.labels[b] != NO_ANSWER
        assert words.decode(batch.labels[b][said]) == f"{item.answer} [EOS]"
        assert torch.equal(ids[b][1:][said[:-1]], batch.labels[b][said])  # each is told by the token before it
        assert item.question.removesuffix("?") in words.decode(ids[b][batch.question[b]])
        told = words.decode(ids[b][batch.words[b] & ~batch.question[b]])
        assert told == f"{item.answer} [EOS]"
    assert not (batch.question & (ids == words.image_token_id)).any()
    assert torch.equal(batch.words, batch.inputs["attention_mask"].bool() & (ids != words.image_token_id))


def test_the_question_is_the_same_in_training_and_when_asked(backbone):
    """What heads see in training is what they see when the model generates."""
    made = learner(backbone)
    from tokensieve.tasks.vqa.answering import ask

    items = [made.val_data[i] for i in (0, 3)]
    batch = made.collate(items, torch.arange(2))
    asked = ask(made.processor, items)
    text = (asked["input_ids"] != made.model.config.image_token_id) & asked["attention_mask"].bool()
    for b in range(2):
        assert torch.equal(asked["input_ids"][b][text[b]], batch.inputs["input_ids"][b][batch.question[b]])


def test_a_resumed_run_is_the_same_to_the_bit(backbone, tmp_path):
    """The tensors of the checkpoint, by way of the disk; with accumulation, new discriminators and other generators moved."""
    from tokensieve.training import checkpoint

    given = {"how": {"gradient_accumulation_steps": 2}, "method": {"disc_reinit_prob": 0.4}}
    one = learner(backbone, **given)
    for step in range(5):
        one.step(step)
        if step == 2:
            checkpoint.save(tmp_path, 3, one.state())
    torch.manual_seed(77)
    other = learner(backbone, **given)
    found, _ = checkpoint.latest(tmp_path)
    other.restore(found.state)
    torch.rand(3)
    for step in (3, 4):
        other.step(step)
    assert all(torch.equal(value, weights(other)[name]) for name, value in weights(one).items())
    with pytest.raises(UserError, match=r"other values of .*batch_size.*merge_ratio"):
        learner(backbone, how={"batch_size": 2}, method={"merge_ratio": 0.6}).restore(found.state)


def assert_same_gradients(some, others):
    """To rounding, relative to the largest of each group. (Adam makes steps of one size even out of rounding errors.)"""
    for name, value in some.items():
        group = name.split(".")[0]
        largest = max(float(other.abs().max()) for key, other in some.items() if key.startswith(group))
        torch.testing.assert_close(value, others[name], atol=2e-4 * largest, rtol=1e-3, msg=name)


def test_accumulation_is_a_larger_batch(backbone):
    ends = []
    for how in ({"batch_size": 4}, {"batch_size": 2, "gradient_accumulation_steps": 2}):
        made = learner(backbone, how=how)
        made.step(0)
        ends.append(gradients(made))
    assert_same_gradients(*ends)


TWO = """
import sys, torch
torch.set_num_threads(1)
from tests.support.pruning_worker import gradients, learner, weights
made = learner(sys.argv[1], how={"batch_size": 2})
for step in range(3):
    made.step(step)
    if step == 0 and made.accelerator.is_main_process:
        torch.save(gradients(made), sys.argv[2])
mine = torch.cat([value.flatten() for value in weights(made).values()])
assert torch.equal(made.accelerator.gather(mine).view(2, -1)[0], mine)
measured = made.evaluate(3)
assert measured["questions"] == 6, measured
made.accelerator.end_training()
"""


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_batch(backbone, tmp_path):
    (tmp_path / "two.py").write_text(TWO)
    ran = two_processes([str(tmp_path / "two.py"), str(backbone), str(tmp_path / "two.pt")], tmp_path)
    assert ran.returncode == 0, ran.stderr[-3000:]
    one = learner(backbone, how={"batch_size": 4})
    one.step(0)
    assert_same_gradients(gradients(one), torch.load(tmp_path / "two.pt", weights_only=True))


def test_a_run_writes_what_was_promised(backbone, tmp_path):
    run = tmp_path / "run"
    made = settings(backbone, run, how={"epochs": 1, "evaluate_every": 3})
    path = tmp_path / "pruning.yaml"
    path.write_text(yaml.safe_dump(made))
    told = []
    training.run(path, quiet=True, report=lambda step, numbers: told.append((step, numbers["accuracy_hard"])))
    assert [step for step, _ in told] == [3, 6]
    for name in ("token_merger", "layer_pruners", "discriminator"):
        state = torch.load(run / "checkpoints" / f"{name}_step_6.pt", weights_only=True)
        assert all(isinstance(value, torch.Tensor) for value in state.values())
    assert (run / "logs/training.log").stat().st_size and any((run / "logs/tensorboard").iterdir())
    result = json.loads((run / "result.json").read_text())
    wanted = (
        "accuracy_baseline accuracy_soft accuracy_hard keep_ratio_merge avg_original_tokens avg_merged_tokens llm_flops_cut"
    )
    assert set(wanted.split()) <= set(result)
    assert [result[f"tokens_after_layer_{layer}"] for layer in (1, 3)] == [15, 6]
    assert result["avg_merged_tokens"] == 25 and result["avg_tokens_over_layers"] == (25 + 15 + 15 + 6) / 4
    assert 0 < result["llm_flops_cut"] < 1 and result["accuracy_hard"] == max(best for _, best in told)

    loaded = load_vlm.load(str(backbone))
    item = vqa.load("embedded", split="val")[0]
    from tokensieve.tasks.vqa.answering import ask

    with tokensieve.apply(loaded.model, "merger@out + cross@llm.1,3", weights=str(run)) as handle:
        loaded.model.generate(**ask(loaded.processor, [item]), max_new_tokens=2)
    assert [(row.layer, row.tokens_out) for row in handle.ledger] == [("out", 25), ("llm.1", 15), ("llm.3", 6)]
    card = json.loads((run / "card.json").read_text())
    assert card["plan"] == "merger@out + cross@llm.1,3" and card["parameters"]["token_merger"] > 0


def test_weights_of_every_checkpoint_can_be_used(backbone, tmp_path):
    """Of a run that is not finished: its best step, a step by its folder, and the plain state dicts by their names."""
    run, folder, plan = tmp_path / "run", tmp_path / "run/checkpoints", "merger@out + cross@llm.1,3"
    made = settings(backbone, run, how={"epochs": 1, "evaluate_every": 3, "checkpoint_every": 2, "keep_checkpoints": "all"})

    def stop(step, numbers):
        if step == 6:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        training.run(PruningTraining.model_validate(made), quiet=True, report=stop)
    assert not list(run.glob("*.safetensors"))
    model = load_vlm.load(str(backbone)).model
    plain = [str(folder / f"{name}_step_2.pt") for name in ("token_merger", "layer_pruners")]
    for given, name in ((run, "best"), (folder / "step-00000004", "step-00000004"), (plain, "step-00000002")):
        saved = checkpoint.load(folder / name)
        found = resolve.read_weights(given)
        with tokensieve.apply(model, plan, weights=given) as handle:
            for method, group in (("merger", "token_merger"), ("cross", "layer_pruners")):
                state = handle.parts[method].state_dict()
                assert all(torch.equal(value, state[key]) for key, value in saved.state["learner"]["groups"][group].items())
                assert found[method].about["trained"]["steps"] == saved.step
    with pytest.raises(UserError, match=r"discriminator_step_2\.pt: these tensors are of no method"):
        resolve.read_weights(str(folder / "discriminator_step_2.pt"))


def test_the_result_is_that_of_the_best_step_with_its_times(backbone, tmp_path, monkeypatch):
    """Also where the last step was worse; the weights that are written are those of the best one."""
    run, best = tmp_path / "run", {}
    made = settings(backbone, run, how={"epochs": 1, "evaluate_every": 3})
    monkeypatch.setattr(Evaluator, "score", lambda self, soft: [float(not best)] * 6)

    def report(step, numbers):
        best.setdefault(step, numbers["accuracy_hard"])

    training.run(PruningTraining.model_validate(made), quiet=True, report=report)
    assert best == {3: 1.0, 6: 0.0}
    result = json.loads((run / "result.json").read_text())
    assert (result["step"], result["steps"], result["accuracy_hard"]) == (3, 6, 1.0)
    assert 0 < result["seconds_prefill"] < result["seconds"] and result["seconds_baseline"] > 0
    assert "training_seconds" in result
    kept = torch.load(run / "checkpoints/best/layer_pruners_step_3.pt", weights_only=True)
    from safetensors.torch import load_file

    written = load_file(run / "cross.safetensors")
    assert all(torch.equal(value, written[name]) for name, value in kept.items())


def test_the_validation_loss_is_that_of_each_answer_on_the_hard_path(backbone):
    made = learner(backbone, how={"eval_batch_size": 4}, method={"prune_rest": "merge"})
    losses = []
    with made.evaluator._evaluation_mode(), torch.no_grad():
        measured = made.evaluator.loss()
        for item in (made.val_data[i] for i in range(6)):
            batch = made.collate([item], torch.zeros(1, dtype=torch.long))
            with made.handle, made.handle.call(context={"question": batch.question}):
                states = made.model.model(**batch.inputs, use_cache=False).last_hidden_state
            told = batch.labels != NO_ANSWER
            logits = made.model.get_output_embeddings()(states[told]).double()
            losses.append(float(torch.nn.functional.cross_entropy(logits, batch.labels[told])))
    assert measured == pytest.approx(sum(losses) / 6, rel=1e-4)
    assert max(losses) - min(losses) > 0.01 * measured  # the mean of different ones


def test_the_best_step_is_that_of_the_highest_accuracy_or_of_the_lowest_loss(backbone, tmp_path, monkeypatch):
    losses = {3: 0.5, 6: 0.9}
    for monitor, best in (("accuracy_hard", 6), ("loss", 3)):
        run, done = tmp_path / monitor, []
        made = settings(backbone, run, how={"epochs": 1, "evaluate_every": 3, "monitor": monitor})
        monkeypatch.setattr(Evaluator, "score", lambda self, soft, done=done: [len(done) / 4] * 6)
        monkeypatch.setattr(Evaluator, "loss", lambda self, done=done: losses[3 * (len(done) + 1)])
        training.run(
            PruningTraining.model_validate(made), quiet=True, report=lambda step, numbers, done=done: done.append(step)
        )
        assert json.loads((run / "result.json").read_text())["step"] == best


def test_the_log_has_the_groups_of_the_optimizers_and_what_is_trained(backbone, tmp_path, capsys):
    run = tmp_path / "run"
    training.run(PruningTraining.model_validate(settings(backbone, run, how={"max_steps": 2})))
    text, printed = (run / "logs/training.log").read_text(), capsys.readouterr().err
    for line in (
        "token merger: question_aware, merge ratio 0.51 (49 -> 25 tokens)",
        "pruning layers: [1, 3] (25 -> 15, 6 tokens), cross_attention",
        "temperature: 1 -> 0.1 over the first 1 of 2 steps",
    ):
        assert line in text and line in printed
    step = text.split("step 2/2")[1].splitlines()[1:]
    keys = [line.strip().split(":")[0].removeprefix("- ") for line in itertools.takewhile(lambda x: x.startswith("  "), step)]
    groups = {"token_merger", "layer_pruners", "discriminator"}
    assert [key for key in keys if key in groups] == ["token_merger", "layer_pruners", "discriminator"]
    assert keys.index("merge_sparsity_loss") < keys.index("layer_pruners") < keys.index("task_loss")
    assert keys.index("task_loss") < keys.index("discriminator") < keys.index("real_loss") and "temperature" not in keys


class Holes:
    """Questions of which some have images that cannot be read; which of them were read."""

    def __init__(self, data, broken):
        self.data, self.broken, self.fingerprint, self.seen = data, broken, data.fingerprint, []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if index in self.broken:
            raise BrokenImage(f"{index}.jpg: damaged")
        self.seen.append(index)
        return self.data[index]


def test_the_next_question_stands_in_for_one_whose_image_is_broken(backbone, capsys):
    made = learner(backbone)
    order = np.random.default_rng([0, 0, 8]).permutation(24).tolist()
    made.train_data = Holes(made.train_data, {order[1], order[2]})
    with pytest.raises(
        UserError, match=r"2 images could not be read, the last \d+\.jpg: damaged; of the 48 .* at most 1 are allowed"
    ):
        made.step(0)
    data = made.config.dataset_settings.model_copy(update={"max_broken": 0.05})
    made.config = made.config.model_copy(update={"dataset_settings": data})
    made.broken, made._batches = 0, None
    made.train_data.seen.clear()
    made.step(0)
    assert made.train_data.seen == [order[i] for i in (0, 3, 3, 3)] and made.state()["broken"] == 2
    assert "another question takes its place" in capsys.readouterr().err
    made.train_data.broken, made._batches = set(range(24)), None
    with pytest.raises(UserError, match="could not be read"):
        made.step(1)


def test_validation_questions_that_cannot_be_asked_are_wrong_and_counted(backbone, monkeypatch):
    made = learner(backbone)
    made.evaluator.data = Holes(made.val_data, {0})
    monkeypatch.setattr(evaluation, "soft_score", lambda answer, answers: 1.0)
    told = made.evaluate(3)
    assert told["unreadable"] == 1 and told["questions"] == 6 and told["accuracy_hard"] == pytest.approx(5 / 6)
    made.evaluator.data.broken, made.evaluator.baseline = {0, 1}, []
    with pytest.raises(UserError, match="2 of 6 validation images could not be read; at most 1 are allowed"):
        made.evaluate(3)


def test_questions_are_asked_as_they_are_read_and_of_images_as_large_as_in_training(backbone, monkeypatch):
    made = learner(backbone, how={"eval_batch_size": 2}, method={"image_max_size": 64})
    made.evaluator.data = Holes(made.val_data, set())
    read = []

    def ask(processor, items, template):
        read.append(len(made.evaluator.data.seen))
        assert {item.image.size for item in items} == {(64, 64)}
        return asked(processor, items, template)

    asked = answering.ask
    monkeypatch.setattr(answering, "ask", ask)
    made.evaluator.score(soft=None)
    assert read == [2, 4, 6]


def test_a_run_is_not_resumed_with_other_data_or_another_model(backbone):
    made = learner(backbone)
    state = made.state()
    made.val_data.fingerprint = "other"
    with pytest.raises(UserError, match=r"other values of fingerprints\.val;"):
        made.restore(state)


def test_what_is_odd_about_the_data_is_told(backbone, capsys, monkeypatch):
    monkeypatch.setattr(
        "tokensieve.data.vqa_scenes.SceneQuestions.check", lambda self, allowed: [f"{self.split}: odd, {allowed}"]
    )
    batches.read_data(PruningTraining.model_validate(settings(backbone)))
    assert capsys.readouterr().err == "train: odd, 0.01\nval: odd, 0.01\n"


def test_the_device_of_the_file_is_taken_or_refused(monkeypatch):
    for name in ("cuda:99", "cpux"):
        with pytest.raises(UserError, match=f"trainer_settings.dl_settings.device: .*{name}.*"):
            processes.start_accelerator(name, "no", 1, "trainer_settings.dl_settings.device")
    monkeypatch.setattr(processes, "find_device", lambda name, rank: torch.device(name))
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    processes.start_accelerator("cuda:1", "no", 1, "device")
    assert chosen == [torch.device("cuda:1")]
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match="cuda:1 would be used by all 2 processes; write cuda"):
        processes.start_accelerator("cuda:1", "no", 1, "device")


def test_the_flops_are_those_of_the_language_model(backbone):
    """Counted by hand: products of matrices and of attention, for tokens that are there at each layer."""
    made = learner(backbone, method={"pruning_layers": [], "merger_type": "simple"})
    cost = made.evaluator.costs()
    batch = made.collate([made.val_data[0]], torch.zeros(1, dtype=torch.long))
    text = int(batch.words.sum())

    def by_hand(tokens):
        return 4 * (2 * tokens * (4 * 24 * 24 + 3 * 24 * 32) + 4 * tokens * tokens * 24) / 1e9

    made.parts["merger"].eval()
    assert cost["llm_gflops_baseline"] == pytest.approx(by_hand(text + 49), rel=0.02)
    assert cost["llm_gflops"] == pytest.approx(by_hand(text + 25), rel=0.02)


def test_all_that_the_model_cannot_do_is_told_at_once(backbone):
    with pytest.raises(UserError) as told:
        learner(
            backbone,
            method={
                "pruning_layers": [2, 4, 31],
                "target_prune_tokens": [48, 20, 6],
            },
        )
    message = str(told.value)
    assert "[4, 31] beyond the language model's 4 layers; allowed are 0 to 3" in message
    assert "48 are more than the 25 tokens that arrive there" in message
    (told,) = Pruning(target_merge_tokens=77, pruning_layers=()).check_counts(49, 4)
    assert told == "target_merge_tokens: 77 are more than the 49 vision tokens of an image"
    (told,) = Pruning(merge_ratio=1.0, pruning_layers=()).check_counts(49, 4)
    assert told.startswith("merge_ratio: leaves all 49 vision tokens")
    (told,) = Pruning(pruning_layers=(1,), target_prune_tokens=(25,)).check_counts(49, 4)
    assert told.startswith("target_prune_tokens: 25 are all the tokens that arrive there")
    with pytest.raises(UserError, match="warmup_steps: 12 is not less than the 12 steps"):
        learner(backbone, how={"warmup_steps": 12})
    with pytest.raises(UserError, match="24 training questions are less than a step of 32"):
        learner(backbone, how={"batch_size": 32})


@pytest.mark.parametrize(
    "section, given, told",
    [
        ("method_settings", {"pruning_layers": [3, 1]}, r"\[3, 1\] do not ascend; for example \[1, 3\]"),
        ("method_settings", {"target_prune_tokens": [6, 15]}, "do not descend"),
        ("method_settings", {"target_prune_tokens": [9, 8, 6]}, "3 counts for 2 pruning layers"),
        ("method_settings", {"pruner_d_internal": 18}, "cannot be divided among 4 heads"),
        ("method_settings", {"temperature_min": 2.0}, "above the temperature"),
        ("method_settings", {"merger_type": "none", "pruning_layers": []}, "nothing to train"),
        ("method_settings", {"merger_typ": "simple"}, "merger_type"),
        ("backbone_settings", {"attn_implementation": "flash_attention_2"}, "sdpa"),
        ("dataset_settings", {"name": "vqav2", "train": {"questions": "q.json"}}, "annotations and images"),
    ],
)
def test_a_file_that_makes_no_sense(backbone, tmp_path, section, given, told):
    made = settings(backbone)
    made[section] |= given
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(made))
    with pytest.raises(UserError, match=told):
        config.load(path)


def test_files_that_are_missing_are_all_named(backbone):
    files = {"questions": "no/questions.json", "annotations": "no/annotations.json", "images": "no/images"}
    data = {"name": "vqav2", "train": files, "val": files}
    with pytest.raises(UserError, match=r"dataset_settings\.train: .*no/questions\.json.*dataset_settings\.val: "):
        batches.read_data(PruningTraining.model_validate(settings(backbone) | {"dataset_settings": data}))


def test_the_files_that_ship_are_whole():
    large = config.load(ROOT / "configs/vision_token_pruning.yaml")
    goal, how = large.method_settings, large.trainer_settings.dl_settings
    assert not goal.check_counts(576, 32) and goal.merged(576) == 288 and goal.pruning_layers == (10, 20, 31)
    assert (how.epochs, how.batch_size, how.optimizers.token_merger.lr, how.optimizers.discriminator.lr) == (1, 12, 2e-5, 5e-4)
    assert (goal.task_loss_weight, goal.adv_loss_weight, goal.merge_sparsity_weight) == (25.0, 1.0, 1e-4)
    assert (goal.pruner_d_internal, goal.pruner_num_heads, goal.temperature_min) == (512, 4, 0.1)
    for name, tokens in (("embedded_vlm", 79), ("embedded_vlm_tight", 40)):
        small = config.load(ROOT / f"configs/{name}.yaml").method_settings
        assert not small.check_counts(196, 12) and small.merged(196) == tokens
