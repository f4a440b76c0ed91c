"""The re-identification model: its branches, its modalities, its backbones, its files."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tokensieve
from tests.support.rounding import assert_near
from tokensieve.cutting.handle import Handle
from tokensieve.errors import UserError
from tokensieve.models.loading import timm as load_timm
from tokensieve.models.registry import open_tower
from tokensieve.parts import header, signature
from tokensieve.plan import Plan
from tokensieve.reid import loading
from tokensieve.reid.build import build
from tokensieve.reid.model import BRANCHES, ReidModel, Settings

MODALITIES = ("RGB", "NI", "TI")
SMALL = Settings(
    library="timm",
    backbone="vit_tiny_patch16_224",
    arguments={"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
    image_size=(64, 32),
    cameras=4,
    identities=5,
    plan="sdtps@out",
)


def inputs_for(model: ReidModel, batch: int = 3, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = {name: torch.randn(batch, 3, *model.settings.image_size, generator=generator) for name in model.modalities}
    return {**images, "cameras": torch.arange(batch) % 4}


@pytest.fixture(scope="module")
def model() -> ReidModel:
    torch.manual_seed(0)
    return build(SMALL).eval()


@torch.no_grad()
def test_branches_are_the_features_of_each_modality_side_by_side(model: ReidModel) -> None:
    """Against the backbone run on one modality at a time, without camera embedding."""
    plain = ReidModel(replace(SMALL, cameras=0), {"shared": model.backbones["shared"]}).eval()
    inputs = inputs_for(plain)
    made = plain(inputs)
    backbone = plain.backbones["shared"]
    for m, name in enumerate(MODALITIES):
        tokens = backbone.forward_features(inputs[name])  # type: ignore[operator]
        part = slice(32 * m, 32 * m + 32)
        assert_near(made.features["plain"][:, part], tokens[:, 0])
        assert_near(made.features["tokens"][:, part], tokens[:, 1:].mean(1))
    for name in BRANCHES:
        branch = plain.branches[name]
        mean, var = (
            torch.cat([getattr(norm, kind) for norm in branch.neck.values()]) for kind in ("running_mean", "running_var")
        )
        necked = (made.features[name] - mean) / (var + 1e-5).sqrt()
        assert_near(made.logits[name], necked @ branch.classifier.weight.T)


@torch.no_grad()
def test_a_plan_at_out_sees_projected_tokens_and_pools_what_is_left(model: ReidModel) -> None:
    inputs = inputs_for(model)
    seen: list[Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with tokensieve.apply(model, "sdtps@out") as handle:
        made = model(inputs)
    hook.remove()
    reduction = handle.reduction
    assert reduction is not None and reduction.k == model.parts["sdtps"].keep
    pooled = reduction.apply(seen[0][:, 1:]).mean(1)  # (M B, E)
    assert_near(made.features["tokens"], torch.cat(list(pooled.chunk(3)), dim=-1))
    assert_near(made.features["plain"], model(inputs).features["plain"])


@torch.no_grad()
@pytest.mark.parametrize(
    "plan", ["sdtps@out", "random@out:9", "grid@out:9(rest=merge)", "anchor@out:12", "random@1:9", "anchor@1:12"]
)
def test_missing_modalities(model: ReidModel, plan: str) -> None:
    """The features of what is there do not depend on what is missing but through SDTPS's guidance; the rest is 0."""
    inputs = inputs_for(model)
    with tokensieve.apply(model, plan) as handle, handle.call(samples=torch.tensor([4, 5, 6])):
        whole = model(inputs).features
        some = model({name: inputs[name] for name in ("RGB", "TI", "cameras")}).features
        one = model({name: inputs[name] for name in ("NI", "cameras")}).features
    for made, there in ((some, (0, 2)), (one, (1,))):
        for m in range(3):
            part = slice(32 * m, 32 * m + 32)
            for name in BRANCHES:
                if m not in there:
                    assert not made[name][:, part].any()
                elif name == "plain" or not plan.startswith("sdtps"):
                    assert_near(made[name][:, part], whole[name][:, part])


