"""One apply for every family: stock without a plan, and with one equal to the stock blocks run slowly on gathered tokens."""

import contextlib
from argparse import Namespace
from dataclasses import dataclass
from operator import attrgetter

import pytest
import timm.layers
import torch
import torch.nn.functional as F
import transformers
from open_clip.timm_model import TimmModel
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock, VisionTransformer
from torch import nn

import tokensieve
from tests.support.paths import ROOT
from tests.support.reference import anchor_choice
from tests.support.rounding import assert_near
from tests.support.states import assert_untouched, snapshot
from tokensieve import Reduction, Uncuttable, UserError
from tokensieve.core import View
from tokensieve.measuring import families
from tokensieve.methods.registry import REGISTRY, method
from tokensieve.models.families import TINY, VLM_FAMILIES, Example
from tokensieve.models.registry import open_tower
from tokensieve.scoring import Attention

WIDTH, DEPTH = 32, 4
TIMM = {"img_size": (48, 32), "patch_size": 8, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": 2, "num_classes": 5}
ROPE = TIMM | {"use_rot_pos_emb": True, "mlp_ratio": 2.0}
HF = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": 2, "patch_size": 8, "image_size": 40}
CLIP = HF | {"intermediate_size": 48, "projection_dim": 16}
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 64}


@dataclass
class Variant:
    """How to build a tiny model, and what is true of it."""

    build: object
    blocks: str = "blocks"
    prefix: int = 1
    coarse: str = "cls"  # "cls", "query" or "received"
    run: object = None  # (model, images) -> tensor to compare
    size: tuple[int, int] = (48, 32)


def vit(**changes):
    return lambda: VisionTransformer(**(TIMM | changes))


def eva(**changes):
    return lambda: Eva(**(ROPE | changes))


def wrapped(trunk):
    def build():
        visual = TimmModel("test_vit", 16, pool="avg", proj="linear")
        visual.trunk = trunk()
        visual.trunk.reset_classifier(0)
        visual.head = nn.Sequential(nn.Linear(WIDTH, 16))
        return visual

    return build


def hf(name, config, **settings):
    """A bare model, or one of text and vision where settings are for the vision part."""
    return lambda: getattr(transformers, name)(getattr(transformers, config)(**settings))


def both(name, **settings):
    def build():
        kind = getattr(transformers, f"{name}Config")
        return getattr(transformers, f"{name}Model")(kind(text_config=TEXT, vision_config=settings, projection_dim=16))

    return build


def classifier(name, **settings):
    kind = getattr(transformers, f"{name}Config")
    return lambda: getattr(transformers, f"{name}ForImageClassification")(kind(vision_config=settings, text_config=TEXT))


def pooled(model, images, **kwargs):
    return model(pixel_values=images, **kwargs).pooler_output


def logits(model, images):
    return model(pixel_values=images).logits


def interpolated(model, images):
    return pooled(model, images, interpolate_pos_encoding=True)


def features(model, images):
    out = model.get_image_features(pixel_values=images)
    return out if isinstance(out, torch.Tensor) else out.pooler_output


def patches_of(images, padding=0):
    """What SigLIP2's processor makes of images: flat patches, a mask, and the shape of each grid."""
    b, _, height, width = images.shape
    h, w = height // 8, width // 8
    cells = [images[:, :, 8 * i : 8 * i + 8, 8 * j : 8 * j + 8] for i in range(h) for j in range(w)]
    flat = torch.stack([cell.permute(0, 2, 3, 1).flatten(1) for cell in cells], dim=1)
    mask = torch.ones(b, h * w + padding, dtype=torch.long)
    mask[:, h * w :] = 0
    shapes = torch.tensor([[h, w]] * b)
    return {"pixel_values": F.pad(flat, (0, 0, 0, padding)), "pixel_attention_mask": mask, "spatial_shapes": shapes}


def flexible(model, images, padding=0):
    return model(**patches_of(images, padding)).pooler_output


