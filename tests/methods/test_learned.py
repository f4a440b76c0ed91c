"""The learned selector: gradients reach it, the choice stays hard, its weights are kept, checked and found, runs resume."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

import tokensieve
from tests.support.paths import ROOT
from tests.support.reference import attention_matrix, in_float64
from tests.support.rounding import assert_near
from tokensieve import UserError, config, training
from tokensieve.data.clip_benchmark_source import CheckedDataset
from tokensieve.data.source import Source
from tokensieve.errors import Uncuttable
from tokensieve.methods.learned import learned
from tokensieve.methods.registry import get_method
from tokensieve.models import loading
from tokensieve.models.features import encode_image
from tokensieve.models.registry import open_tower
from tokensieve.parts import resolve
from tokensieve.rest import apply_rest
from tokensieve.testing import fresh_part, make_view
from tokensieve.training import checkpoint, random_state
from tokensieve.training.learned_selector import learner as learned_selector

METHOD = get_method("learned")
RESTS = ("drop", "merge", "fuse")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    return loading.load("sieve-vit-8", "scenes-v1").model.requires_grad_(False)


@pytest.fixture
def scorer():
    return fresh_part(METHOD, 128)


IMAGES = torch.randn(3, 3, 112, 112, generator=torch.Generator().manual_seed(0))


def feature(model, plan, part, **given):
    with tokensieve.apply(model, plan, weights={"learned": part}, **given) as handle:
        return model.encode_image(IMAGES), handle


@pytest.mark.parametrize("rest", RESTS)
def test_the_gradient_reaches_every_weight_of_the_scorer_and_none_of_the_model(model, scorer, rest):
    out, _ = feature(model, f"learned@4:32(rest={rest})", scorer.train())
    F.normalize(out, dim=-1)[:, 0].sum().backward()
    for name, parameter in scorer.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-7, name
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("rest", RESTS)
def test_in_training_the_choice_is_hard_too(model, scorer, rest):
    plan = f"learned@4:32(rest={rest})"
    soft, trained = feature(model, plan, scorer.train())
    with torch.no_grad():
        hard, plain = feature(model, plan, scorer.eval())
    assert torch.equal(trained.kept, plain.kept)
    assert_near(soft.detach(), hard)


@pytest.mark.parametrize("rest", RESTS)
def test_the_gate_is_exactly_one(scorer, rest):
    view = replace(make_view(width=128), part=scorer.train())
    gated = learned(view, 7)
    assert torch.equal(gated.gate, torch.ones(3, 7))
    plain = apply_rest(view, replace(gated, gate=None), rest)
    opened = apply_rest(view, gated, rest)
    assert torch.equal(opened.apply(view.tokens), plain.apply(view.tokens))
    assert torch.equal(opened.sizes_after(view.sizes_or_ones()), plain.sizes_after(view.sizes_or_ones()))


def test_a_closed_gate_puts_the_alternative_in_the_tokens_place(scorer):
    """What the gate's gradient is a derivative of: 0 is the token's absence, by an independent formula for each rest."""
    view = replace(make_view(width=128), part=scorer.eval())
    chosen = learned(view, 5)
    shut = replace(chosen, gate=torch.zeros(3, 5))
    assert apply_rest(view, shut, "drop").sizes_after(None).abs().max() == 0
    fused = apply_rest(view, shut, "fuse").apply(view.tokens)
    assert_near(fused[:, :5], fused[:, 5:].expand(-1, 5, -1))
    merged, plain = apply_rest(view, shut, "merge").apply(view.tokens), apply_rest(view, chosen, "merge").apply(view.tokens)
    for b in range(3):
        tokens = view.tokens[b, chosen.index[b]]
        for i in range(5):
            others = [j for j in range(5) if j != i]
            nearest = max(others, key=lambda j: F.cosine_similarity(tokens[i], tokens[j], dim=0).item())
            assert_near(merged[b, i], plain[b, nearest])


def test_exploration_changes_the_choice_in_training_only(scorer):
    view = replace(make_view(width=128), part=scorer)
    plain = learned(view, 6).index
    scorer.exploration = 2.0
    assert torch.equal(learned(view, 6).index, plain)
    scorer.train()
    assert not torch.equal(learned(view, 6).index, plain)
    assert torch.equal(learned(view, 6).index, learned(view, 6).index)  # an image's noise is its own


def test_the_network_of_the_selector_is_public():
    assert get_method("learned").part is tokensieve.SelectionNetwork


def test_a_register_is_no_cls_token(scorer):
    """Without a CLS token the mean token asks, whether there are registers or not."""
    view = make_view(width=128)
    other = replace(view, prefix=view.prefix + 1)
    assert not torch.equal(scorer(view), scorer(other))
    bare, changed = (replace(x, attention=replace(x.attention, has_cls=False)) for x in (view, other))
    assert torch.equal(scorer(bare), scorer(changed))


def test_a_pooling_head_that_takes_no_sizes_serves_trained_weights_but_no_training():
    from timm.models.vision_transformer import VisionTransformer

    net = VisionTransformer(img_size=64, patch_size=16, embed_dim=32, depth=3, num_heads=4, global_pool="prr").eval()
    part, images = fresh_part(METHOD, 32), torch.randn(2, 3, 64, 64)
    with tokensieve.apply(net, "learned@1:5", weights={"learned": part}) as handle:
        assert encode_image(net, images).shape == (2, 32) and handle.kept.shape == (2, 5)
        part.train()
        with pytest.raises(UserError, match="before apply"):
            encode_image(net, images)
    with pytest.raises(Uncuttable, match="selector that is trained"):
        tokensieve.apply(net, "learned@1:5", weights={"learned": part})


@pytest.mark.parametrize("family", ["Siglip", "DINOv3ViT", "Dinov2"])
@pytest.mark.parametrize("rest", RESTS)
def test_other_families_can_be_trained_for(family, rest):
    """No CLS token; registers and rotary angles; layer scale."""
    import transformers

    name = f"{family}Vision" if family == "Siglip" else family
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}Config")(**small, image_size=64, patch_size=16)
    net = getattr(transformers, f"{name}Model")(kind).eval().requires_grad_(False)
    part = fresh_part(METHOD, 32).train()
    images = torch.randn(2, 3, 64, 64)
    _, heard = learned_selector.full_outputs(net, images, open_tower(net).blocks[2])
    assert heard.shape == (2, 16)
    assert_near(heard.sum(-1), torch.ones(2))
    with tokensieve.apply(net, f"learned@2:5(rest={rest})", weights={"learned": part}):
        (encode_image(net, images) @ torch.randn(32)).sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in part.parameters())


def test_the_goal_is_the_models_feature_and_its_next_blocks_cls_row(model):
    block = open_tower(model).blocks[4]
    caught = []
    hook = block.module.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
    goal, heard = learned_selector.full_outputs(model, IMAGES, block)
    hook.remove()
    with torch.no_grad():
        row = attention_matrix(in_float64(block.module), caught[0].double())[:, 0, 1:]
        assert_near(goal, F.normalize(model.encode_image(IMAGES), dim=-1))
    assert_near(heard, row / row.sum(-1, keepdim=True))


# ------------------------------------------------------------------------------------------------------------- training

TINY = """
task: learned_selector
output: unused
plans: ["learned@6:8(rest=merge)", "learned@7:5", "learned@6:9(rest=fuse)"]
steps: 4
batch: 3
optimizer: {warmup: 1}
threads: 1
workers: 0
checkpoint_every: 2
evaluate: false
"""


def written(tmp_path, text=TINY):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.slow
def test_a_run_writes_weights_card_and_losses_and_resumes_to_the_same_bits(tmp_path):
    path = written(tmp_path)
    whole = training.run(path, output=tmp_path / "whole", quiet=True)
    card = json.loads((whole / "card.json").read_text())
    assert card["trained"]["plans"] == ["learned@6:8(rest=merge)", "learned@7:5", "learned@6:9(rest=fuse)"]
    assert (whole / "losses.csv").read_text().startswith("step,feature,logits,attention")
    before = fresh_part(METHOD, 128).state_dict()
    after = load_file(whole / "learned.safetensors")
    last = resolve.read_weights(sorted(whole.glob("checkpoints/step-*"))[-1])["learned"].part.state_dict()
    assert all(torch.equal(value, last[name]) for name, value in after.items())
    assert after.keys() == before.keys() and all(torch.isfinite(value).all() for value in after.values())

    broken, learner = tmp_path / "broken", learned_selector.SelectorLearner(config.load(path))
    torch.manual_seed(99)  # what a stopped process leaves behind does not matter
    rows = [learner.step(index) for index in range(2)]
    state = {"learner": learner.state(), "generators": [random_state.generators()]}
    checkpoint.save(broken / "checkpoints", 2, state)
    kept = (whole / "logs" / "log.jsonl").read_text().splitlines()[:2]
    assert [json.loads(row)["feature"] for row in kept] == [round(row["feature"], 6) for row in rows]
    (broken / "logs").mkdir()
    (broken / "logs" / "log.jsonl").write_text("".join(row + "\n" for row in kept))
    training.run(path, resume=True, output=broken, quiet=True)
    for name in ("learned.safetensors", "logs/log.jsonl"):
        assert (whole / name).read_bytes() == (broken / name).read_bytes()


@pytest.fixture
def photos(tmp_path):
    """An image folder with splits train and val, 6 images each, of which one can be broken."""
    for split in ("train", "val"):
        for number in range(6):
            path = tmp_path / "photos" / split / str(number % 2) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((16, 16), 50).convert("RGB").save(path)
    return tmp_path / "photos"


def test_images_that_cannot_be_read_are_counted_and_listed(tmp_path, photos, monkeypatch, capsys):
    found = {split: sorted(str(path) for path in (photos / split).rglob("*.png")) for split in ("train", "val")}

    def build_source(name, transform, root, split, limit, needs_class_names):
        return Source(CheckedDataset(FileList(found[split], transform)), [], [], "")

    monkeypatch.setattr(learned_selector.data_registry, "build_source", build_source)
    text = TINY.replace("evaluate: false", "evaluate: true\nlogits: 0")
    for split in found:
        Path(found[split][1]).write_bytes(b"no image")
    with pytest.raises(UserError, match=r"cannot be read, the last .*; at most 1 are allowed"):
        Path(found["train"][2]).write_bytes(b"")
        training.run(written(tmp_path, text), output=tmp_path / "many", quiet=True)
    Image.new("RGB", (16, 16), "red").save(found["train"][2])
    run = training.run(written(tmp_path, text), output=tmp_path / "one", quiet=True)
    card = json.loads((run / "card.json").read_text())
    assert [line.partition(": ")[0] for line in card["unreadable"]] == [found["train"][1]]
    assert all(numbers["n"] == 5 and numbers["unreadable"] == 1 for numbers in card["accuracy"].values())
    assert f"cannot read {found['train'][1]}: it is damaged" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"1 of 6 validation images .* max_broken: 0$"):
        Image.new("RGB", (16, 16), "red").save(found["train"][1])
        training.run(written(tmp_path, text + "\nmax_broken: 0"), output=tmp_path / "none", quiet=True)


class FileList:
    """A data set of another package."""

    def __init__(self, files, transform):
        self.samples, self.transform = [(file, 0) for file in files], transform

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.transform(Image.open(self.samples[index][0])), 0


def test_a_run_is_not_resumed_with_another_recipe(tmp_path):
    learner = learned_selector.SelectorLearner(config.load(written(tmp_path)))
    other = learned_selector.SelectorLearner(config.load(written(tmp_path, TINY.replace("batch: 3", "batch: 2"))))
    with pytest.raises(UserError, match="batch"):
        other.restore(learner.state())


@pytest.mark.parametrize(
    "was, now, message",
    [
        ('"learned@7:5"', '"anchor@7:5"', "nothing to train"),
        ('"learned@7:5"', '"lerned@7:5"', "Did you mean 'learned@7:5'"),
        ("steps: 4", "steps: 4\nfeature: 0\nlogits: 0\nattention: 0", "nothing to learn from"),
        ("steps: 4", "stepps: 4", "Did you mean 'steps'"),
        ("warmup: 1", "warmup: 4", "optimizer.warmup: 4 is not less than the 4 steps"),
        ("learned@7:5", "learned@out:5(rest=zero)", "use merge, fuse or drop"),
    ],
)
def test_errors_are_explained(tmp_path, was, now, message):
    with pytest.raises(UserError) as caught:
        config.load(written(tmp_path, TINY.replace(was, now)))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def learner_of(tmp_path, plan, **weights):
    named = "".join(f"{name}: {value}\n" for name, value in weights.items())
    text = re.sub(r"plans: .*", f'plans: ["{plan}"]', TINY) + named
    return learned_selector.SelectorLearner(config.load(written(tmp_path, text)))


@pytest.mark.parametrize(
    "plan, weights, told",
    [
        ("learned@4:196", {}, "keep fewer"),
        ("learned@out:5", {}, "nothing is learned; use @4"),
        ("learned@8.attn:5", {}, "layer 8.attn, so nothing is learned; use @4"),
        ("random@2:98 + learned@-1:32", {}, "layer 8, so nothing is learned; use @4"),
        ("learned@7:60 + learned@-1:32", {}, "layer 8, so nothing is learned; use @4"),
        ("random@2:98 + learned@7:32", {"feature": 0, "logits": 0}, "layer 7, so nothing is learned; set feature: 1"),
        ("learned@7:1(rest=merge)", {"attention": 0}, "layer 7, so nothing is learned; keep more tokens"),
    ],
)
def test_a_plan_that_teaches_nothing_is_refused(tmp_path, plan, weights, told):
    with pytest.raises(UserError, match=told) as caught:
        learner_of(tmp_path, plan, **weights)
    assert "\n" not in str(caught.value)


def test_a_loss_over_classes_that_are_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(learned_selector.SelectorLearner, "_classifier", lambda self: (1.0, None))
    with pytest.raises(UserError, match="set feature: 1"):
        learner_of(tmp_path, "learned@7:5", feature=0, attention=0)


@pytest.mark.parametrize("plan", ["learned@6.attn:32", "learned@7:1(rest=merge)"])
def test_the_attention_loss_alone_teaches(tmp_path, plan):
    learner = learner_of(tmp_path, plan, feature=0, logits=0)
    assert learner.step(0)["attention"] > 0
    assert all(parameter.grad.abs().max() > 0 for parameter in learner.scorer.parameters())


def test_part_of_the_optimizers_section_keeps_the_selectors_other_values(tmp_path):
    shipped = config.load(ROOT / "configs" / "learned_selector.yaml")
    assert config.load(written(tmp_path)).optimizer == shipped.optimizer.model_copy(update={"warmup": 1})
    bare = TINY.replace("optimizer: {warmup: 1}", "").replace("steps: 4", "steps: 11")
    assert config.load(written(tmp_path, bare)).optimizer == shipped.optimizer


def test_the_shipped_configuration_is_valid():
    settings = config.load(ROOT / "configs" / "learned_selector.yaml")
    assert all("learned@" in plan for plan in settings.plans)


@pytest.mark.slow
def test_the_shipped_weights_beat_training_free_choices(model):
    """On 300 validation pictures: fewer of the full model's answers are lost than by anchor and by random."""
    from tokensieve.data import registry as data_registry

    transform = loading.load("sieve-vit-8", "scenes-v1").transform
    images = next(iter(data_registry.build_source("embedded", transform, split="val", limit=300).loader(300, 0))).images
    close = {}
    with torch.no_grad():
        full = F.normalize(model.encode_image(images), dim=-1)
        for plan in ("learned@4:32(rest=merge)", "anchor@4:32(rest=merge)", "random@4:32(rest=merge)"):
            with tokensieve.apply(model, plan):
                close[plan] = (F.normalize(model.encode_image(images), dim=-1) * full).sum(-1).mean().item()
    best, *others = close.values()
    assert best > max(others) + 1e-3, close  # far more than rounding can do