@torch.no_grad()
def test_a_missing_modality_is_zero_after_the_neck_and_leaves_its_statistics_alone() -> None:
    learner = build(replace(SMALL, neck="after", feature="plain")).train()
    inputs = inputs_for(learner, 4)
    learner(inputs)
    before = {name: value.clone() for name, value in learner.branches.state_dict().items()}
    learner({name: inputs[name] for name in ("RGB", "TI", "cameras")})
    moved = {name for name, value in learner.branches.state_dict().items() if not torch.equal(value, before[name])}
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert moved == {f"{branch}.neck.{name}.{kind}" for branch in BRANCHES for name in ("RGB", "TI") for kind in statistics}
    found = learner.eval().encode({"TI": inputs["TI"]})
    assert not found[:, :64].any() and found[:, 64:].all()


def test_unknown_and_no_modalities_are_told(model: ReidModel) -> None:
    inputs = inputs_for(model)
    for wrong in ({"cameras": inputs["cameras"]}, {**inputs, "IR": inputs["NI"]}):
        with pytest.raises(UserError, match="knows the modalities RGB, NI, TI"):
            model(wrong)


@torch.no_grad()
@pytest.mark.parametrize("shared", [True, False])
def test_objects_are_counted_so_that_batches_do_not_matter(shared: bool) -> None:
    """Without numbers: in one batch, in two, or with a modality less before, each object is cut in the same way."""
    counted = build(replace(SMALL, shared=shared)).eval()
    inputs = inputs_for(counted, 4)
    with tokensieve.apply(counted, "random@out:9") as handle:
        counted(inputs)
        whole = handle.kept
    for first in (MODALITIES, ("NI",)):
        with tokensieve.apply(counted, "random@out:9") as handle:
            counted({name: inputs[name][:1] for name in (*first, "cameras")})
            counted({name: value[1:] for name, value in inputs.items()})
            assert whole is not None and handle.kept is not None
            assert torch.equal(handle.kept.view(3, 3, 9), whole.view(3, 4, 9)[:, 1:])


@torch.no_grad()
def test_merging_at_the_output_pools_as_the_whole(model: ReidModel) -> None:
    """Means weighted by sizes: what is merged and not dropped has the same mean as everything."""
    inputs = inputs_for(model)
    with tokensieve.apply(model, "grid@out:9(rest=merge)"):
        merged = model(inputs).features["tokens"]
    assert_near(merged, model(inputs).features["tokens"])


@torch.no_grad()
def test_a_shared_backbone_is_cut_inside_with_all_modalities_in_view(model: ReidModel) -> None:
    inside = ReidModel(replace(SMALL, plan="sdtps@1"), {"shared": copy.deepcopy(model.backbones["shared"])}).eval()
    inputs = inputs_for(inside)
    with tokensieve.apply(inside, "sdtps@1") as handle:
        inside(inputs)
        all_scores = handle.stages[0][1].scores
        inside({name: inputs[name] for name in ("RGB", "cameras")})
        alone = handle.stages[0][1].scores
    assert [(row.layer, row.tokens_in) for row in handle.ledger] == [("1", 32)]
    assert all_scores is not None and alone is not None and not torch.allclose(all_scores[:3], alone)


def test_sdtps_stands_where_it_was_trained(model: ReidModel) -> None:
    with pytest.raises(UserError, match="were trained for @out, not for @1"):
        tokensieve.apply(model, "sdtps@1")
    for wrong in ("sdtps@out:9", "sdtps@out:50%"):
        with pytest.raises(UserError, match=r"its weights leave 7 tokens, not \d+; leave the number out"):
            tokensieve.apply(model, wrong)
    tokensieve.apply(model, "sdtps@out:7").remove()
    for wrong in ("sdtps@1,2", "sdtps@1 + sdtps@out"):
        with pytest.raises(UserError, match="one place only"):
            build(replace(SMALL, plan=wrong))