LAYERS, SQUARE = "encoder.layers", (40, 40)
SIGLIP = {key: value for key, value in CLIP.items() if key != "projection_dim"}
NAFLEX = {key: value for key, value in SIGLIP.items() if key != "image_size"} | {"num_patches": 25}
VARIANTS = {
    "timm_cls": Variant(vit()),
    "timm_pre_norm": Variant(vit(pre_norm=True, qk_norm=True, init_values=0.5, scale_attn_norm=True, scale_mlp_norm=True)),
    "timm_avg": Variant(vit(class_token=False, global_pool="avg"), prefix=0, coarse="received"),
    "timm_avg_cls": Variant(vit(global_pool="avg", fc_norm=False)),
    "timm_avgmax_prefix": Variant(vit(global_pool="avgmax", pool_include_prefix=True)),
    "timm_registers": Variant(vit(reg_tokens=3, no_embed_class=True), prefix=4),
    "timm_registers_alone": Variant(vit(class_token=False, reg_tokens=2, global_pool="avg"), prefix=2, coarse="received"),
    "timm_map": Variant(vit(class_token=False, global_pool="map"), prefix=0, coarse="query"),
    "timm_map_registers": Variant(vit(class_token=False, reg_tokens=2, global_pool="map"), prefix=2, coarse="query"),
    "timm_norm_after": Variant(vit(block_fn=ResPostBlock, init_values=0.7)),
    "timm_distilled": Variant(lambda: VisionTransformerDistilled(**TIMM), prefix=2),
    "timm_dynamic": Variant(vit(dynamic_img_size=True), size=(24, 56)),
    "eva": Variant(eva(swiglu_mlp=True, scale_mlp=True, qkv_fused=False)),
    "eva_fused": Variant(eva(scale_attn_inner=True, init_values=0.5)),
    "eva_mixed": Variant(eva(rope_type="mixed", attn_type="rope")),
    "eva_dinov3": Variant(eva(rope_type="dinov3", rope_rotate_half=True, num_reg_tokens=3, use_abs_pos_emb=False), prefix=4),
    "eva_gap": Variant(
        eva(class_token=False, num_reg_tokens=1, global_pool="avg", no_embed_class=True), prefix=1, coarse="received"
    ),
    "eva_norm_after": Variant(eva(use_post_norm=True)),
    "eva_map": Variant(eva(class_token=False, global_pool="map"), prefix=0, coarse="query"),
    "eva_dynamic": Variant(eva(dynamic_img_size=True), size=(24, 56)),
    "open_clip_siglip": Variant(
        wrapped(vit(class_token=False, global_pool="map")), blocks="trunk.blocks", prefix=0, coarse="query"
    ),
    "open_clip_eva": Variant(wrapped(eva(swiglu_mlp=True)), blocks="trunk.blocks"),
    "hf_clip": Variant(both("CLIP", **CLIP), "vision_model." + LAYERS, run=features, size=SQUARE),
    "hf_clip_eager": Variant(
        hf("CLIPVisionModel", "CLIPVisionConfig", **CLIP, attn_implementation="eager"), LAYERS, run=pooled, size=SQUARE
    ),
    "hf_clip_projection": Variant(
        hf("CLIPVisionModelWithProjection", "CLIPVisionConfig", **CLIP),
        "vision_model." + LAYERS,
        run=lambda model, images: model(pixel_values=images, interpolate_pos_encoding=True).image_embeds,
    ),
    "hf_clip_classifier": Variant(classifier("CLIP", **CLIP), "vision_model." + LAYERS, run=logits, size=SQUARE),
    "hf_siglip": Variant(both("Siglip", **SIGLIP), "vision_model." + LAYERS, 0, "query", features, SQUARE),
    "hf_siglip_oblong": Variant(
        hf("SiglipVisionModel", "SiglipVisionConfig", **SIGLIP), LAYERS, 0, "query", interpolated, (24, 56)
    ),
    "hf_siglip_no_head": Variant(
        hf("SiglipVisionModel", "SiglipVisionConfig", **SIGLIP, vision_use_head=False),
        LAYERS,
        0,
        "received",
        lambda model, images: model(pixel_values=images).last_hidden_state,
        SQUARE,
    ),
    "hf_siglip_classifier": Variant(classifier("Siglip", **SIGLIP), "vision_model." + LAYERS, 0, "query", logits, SQUARE),
    "hf_siglip2": Variant(hf("Siglip2VisionModel", "Siglip2VisionConfig", **NAFLEX), LAYERS, 0, "query", flexible, (24, 56)),
    "hf_siglip2_padded": Variant(
        hf("Siglip2VisionModel", "Siglip2VisionConfig", **NAFLEX),
        LAYERS,
        0,
        "query",
        lambda model, images: flexible(model, images, padding=5),
    ),
    "hf_vit": Variant(hf("ViTModel", "ViTConfig", **(HF | {"image_size": (48, 32)})), "layers", run=pooled),
    "hf_vit_classifier": Variant(hf("ViTForImageClassification", "ViTConfig", **HF), "vit.layers", run=logits, size=SQUARE),
    "hf_deit": Variant(
        hf("DeiTForImageClassificationWithTeacher", "DeiTConfig", **HF), "deit.layers", 2, run=logits, size=SQUARE
    ),
    "hf_dinov2": Variant(hf("Dinov2Model", "Dinov2Config", **HF), "encoder.layer", run=pooled),
    "hf_dinov2_classifier": Variant(
        hf("Dinov2ForImageClassification", "Dinov2Config", **HF, use_swiglu_ffn=True), "dinov2.encoder.layer", run=logits
    ),
    "hf_dinov2_registers": Variant(
        hf("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", **HF, num_register_tokens=3), "encoder.layer", 4, run=pooled
    ),
    "hf_dinov3": Variant(
        hf("DINOv3ViTModel", "DINOv3ViTConfig", **HF, num_register_tokens=3, intermediate_size=48, use_gated_mlp=True),
        "model.layer",
        4,
        run=pooled,
    ),
}