@torch.no_grad()
def test_a_method_sees_what_the_mlp_of_a_block_changes_but_not_at_the_head(model: ReidModel) -> None:
    seen: list[Tensor] = []
    kind = timm.models.vision_transformer.VisionTransformer
    backbone = next(module for module in model.modules() if isinstance(module, kind))
    norm = backbone.blocks[0].norm2.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    whole = backbone.blocks[0].register_forward_hook(lambda *args: seen.append(args[2]))
    model.encode(inputs_for(model))
    norm.remove()
    whole.remove()
    before, after = seen[0], seen[1]  # (M B, 1+N, D)
    with tokensieve.apply(model, "repshift@1:5") as handle:
        model.encode(inputs_for(model))
        kept = torch.stack([torch.as_tensor(row) for row in handle.kept])
    changed = (after - before)[:, 1:].norm(dim=-1)
    assert torch.equal(kept, changed.topk(5).indices.sort(1).values)
    with pytest.raises(UserError, match="before and after the MLP"):
        tokensieve.apply(model, "repshift@out:5")


def test_separate_backbones(model: ReidModel) -> None:
    apart = build(replace(SMALL, shared=False)).eval()
    assert list(apart.backbones) == list(MODALITIES)
    inputs = inputs_for(apart)
    for plan in ("sdtps@out", "random@out:9", "grid@out:9(rest=merge)"):
        with tokensieve.apply(apart, plan) as handle:
            made = apart(inputs)
            with pytest.raises(UserError, match="another plan is attached"):
                tokensieve.apply(apart, "random@out:5")
        assert made.features["tokens"].shape == (3, 96) and handle.ledger[-1].tokens_in == 32
    assert "forward" not in apart.head.__dict__
    assert not torch.allclose(made.features["plain"][:, :32], model(inputs).features["plain"][:, :32])
    for plan in ("random@1:9", "anchor@out:12", "random:9"):
        with pytest.raises((UserError, tokensieve.Uncuttable), match="backbone of its own"):
            tokensieve.apply(apart, plan)


def test_every_backbone_is_signed_and_only_our_models_have_parts_of_their_own() -> None:
    apart = build(replace(SMALL, shared=False))
    before = signature.model_signature(apart)
    assert len(before["tower"]) == 6
    with torch.no_grad():
        next(open_tower(apart.backbones["TI"]).blocks[1].module.parameters()).add_(1)
    assert not signature.signatures_match(signature.model_signature(apart), before)
    stranger = build(replace(SMALL, plan="none")).backbones["shared"]
    stranger.parts = apart.parts
    with pytest.raises(UserError, match="sdtps needs trained weights"):
        tokensieve.apply(stranger, "sdtps@out")


@torch.no_grad()
def test_cameras(model: ReidModel) -> None:
    inputs = inputs_for(model)
    hooks = [len(block.module._forward_pre_hooks) for block in open_tower(model).blocks]
    made = model(inputs).features["plain"]
    other = model({**inputs, "cameras": (inputs["cameras"] + 1) % 4}).features["plain"]
    unknown = model({name: inputs[name] for name in MODALITIES}).features["plain"]
    assert not torch.allclose(made, other) and torch.isfinite(unknown).all()
    with pytest.raises(UserError, match="camera 6 of a model that was trained on 4"):
        model({**inputs, "cameras": inputs["cameras"] + 3})
    assert [len(block.module._forward_pre_hooks) for block in open_tower(model).blocks] == hooks


def test_every_weight_learns_with_the_plan_on() -> None:
    for gumbel in (False, True):
        learner = build(replace(SMALL, gumbel=gumbel)).train()
        handle = Handle(learner, Plan.parse(learner.plan), 0, parts=learner.parts)
        with handle:
            made = learner(inputs_for(learner, 4))
        (sum(x.square().mean() for x in made.features.values()) + sum(x[:, 0].mean() for x in made.logits.values())).backward()
        for name, parameter in learner.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
                assert parameter.grad.any() or "head" in name, name


@torch.no_grad()
def test_files(model: ReidModel, tmp_path: Path) -> None:
    folder = tmp_path / "ein Modell ü"
    loading.save(model, folder)
    loaded = loading.load(str(folder))
    inputs = inputs_for(model)
    assert loaded.model.settings == model.settings and loaded.fingerprint
    with tokensieve.apply(model, model.plan), tokensieve.apply(loaded.model, loaded.model.plan):
        assert torch.equal(loaded.model.encode(inputs), model.encode(inputs))
    weights = (folder / "model.safetensors").read_bytes()
    for wrong in (weights[:-100], weights[:-1] + bytes([weights[-1] ^ 1])):
        (folder / "model.safetensors").write_bytes(wrong)
        with pytest.raises(UserError, match=r"damaged, (it is not as it was saved|or not a safetensors file)"):
            loading.load(str(folder))
    (folder / "config.json").write_text(json.dumps({"format": "something else"}))
    with pytest.raises(UserError, match="holds no re-identification model"):
        loading.load(str(folder))
    with pytest.raises(UserError, match="sieve-reid-6"):
        loading.check_model("sieve-reid")


def rewrite(folder: Path, config: dict[str, Any], state: dict[str, Tensor] | None = None) -> None:
    """The model with other settings or weights, and the right checksum."""
    if state is not None:
        save_file(state, folder / "model.safetensors")
    config = {key: value for key, value in config.items() if key != "sha256"}
    checksum = header.checksum(config, [(folder / "model.safetensors").read_bytes()])
    (folder / "config.json").write_text(json.dumps(config | {"sha256": checksum}))


def test_changed_settings_are_found_and_nonsense_is_refused(model: ReidModel, tmp_path: Path) -> None:
    loading.save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    changes: tuple[dict[str, Any], ...] = (
        {"beta": 0.35},
        {"beta": math.nan},
        {"tau": "1"},
        {"image_size": [10**6, 10**6]},
        {"image_size": 32},
        {"cameras": -1},
        {"modalities": ["a.b"]},
        {"modalities": ["RGB"] * 2},
        {"feature": "plan"},
        {"neck": None},
        {"library": "pickle"},
        {"backbone": "vit_tiny_patch16_224.augreg_in21k"},
        {"backbone": "hf-hub:user/model"},
        {"backbone": None},
        {"unknown": 1},
        {"std": [0, 0, 0]},
        {"plan": "nonsense@out"},
        {"library": "hf", "arguments": {}},
        {"library": "hf", "arguments": {"model_type": "clip_vision_model", "attn_implementation": "user/kernel"}},
        {"library": "hf", "arguments": {"model_type": "clip_vision_model", "hidden_size": 10**6}},
        *({"arguments": {**config["arguments"], **more}} for more in ARGUMENTS),
    )
    for change in changes:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=r"not finite|damaged, it is not as it was saved"):
            loading.read(str(tmp_path))
        if "beta" in change:
            continue  # 0.35 is good, but not what was saved; NaN has no checksum
        rewrite(tmp_path, config | change)
        with pytest.raises(UserError):
            loading.read(str(tmp_path))
    rewrite(tmp_path, config)
    assert loading.read(str(tmp_path)).settings == model.settings


ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"embed_dim": 10**9},
    {"embed_dim": 65_536, "num_heads": 1},
    {"depth": 10**6},
    {"checkpoint_path": "weights.pt"},
    {"pretrained_cfg_overlay": {"file": "weights.pt"}},
    {"patch_size": 0},
)


def test_weights_of_other_types_and_shapes_are_refused(model: ReidModel, tmp_path: Path) -> None:
    loading.save(model, tmp_path)
    config, state = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    camera = state["camera"]
    for value, told in (
        (camera.double(), "is of type float64"),
        (camera.int(), "is of type int32"),
        (camera[:1].contiguous(), "is .1, "),
        (camera * float("nan"), "NaN or infinity"),
        (None, "it lacks camera"),
    ):
        changed = {key: value if key == "camera" else old for key, old in state.items()}
        rewrite(tmp_path, config, {key: tensor for key, tensor in changed.items() if tensor is not None})
        with pytest.raises(UserError, match=told):
            loading.read(str(tmp_path))