def make(name, dtype=torch.float32, seed=1):
    """The tiny model, its weights made large enough that attention is not flat, and three images.

    In float64 for what is computed in two ways: rounding errors of float32 grow from block to block, as much as the CPU's
    kernels differ, and near ties of scores fall either way.
    """
    variant = VARIANTS[name]
    torch.manual_seed(0)
    model = variant.build().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "text" not in parameter_name:
                parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 2 else 0.5))
    images = torch.randn(3, 3, *variant.size, generator=torch.Generator().manual_seed(seed))
    if name == "eva_mixed":
        dtype = torch.float32  # timm computes its angles in no other type
    return model.to(dtype), images.to(dtype)


def run(name, model, images):
    with torch.no_grad():
        return (VARIANTS[name].run or (lambda m, x: m(x)))(model, images)


def blocks_of(name, model):
    return list(attrgetter(VARIANTS[name].blocks)(model))


@contextlib.contextmanager
def recorded(monkeypatch):
    """q and k of every fused attention that the stock model runs."""
    calls, stock = [], F.scaled_dot_product_attention

    def record(q, k, v, *args, **kwargs):
        calls.append((q, k))
        return stock(q, k, v, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", record)
        yield calls


def table_rows(table, index):
    """Rotary angles of the chosen patches, image by image: (B, H or 1, K, d)."""
    rows = [table[b] if table.dim() == 4 else table for b in range(len(index))]
    rows = [row[..., index[b], :] for b, row in enumerate(rows)]
    return torch.stack([row if row.dim() == 3 else row[None] for row in rows])


def slow(name, model, images, layer, choose, n):
    """The stock model with its own blocks; after `layer` of them choose(block's q and k, tokens) -> (B, K) decides.

    Everything is done by hooks on stock modules, none by the package.
    """
    prefix, blocks, chosen, hooks = VARIANTS[name].prefix, blocks_of(name, model), [], []

    def cut(module, args, kwargs):
        x = args[0][:, : prefix + n]
        index = choose(x[:, prefix:])
        chosen.append(index)
        x = torch.stack([torch.cat([x[b, :prefix], x[b, prefix:][index[b]]]) for b in range(len(x))])
        return (x, *args[1:]), kwargs

    def follow(module, args, kwargs):
        kwargs = dict(kwargs)
        if kwargs.get("rope") is not None:
            kwargs["rope"] = table_rows(kwargs["rope"], chosen[0])
        if kwargs.get("position_embeddings") is not None:
            kwargs["position_embeddings"] = tuple(table_rows(t, chosen[0]) for t in kwargs["position_embeddings"])
        return (args[0], *(None for _ in args[1:])), kwargs

    hooks.append(blocks[layer].register_forward_pre_hook(cut, with_kwargs=True))
    hooks += [block.register_forward_pre_hook(follow, with_kwargs=True) for block in blocks[layer:]]
    if "siglip2" in name:
        hooks.append(model.head.register_forward_pre_hook(lambda m, args: args[:1]))
    try:
        return run(name, model, images), chosen[0]
    finally:
        for hook in hooks:
            hook.remove()


def matrix_of(q, k):
    """(B, H, T, d) twice -> (B, T, T), head by head, mean over heads."""
    heads = [(q[:, h] @ k[:, h].transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1) for h in range(q.shape[1])]
    return sum(heads) / len(heads)


def pooling_row(name, model, tokens, log_sizes=None):
    """How the pooling head's query attends to the tokens, by the formula: (B, N, D) -> (B, N)."""
    net = getattr(model, "trunk", model)
    if name.startswith("hf"):
        net = getattr(model, "vision_model", model)
        x, attention = net.post_layernorm(tokens), net.head.attention
        weights, offsets = projections(attention)
        q, k, heads = net.head.probe[0] @ weights[0].T + offsets[0], x @ weights[1].T + offsets[1], attention.num_heads
    else:
        pool = net.attn_pool
        x = net.norm(tokens)
        q, k, heads = pool.q(pool.latent[0]), pool.kv(x)[..., :WIDTH], pool.num_heads
    d, row = WIDTH // heads, 0
    for h in range(heads):
        part = slice(h * d, h * d + d)
        scores = (q[:, part] @ k[..., part].transpose(1, 2))[:, 0] * d**-0.5
        row = row + (scores if log_sizes is None else scores + log_sizes).softmax(-1) / heads
    return row


def projections(attention):
    return attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)


def coarse_of(name, model, matrix, tokens):
    """A_coarse by the formulas: (B, N)."""
    variant = VARIANTS[name]
    if variant.coarse == "cls":
        return matrix[:, 0, variant.prefix :]
    if variant.coarse == "query":
        return pooling_row(name, model, tokens)
    return matrix.mean(1)[:, variant.prefix :]


def patches(name):
    h, w = VARIANTS[name].size
    return (h // 8) * (w // 8)


# --- the stock model stays the stock model --------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_without_a_plan_and_after_one_it_is_stock_to_the_bit(name):
    model, images = make(name)
    stock, before = run(name, model, images), snapshot(model)
    with tokensieve.apply(model, "none"):
        assert torch.equal(run(name, model, images), stock)
    with tokensieve.apply(model, "anchor@2:7(k=3,rest=merge) + grid@3.attn:5"):
        changed = run(name, model, images)
        assert list(model.state_dict()) == list(before[0])
    assert_untouched(model, before)
    assert torch.equal(run(name, model, images), stock)
    assert changed.shape[-1] == stock.shape[-1] and torch.isfinite(changed).all()
    assert not torch.allclose(changed[:, :1], stock[:, :1])


@pytest.mark.parametrize("name", VARIANTS)
def test_opened_blocks_are_the_stock_blocks(name):
    model, images = make(name, torch.float64)
    tower = open_tower(model)
    seen = []
    hooks = [
        block.module.register_forward_hook(lambda m, a, k, y, block=block: seen.append((block, a, k, y)), with_kwargs=True)
        for block in tower.blocks
    ]
    run(name, model, images)
    for hook in hooks:
        hook.remove()
    assert len(seen) == tower.depth == DEPTH
    for block, (x, *args), kwargs, stock in seen:
        if "siglip2" in name:
            x, stock = x[:, : patches(name)], stock[:, : patches(name)]
        with torch.no_grad():
            args, kwargs = block.select_inputs(None, tuple(args), kwargs)
            y, _ = block.attend(x, None, *args, **kwargs)
            assert_near(block.mlp(y).float(), stock)


# --- cuts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["grid@2:7", "random@2:7"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_cut_is_the_stock_blocks_on_the_gathered_tokens(name, plan):
    model, images = make(name, torch.float64)
    with tokensieve.apply(model, plan) as handle:
        out = run(name, model, images)
    assert handle.kept.shape == (3, 7) and handle.kept.max() < patches(name)
    expected, _ = slow(name, model, images, 2, lambda tokens: handle.kept, patches(name))
    assert_near(out.float(), expected)
    assert [(row.tokens_in, row.tokens_out) for row in handle.ledger] == [(patches(name), 7)]


@pytest.mark.parametrize("name", [name for name in VARIANTS if "eager" not in name])
def test_anchor_is_the_formula_with_the_models_own_coarse_row(name, monkeypatch):
    model, images = make(name, torch.float64, seed=7 if name == "eva_norm_after" else 1)  # the reference refuses near ties
    with tokensieve.apply(model, "anchor@2(k=3,m=5)") as handle:
        out = run(name, model, images)
    prefix, n = VARIANTS[name].prefix, patches(name)
    with recorded(monkeypatch) as calls:

        def choose(tokens):
            q, k = (part[:, :, : prefix + n] for part in calls[1])
            matrix = matrix_of(q, k)
            if calls[1][0].shape[2] > prefix + n:  # SigLIP2's padding is masked, so leaving it out is the same softmax
                assert "padded" in name
            coarse = coarse_of(name, model, matrix, tokens)
            kept = []
            for b in range(len(tokens)):
                whole = torch.zeros(1 + n, 1 + n, dtype=torch.float64)  # the reference reads its coarse row off row 0
                whole[0, 1:], whole[1:, 1:] = coarse[b], matrix[b, prefix:, prefix:]
                kept.append(anchor_choice(whole, tokens[b], 3, 5, 0.5)[0])
            return torch.tensor(kept)

        expected, kept = slow(name, model, images, 2, choose, n)
    assert torch.equal(handle.kept, kept)
    assert_near(out.float(), expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_coarse_row_in_a_view(name):
    """CLS row, pooling query (with log sizes) or attention received, straight from a view at the cut."""
    model, images = make(name, torch.float64)
    seen = []

    @method(needs=("attention",))
    def looks(view, keep):
        seen.append((view, view.coarse()))
        return Reduction.keep(torch.arange(keep).expand(len(view.tokens), -1), view.n)

    try:
        with tokensieve.apply(model, "grid@1:9(rest=merge) + looks@2:5"):
            run(name, model, images)
    finally:
        REGISTRY.remove("looks")
    ((view, coarse),) = seen
    prefix, attention = VARIANTS[name].prefix, view.attention
    logits = attention.q @ attention.k.transpose(2, 3) * attention.scale
    logits = logits + F.pad(view.sizes.log(), (prefix, 0))[:, None, None]
    matrix = logits.softmax(-1).mean(1)
    if VARIANTS[name].coarse == "query":
        with torch.no_grad():
            expected = pooling_row(name, model, view.tokens, view.sizes.log())
        assert_near(coarse.sum(-1).float(), torch.ones(3))
    else:
        expected = coarse_of(name, model, matrix, view.tokens)
    assert_near(coarse.float(), expected)
    if VARIANTS[name].coarse != "cls":
        with pytest.raises(ValueError, match="no CLS token"):
            attention.cls_row()


@pytest.mark.parametrize(
    "plan",
    ["anchor@2:7(k=2,rest=merge)"]
    + [pytest.param(plan, marks=pytest.mark.slow) for plan in ("random@0:9", "pool@2.attn:6", "anchor@out:6(k=2,rest=fuse)")],
)
@pytest.mark.parametrize("name", VARIANTS)
def test_a_batch_is_its_images_one_by_one(name, plan):
    model, images = make(name, torch.float64)
    with tokensieve.apply(model, plan):
        together = run(name, model, images)
    with tokensieve.apply(model, plan):
        alone = torch.cat([run(name, model, images[b : b + 1]) for b in range(3)])
    assert_near(together.float(), alone, steps=1000)


@pytest.mark.parametrize("name", VARIANTS)
def test_prefix_tokens_are_never_cut(name):
    model, images = make(name)
    lengths = []
    hook = blocks_of(name, model)[3].register_forward_hook(lambda m, a, y: lengths.append(y.shape[1]))
    with tokensieve.apply(model, "random@2:1") as handle:
        run(name, model, images)
    hook.remove()
    assert lengths == [VARIANTS[name].prefix + 1] and handle.kept.shape == (3, 1)
    tower = open_tower(model)
    assert tower.prefix == VARIANTS[name].prefix and tower.has_cls == (VARIANTS[name].coarse == "cls")


@pytest.mark.parametrize("name", VARIANTS)
def test_merged_tokens_count_as_often_as_they_stand_for_patches(name):
    """Merging equal tokens into groups of 1, 2 and 3 changes nothing: later attention and pooling weigh by size."""
    if "avgmax" in name:
        pytest.skip("prefix tokens take part in its mean, so that it is no mean of patches")
    model, images = make(name, torch.float64)
    prefix, n, blocks = VARIANTS[name].prefix, patches(name), blocks_of(name, model)
    groups = torch.tensor([g for g in range(n) for _ in range(1 + g % 3)][:n])  # 0, 1, 1, 2, 2, 2, 3, ...
    first = torch.tensor([groups.tolist().index(g) for g in range(int(groups.max()) + 1)])

    def equal(module, args, kwargs):
        kwargs = dict(kwargs)
        for key in ("rope", "position_embeddings"):  # one angle for all: a merged token has but one
            if kwargs.get(key) is not None:
                tables = kwargs[key] if isinstance(kwargs[key], tuple) else (kwargs[key],)
                tables = tuple(table[..., :1, :].expand_as(table) for table in tables)
                kwargs[key] = tables if key == "position_embeddings" else tables[0]
        x = args[0]
        if module is blocks[1]:
            x = torch.cat([x[:, :prefix], x[:, prefix : prefix + n][:, first[groups]], x[:, prefix + n :]], dim=1)
        return (x, *args[1:]), kwargs

    for block in blocks:
        block.register_forward_pre_hook(equal, with_kwargs=True)

    @method(selects=False)
    def joined(view, keep):
        batch = len(view.tokens)
        return Reduction.merge(groups.expand(batch, -1), first.expand(batch, -1), view.sizes_or_ones())

    try:
        full = run(name, model, images)
        outs = []
        for plan in ("joined@2:8", "joined@out:8"):
            with tokensieve.apply(model, plan) as handle:
                outs.append(run(name, model, images))
            assert handle.ledger[0].tokens_out == len(first)
    finally:
        REGISTRY.remove("joined")
    for out in outs:
        if "no_head" in name:
            full = full[:, first] if full.shape[1] == n else full
        assert_near(out.float(), full, steps=1000)


@pytest.mark.parametrize("name", VARIANTS)
def test_zero_fill_excludes_the_rest_from_pooling(name):
    model, images = make(name, torch.float64)
    if open_tower(model).pools_cls or "no_head" in name or "avgmax" in name:
        pytest.skip("no pooling over patches")
    outs = []
    for plan in ("grid@out:6(rest=zero)", "grid@out:6"):
        with tokensieve.apply(model, plan):
            outs.append(run(name, model, images))
    assert_near(outs[0].float(), outs[1], steps=1000)


@pytest.mark.parametrize("name", VARIANTS)
def test_bf16(name):
    model, images = make(name)
    with tokensieve.apply(model, "anchor@2:7(k=3,rest=merge) + grid@3:4"), torch.autocast("cpu", torch.bfloat16):
        mixed = run(name, model, images)
    assert torch.isfinite(mixed).all()
    if name == "eva_mixed":
        return  # timm itself cannot compute mixed rotary angles in bf16
    model.bfloat16()
    with tokensieve.apply(model, "anchor@2:7(k=3,rest=merge) + grid@3:4") as handle:
        out = run(name, model, images.bfloat16())
    assert out.dtype == torch.bfloat16 and torch.isfinite(out).all() and handle.kept.shape == (3, 4)


@pytest.mark.parametrize("name", VARIANTS)
def test_project_gives_the_feature_of_a_sequence_of_one_token(name):
    """What the model makes of tokens that are all alike (registers apart, which no patch stands for)."""
    from tokensieve.models.features import encode_image

    if "no_head" in name or "avgmax" in name:
        pytest.skip("no pooled feature of its patches")
    model, images = make(name, torch.float64)
    tower = open_tower(model)
    token, inner = torch.randn(3, 1, WIDTH).to(images.dtype), getattr(model, "deit", model)
    own = ("hf_siglip_oblong", "hf_clip_projection", "open_clip_siglip", "open_clip_eva")  # not called as encode_image does
    hook = blocks_of(name, model)[-1].register_forward_hook(lambda m, a, y: token.expand(-1, y.shape[1], -1))
    with torch.no_grad():
        expected = run(name, model, images) if name in own else encode_image(inner, images)
        hook.remove()
        projected = tower.project(token.expand(-1, 4, -1))
    assert projected.shape == (3, 4, expected.shape[1])
    assert_near(projected.float(), expected[:, None].expand(-1, 4, -1))


@pytest.mark.parametrize("name", VARIANTS)
def test_resized_images_are_all_that_resize_changes(name):
    """Images that are resized before have the size of the plan already, so it leaves them alone."""
    model, images = make(name)
    stock, before = run(name, model, images), snapshot(model)
    if name == "hf_vit":
        with pytest.raises(Uncuttable, match="square grids only, not of 6 x 4"):
            tokensieve.apply(model, "resize(size=16)")
        return
    for plan in ("resize(size=16)", "resize(size=16) + anchor@2:3(k=2,rest=merge) + grid@3.attn:2"):
        with tokensieve.apply(model, plan) as handle:
            resized = run(name, model, images)
            first, (h, w) = handle.ledger[0], handle.grid
            smaller = F.interpolate(images, (8 * h, 8 * w), mode="bicubic")
            again = run(name, model, smaller)
        assert first.layer == "image" and first.tokens_out == h * w < first.tokens_in
        assert_near(again, resized, steps=2000)
        assert not torch.allclose(resized[:, :1], stock[:, :1])
        assert_untouched(model, before)
    assert torch.equal(run(name, model, images), stock)


# --- what differs from family to family -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["timm_dynamic", "eva_dynamic", "hf_dinov2", "hf_dinov3", "hf_siglip_oblong", "hf_siglip2_padded"]
)
def test_the_grid_is_the_batchs_own(name):
    model, _ = make(name)
    seen = []

    @method()
    def looks(view, keep):
        seen.append(view.grid)
        return Reduction.keep(torch.arange(keep).expand(len(view.tokens), -1), view.n)

    try:
        with tokensieve.apply(model, "looks@2:5 + looks@3:4"):
            run(name, model, torch.randn(2, 3, 64, 24))
            run(name, model, torch.randn(2, 3, 48, 32))
    finally:
        REGISTRY.remove("looks")
    assert seen == [(8, 3), None, (6, 4), None]


def test_siglip2_padding_is_never_chosen_and_mixed_batches_are_refused():
    model, images = make("hf_siglip2_padded", torch.float64)
    outs = []
    for padding in (0, 9):
        with tokensieve.apply(model, "random@0:20 + anchor@2:10(k=3)") as handle, torch.no_grad():
            outs.append(flexible(model, images, padding))
        assert handle.kept.max() < 24
    assert_near(outs[0].float(), outs[1], steps=1000)
    batch = patches_of(images, padding=4)
    with torch.no_grad(), tokensieve.apply(model, "grid@2:7") as handle:
        for shapes, said in (([[6, 4], [4, 6], [6, 4]], "4 x 6, 6 x 4"), ([[6, 4], [5, 5], [7, 4]], "5 x 5, 6 x 4, 7 x 4")):
            batch["spatial_shapes"] = torch.tensor(shapes)
            with pytest.raises(UserError, match=rf"different grids of patches \({said}\).*the same grid into a batch"):
                model(**batch)
        batch["spatial_shapes"] = torch.tensor([[4, 6]] * 3)
        assert model(**batch).pooler_output.shape == (3, WIDTH) and handle.kept.shape == (3, 7)


def test_rotary_angles_differ_from_image_to_image():
    """Images that keep different patches have different angles afterwards; sharing one image's would be another result."""
    model, images = make("eva", torch.float64)
    with tokensieve.apply(model, "random@2:5") as handle:
        out = run("eva", model, images)
    assert not torch.equal(handle.kept[0], handle.kept[1])
    wrong, _ = slow("eva", model, images, 2, lambda tokens: handle.kept[:1].expand(3, -1), 24)
    assert not torch.allclose(out[1:], wrong[1:], atol=1e-4)


@pytest.mark.parametrize("name", ["timm_cls", "eva", "hf_clip", "hf_dinov3"])
def test_training_passes_gradients(name):
    model, images = make(name)
    model.train()
    with tokensieve.apply(model, "anchor@2:6(k=2,rest=merge)") as handle:
        (VARIANTS[name].run or (lambda m, x: m(x)))(model, images).square().sum().backward()
    assert handle.kept.shape == (3, 6)
    assert all(p.grad is not None for block in blocks_of(name, model) for p in block.parameters())


@pytest.mark.parametrize("name", ["timm_cls", "eva", "open_clip_siglip", "hf_clip", "hf_dinov2", "hf_vit"])
def test_gradient_checkpointing_is_refused(name):
    model, _ = make(name)
    model.train()
    if name.startswith("hf"):
        model.gradient_checkpointing_enable()
    else:
        model.set_grad_checkpointing(True)
    with pytest.raises(UserError, match="gradient checkpointing"):
        tokensieve.apply(model, "grid@2:6")


def test_stock_outputs_of_hugging_face_models_keep_their_shape():
    model, images = make("hf_clip")
    text = torch.randint(0, 60, (2, 7))
    with torch.no_grad(), tokensieve.apply(model, "anchor@2:6(k=2)"):
        out = model(pixel_values=images, input_ids=text)
        assert out.logits_per_image.shape == (3, 2)
        assert_near(F.normalize(features(model, images)), out.image_embeds, steps=1000)
        states = model.vision_model(pixel_values=images, output_hidden_states=True).hidden_states
    assert [state.shape[1] for state in states] == [26, 26, 7, 7, 7]


def test_pruned_vision_encoder_takes_any_family():
    for name, width in (("hf_clip", 16), ("timm_cls", 5)):
        model, images = make(name)
        encoder = tokensieve.PrunedVisionEncoder(model, k_anchors=2, top_m=4)
        with torch.no_grad():
            features = encoder(images)
            with tokensieve.apply(model, "anchor(k=2,m=4)"):
                expected = run(name, model, images)
        assert features.shape == (3, width) and torch.equal(features, expected)
        assert encoder.ledger[0].tokens_out == 6


def test_an_attention_mask_is_refused():
    model, images = make("hf_vit")
    with tokensieve.apply(model, "grid@2:6"), torch.no_grad(), pytest.raises(UserError, match="attention mask"):
        model(pixel_values=images, attention_mask=torch.tensor([[1] * 20 + [0] * 5] * 3))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(2, 2), "Linear is of no family .* open_clip .* timm .* Hugging Face"),
        (lambda: timm.create_model("resnet18"), "ResNet is neither"),
        (lambda: wrapped(lambda: timm.create_model("resnet18"))(), "timm's ResNet"),
        (lambda: VisionTransformer(**(TIMM | {"block_fn": ParallelScalingBlock})), "ParallelScalingBlock"),
        (lambda: VisionTransformer(**(TIMM | {"attn_layer": "diff"})), "DiffAttention"),
        (lambda: transformers.CLIPTextModel(transformers.CLIPTextConfig(**TEXT)), "holds no CLIPVisionModel"),
        (lambda: transformers.ViTForMaskedImageModeling(transformers.ViTConfig(**HF)), "rebuilds the image"),
        (lambda: transformers.Dinov2Backbone(transformers.Dinov2Config(**HF)), "holds no Dinov2Model"),
        (
            lambda: transformers.BertModel(transformers.BertConfig(**(TEXT | {"max_position_embeddings": 8}))),
            "BertModel is of no Hugging Face family",
        ),
    ],
)
def test_what_cannot_be_cut_says_why(build, message):
    with pytest.raises(Uncuttable, match=message):
        tokensieve.apply(build(), "grid@2:6")