def test_models_of_the_first_version_still_load(model: ReidModel, tmp_path: Path) -> None:
    loading.save(model, tmp_path)
    config, content = json.loads((tmp_path / "config.json").read_text()), (tmp_path / "model.safetensors").read_bytes()
    del config["sha256"]
    for more in ({}, {"sha256": hashlib.sha256(content).hexdigest()}):
        (tmp_path / "config.json").write_text(json.dumps(config | {"format": loading.FIRST_FORMAT} | more))
        assert loading.read(str(tmp_path)).settings == model.settings
    (tmp_path / "config.json").write_text(json.dumps(config | {"format": loading.FIRST_FORMAT, "sha256": "0" * 64}))
    with pytest.raises(UserError, match="not as it was saved"):
        loading.read(str(tmp_path))


@torch.no_grad()
def test_small_files_are_as_good(model: ReidModel, tmp_path: Path) -> None:
    loading.save(model, tmp_path / "whole")
    loading.save(model, tmp_path / "small", small=True)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("small", "whole")]
    small, inputs = loading.read(str(tmp_path / "small")), inputs_for(model)
    torch.testing.assert_close(small.encode(inputs), model.encode(inputs), atol=0.02, rtol=0)
    assert sizes[0] < 0.6 * sizes[1] and small.settings.identities == 0
    with pytest.raises(UserError, match="without classifiers"):
        small(inputs)


def test_a_backbone_begins_with_an_earlier_training(model: ReidModel, tmp_path: Path) -> None:
    loading.save(model, tmp_path / "first")
    again = build(replace(SMALL, identities=9, plan="none", shared=False), str(tmp_path / "first"))
    for name, value in model.backbones["shared"].state_dict().items():
        for modality in MODALITIES:
            assert torch.equal(again.backbones[modality].state_dict()[name], value)
    assert not torch.equal(again.camera, model.camera)  # other cameras
    with pytest.raises(UserError, match="another one"):
        build(replace(SMALL, arguments={**SMALL.arguments, "embed_dim": 48}), str(tmp_path / "first"))


def test_what_a_library_remarks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As open_clip does of openai's weights in a ViT-B-16 with another GELU."""
    stock = load_timm.create

    def create(*args: Any, **options: Any) -> Any:
        warnings.warn("QuickGELU mismatch", stacklevel=1)
        return stock(*args, **options)

    monkeypatch.setattr(load_timm, "create", create)
    with pytest.warns(UserWarning, match="QuickGELU mismatch") as told:
        build(replace(SMALL, shared=False))
    assert len(told) == 1


def test_a_model_is_read_without_fetching_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fetched = []
    stock = timm.create_model
    monkeypatch.setattr(load_timm, "_check_hub", lambda name, cache_dir: None)
    monkeypatch.setattr(
        timm, "create_model", lambda name, pretrained, **more: fetched.append((name, pretrained)) or stock(name, **more)
    )
    built = build(replace(SMALL, backbone="vit_tiny_patch16_224.augreg_in21k"))
    loading.save(built, tmp_path)
    loading.read(str(tmp_path))
    read = [("vit_tiny_patch16_224", False)] * 2  # without memory, and with it
    assert fetched == [("vit_tiny_patch16_224.augreg_in21k", True), *read]
    for library in ("timm", "open_clip"):
        with pytest.raises(UserError, match="hf-hub:some/model brings its own weights"):
            build(replace(SMALL, library=library, backbone="hf-hub:some/model"))