def test_a_pooling_head_that_takes_no_sizes_refuses_merges_alone():
    model = VisionTransformer(**(TIMM | {"global_pool": "prr"})).eval()
    images = torch.randn(2, 3, 48, 32)
    with torch.no_grad(), tokensieve.apply(model, "grid@2:6"):
        assert model(images).shape == (2, 5)
    before = snapshot(model)
    with pytest.raises(Uncuttable, match="rest=drop"):
        tokensieve.apply(model, "grid@2:6(rest=merge)")
    assert_untouched(model, before)


def test_coarse_says_what_it_needs():
    view = View(tokens=torch.randn(1, 4, 8), prefix=torch.randn(1, 0, 8), grid=None)
    with pytest.raises(ValueError, match="needs="):
        view.coarse()
    q = torch.randn(1, 2, 6, 4)
    with pytest.raises(ValueError, match="no CLS token"):
        Attention(q, q, 2, 0.5, has_cls=False).cls_row()


# --- the table ------------------------------------------------------------------------------------------------------


def test_the_table_is_made_by_trying_and_is_the_one_in_the_docs(tmp_path, capsys):
    page = tmp_path / "families.md"
    families.run(Namespace(output=str(page), quiet=False, as_json=False))
    shown = capsys.readouterr().out
    assert page.read_text() == (ROOT / "docs" / "families.md").read_text()
    assert "pooling query" in page.read_text() and "ModifiedResNet" in shown and "@L.attn" in shown
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")][2:]
    tiled = {"| LLaVA-NeXT", "| LLaVA-OneVision", "| InternVL", "| Idefics3", "| SmolVLM", "| Mistral 3", "| Pixtral"}
    others = {"| open_clip ModifiedResNet", "| Gemma 3", "| Llama 4", "| Mllama"}
    assert {row[0] for row in rows if row[-1] != "yes |"} == tiled | others
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_vision_language_models_are_cut_in_their_decoder_and_before_it():
    examples = [VLM_FAMILIES[name].example for name in ("llava", "llava_next", "qwen2_vl", "gemma3")]
    lines = [families.try_vlm_family(example) for example in examples]
    everywhere, behind = ["@0", "@L", "@L.attn", "@out", "@llm.L"], ["@out", "@llm.L"]
    assert [line.drops for line in lines] == [everywhere, everywhere, ["@0", "@L", *behind], behind]
    assert [line.merges for line in lines] == [everywhere, everywhere, behind, behind]
    assert [line.coarse for line in lines] == [*["CLS row, last token's row"] * 2, *["last token's row"] * 2]
    assert not lines[0].reasons and "takes no bias on keys" in lines[2].failure_text()
    assert "averages squares of patches" in lines[3].failure_text()
    assert [line.pooling for line in lines] == ["by size"] * 4
    assert [line.resize for line in lines] == ["yes", "no", "yes", "no"]
    assert "resize: its processor cuts images" in lines[1].failure_text()


def test_what_fails_is_shown_with_its_reason():
    line = families.try_family(Example("some", f"{TINY}:timm_model", {"global_pool": "prr"}))
    assert line.drops == ["@0", "@L", "@L.attn", "@out"] and line.merges == [] and "takes no sizes" in line.failure_text()
    broken = families.try_family(Example("other", "torch.nn:Linear", {"in_features": 2, "out_features": 2}, name="Linear"))
    assert broken.cells()[4] == "nowhere" and "of no family" in broken.failure_text()