def test_files_of_timm_are_interpolated_and_embedded_blocks_must_fit(tmp_path: Path) -> None:
    small = replace(SMALL, image_size=(32, 32), plan="none")
    before = build(small).backbones["shared"]
    torch.save(before.state_dict(), tmp_path / "weights.pt")
    larger = build(replace(small, image_size=(64, 32)), str(tmp_path / "weights.pt")).backbones["shared"]
    assert torch.equal(larger.blocks[1].attn.qkv.weight, before.blocks[1].attn.qkv.weight)  # type: ignore[index,union-attr]
    assert torch.equal(larger.pos_embed[:, 0], before.pos_embed[:, 0]) and larger.pos_embed.shape[1] == 33  # type: ignore[index,union-attr]
    clip = {"patch_size": 8, "embed_dim": 128, "depth": 1, "num_heads": 4, "pre_norm": True}
    build(replace(small, arguments=clip), "scenes-v1")
    for wrong, told in (
        ({"pre_norm": False}, "do not fit .*norm_pre"),
        ({"num_heads": 2}, "heads of width 32; num_heads: 2 of embed_dim: 128"),
        ({"depth": 9}, r"do not fit .*blocks\.8"),
    ):
        with pytest.raises(UserError, match=told):
            build(replace(small, arguments=clip | wrong), "scenes-v1")


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "backbone", "size", "grid", "width"),
    [
        ("open_clip", "ViT-B-16-quickgelu", (256, 128), (16, 8), 512),
        ("hf", "clip-vit-base-patch16", (256, 128), (16, 8), 512),
        ("hf", "dinov2-base", (224, 112), (16, 8), 768),
        ("timm", "vit_small_patch16_224", (128, 256), (8, 16), 384),
    ],
)
def test_backbones_of_every_library(
    library: str, backbone: str, size: tuple[int, int], grid: tuple[int, int], width: int, tmp_path: Path
) -> None:
    model = build(Settings(library, backbone, size, cameras=2, plan="sdtps@out")).eval()
    assert model.grid == grid and model.width == width
    inputs = {name: torch.randn(1, 3, *size) for name in MODALITIES} | {"cameras": torch.tensor([1])}
    with tokensieve.apply(model, model.plan) as handle:
        feature = model.encode(inputs)
    left = int(grid[0] * grid[1] * 0.2) + 1
    assert feature.shape == (1, 6 * width) and handle.ledger[-1].tokens_out == left
    loading.save(model, tmp_path)
    again = loading.read(str(tmp_path))  # no library's files are needed for that
    with tokensieve.apply(again, again.plan):
        assert torch.equal(again.encode(inputs), feature)


@torch.no_grad()
@pytest.mark.slow
def test_position_embeddings_are_interpolated_not_drawn_anew(tmp_path: Path) -> None:
    """Weights of a square tower in one of 16 x 8 patches: each embedding is near those that lie around its place."""
    import open_clip

    stock = open_clip.create_model("ViT-B-32-256", force_image_size=64 * 4)  # 8 x 8 patches
    grid = torch.arange(8.0)
    stock.visual.positional_embedding.zero_()
    stock.visual.positional_embedding[1:, 0] = grid[:, None].expand(8, 8).flatten()  # its row
    stock.visual.positional_embedding[1:, 1] = grid[None].expand(8, 8).flatten()  # its column
    torch.save(stock.state_dict(), tmp_path / "weights.pt")
    model = build(Settings("open_clip", "ViT-B-32-256", (512, 256)), str(tmp_path / "weights.pt"))
    places = model.backbones["shared"].positional_embedding[1:].reshape(16, 8, -1)  # type: ignore[index,operator,union-attr]
    assert torch.equal(model.backbones["shared"].conv1.weight, stock.visual.conv1.weight)  # type: ignore[union-attr]
    rows = (torch.arange(16) + 0.5) / 2 - 0.5
    torch.testing.assert_close(places[3:-3, :, 0], rows[3:-3, None].expand(-1, 8), atol=0.1, rtol=0)
    torch.testing.assert_close(places[:, 2:-2, 1], grid[None, 2:-2].expand(16, -1), atol=0.1, rtol=0)
