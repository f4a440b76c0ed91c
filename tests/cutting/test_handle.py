"""apply: the stock model on fewer tokens, for every variant of open_clip's tower, and no trace of it afterwards."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from open_clip.transformer import VisionTransformer
from torch import nn

import tokensieve
from tests.support.reference import attention_branch, in_float64, mlp_branch
from tests.support.rounding import assert_near
from tests.support.states import assert_untouched, snapshot
from tokensieve import Plan, Uncuttable, UserError
from tokensieve.errors import PlanWarning
from tokensieve.methods.registry import REGISTRY, method
from tokensieve.models.registry import open_tower
from tokensieve.testing.tiny_models import open_clip_model

VARIANTS = {
    "cls": {},
    "avg": {"pool_type": "avg"},
    "avg_ln_after": {"pool_type": "avg", "final_ln_after_pool": True},
    "attn_pool": {"attentional_pool": True, "attn_pooler_queries": 5, "attn_pooler_heads": 2},
    "attn_pool_parallel": {"attentional_pool": "parallel", "output_dim": 32, "attn_pooler_queries": 5, "attn_pooler_heads": 2},
    "attn_pool_cascade": {"attentional_pool": "cascade", "output_dim": 32, "attn_pooler_queries": 5, "attn_pooler_heads": 2},
    "patch_dropout": {"patch_dropout": 0.5},
    "qk_norm": {"qk_norm": True},
    "norm_former": {"scale_heads": True, "scale_attn_inner": True, "scale_attn": True, "scale_fc": True},
    "layer_scale": {"ls_init_value": 0.5},
    "output_tokens": {"output_tokens": True},
    "no_ln_pre": {"no_ln_pre": True},
    "square_sincos": {"image_size": 32, "pos_embed_type": "sin_cos_2d"},
}
PLANS = [
    "anchor@2(k=3,m=6)",
    "anchor@2(k=3,m=6,rest=merge)",
    "anchor@2.attn:50%(k=3,rest=fuse)",
    "random@0:50%",
    "grid@1,3:-3(rest=merge)",
    "pool@*.attn:-1",
    "anchor@-1:5(k=2)",
    "anchor@out:6(k=2,rest=zero)",
    "random@2.attn:12 + anchor@2:6(k=2) + pool@3:4",
]


def make_tower(**changes):
    torch.manual_seed(0)
    settings = {
        "image_size": (48, 32),
        "patch_size": 8,
        "width": 32,
        "layers": 4,
        "heads": 4,
        "mlp_ratio": 2.0,
        "output_dim": 16,
    }
    tower = VisionTransformer(**(settings | changes)).eval()
    with torch.no_grad():
        for parameter in tower.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                parameter.mul_(4)
    return tower


def images_for(tower, batch=3, seed=1):
    return torch.randn(batch, 3, *tower.image_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_plan_on_every_variant(variant, plan):
    tower = make_tower(**VARIANTS[variant])
    images, before = images_for(tower), snapshot(tower)
    with torch.no_grad():
        stock = tower(images)
        with tokensieve.apply(tower, plan) as handle:
            out = tower(images)
        again = tower(images)
    first = (lambda y: y[0]) if isinstance(stock, tuple) else (lambda y: y)
    assert first(out).shape == first(stock).shape and torch.isfinite(first(out)).all()
    assert handle.ledger and all(row.tokens_out <= row.tokens_in for row in handle.ledger)
    assert torch.equal(first(stock), first(again))
    assert_untouched(tower, before)
    if "random" not in plan:  # in float64, so that no near tie falls another way when a batch is computed in other kernels
        exact, images = in_float64(tower), images.double()
        with torch.no_grad(), tokensieve.apply(exact, plan):
            together = first(exact(images))
            alone = torch.cat([first(exact(images[b : b + 1])) for b in range(len(images))])
        assert_near(together.float(), alone, steps=1000)


@pytest.mark.parametrize("variant", VARIANTS)
def test_identity_plan_is_stock_to_the_bit(variant):
    tower = make_tower(**VARIANTS[variant])
    images, before = images_for(tower), snapshot(tower)
    with torch.no_grad():
        stock = tower(images)
        with tokensieve.apply(tower, "none"):
            out = tower(images)
            assert_untouched(tower, before)
    pairs = zip(stock, out, strict=True) if isinstance(stock, tuple) else [(stock, out)]
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_opened_block_is_the_stock_block(variant):
    tower = make_tower(**VARIANTS[variant]).double()
    x = torch.randn(2, 1 + tower.grid_size[0] * tower.grid_size[1], 32).double()
    for block in open_tower(tower).blocks:
        with torch.no_grad():
            y, seen = block.attend(x)
            assert_near(block.mlp(y).float(), block.module(x))
            assert_near(seen.cls_row().float(), block.attention_at(x).cls_row(), steps=3000)


@pytest.mark.parametrize("rest", ["drop", "merge"])
def test_merged_sizes_enter_later_attention_and_average_pooling(rest):
    tower = make_tower(pool_type="avg", ls_init_value=0.7).double()
    images = images_for(tower).double()
    with torch.no_grad():
        with tokensieve.apply(tower, f"grid@2:7(rest={rest})") as handle:
            out = tower(images)
        x = tower._embeds(images)
        blocks = tower.transformer.resblocks
        for block in blocks[:2]:
            x = block(x)
        prefix, tokens = x[:, :1], x[:, 1:]
        reduced, sizes = [], []
        for b in range(3):
            groups = [[i for i in range(24) if handle.groups[b, i] == g] for g in range(7)]
            reduced.append(torch.stack([tokens[b, group].mean(0) for group in groups]))
            sizes.append(torch.tensor([float(len(group)) for group in groups], dtype=torch.float64))
        sizes = torch.stack(sizes)
        assert (sizes.sum(1) == (24 if rest == "merge" else 7)).all()
        x = torch.cat([prefix, torch.stack(reduced)], dim=1)
        bias = torch.cat([torch.zeros(3, 1).double(), sizes.log()], dim=1)
        for block in blocks[2:]:
            x = mlp_branch(block, attention_branch(block, x, bias))
        x = tower.ln_post(x)
        pooled = (sizes[..., None] * x[:, 1:]).sum(1) / sizes.sum(1, keepdim=True)
    assert_near(out.float(), pooled @ tower.proj, steps=1000)


def test_attentional_pooling_sees_sizes():
    """A pooled token of size 2 counts as two: merging equal tokens at the output changes nothing."""
    tower = make_tower(attentional_pool=True, attn_pooler_queries=5, attn_pooler_heads=2).double()
    images = images_for(tower).double()

    def doubled(x):  # after the last block every patch is made equal to its left neighbour
        return torch.cat([x[:, :1], x[:, 1:].unflatten(1, (-1, 2))[:, :, :1].expand(-1, -1, 2, -1).flatten(1, 2)], dim=1)

    stock_last = tower.transformer.resblocks[-1]
    stock_last.register_forward_hook(lambda module, args, out: doubled(out) if out.shape[1] == 25 else out)
    try:

        @method(selects=False)
        def left_of_pairs(view, keep):
            left = torch.arange(0, view.n, 2).expand(len(view.tokens), -1)
            return tokensieve.Reduction(index=left, n=view.n, sizes=torch.full(left.shape, 2.0))

        with torch.no_grad():
            full = tower(images)
            with tokensieve.apply(tower, "left_of_pairs@out:12"):
                merged = tower(images)
    finally:
        REGISTRY.remove("left_of_pairs")
    assert_near(merged.float(), full)


def test_keeping_everything_is_stock_and_said_once():
    tower = make_tower().double()
    images = images_for(tower).double()
    with torch.no_grad():
        stock = tower(images)
        with (
            pytest.warns(PlanWarning, match="everything is kept") as said,
            tokensieve.apply(tower, "anchor@2(k=10,m=50)") as handle,
        ):
            assert_near(tower(images).float(), stock)
            tower(images)
    assert len(said) == 1 and len(handle.notes) == 1
    assert [(row.tokens_in, row.tokens_out) for row in handle.ledger] == [(24, 24)]


def test_kept_follows_patches_through_several_cuts():
    tower = make_tower()
    with torch.no_grad(), tokensieve.apply(tower, "grid@1:12 + random@2:5 + grid@3:3") as handle:
        tower(images_for(tower))
    one, two, three = [r for _, r in handle.stages]
    for b in range(3):
        assert handle.kept[b].tolist() == [one.index[b][two.index[b][j]].item() for j in three.index[b].tolist()]
    assert (handle.groups >= 0).sum(1).tolist() == [3, 3, 3]


def test_random_does_not_depend_on_batches():
    tower = make_tower()
    images = images_for(tower, batch=6)
    with torch.no_grad():
        with tokensieve.apply(tower, "random@1:5") as together:
            tower(images)
        with tokensieve.apply(tower, "random@1:5") as in_parts:
            kept = [tower(images[i : i + 2]) is not None and in_parts.kept for i in (0, 2, 4)]
        with tokensieve.apply(tower, "random@1:5", seed=1) as other:
            tower(images)
    assert torch.equal(together.kept, torch.cat(kept))
    assert not torch.equal(together.kept, other.kept)


def test_attach_again_and_refuse_two_plans_at_once():
    tower = make_tower()
    images, before = images_for(tower), snapshot(tower)
    with torch.no_grad():
        handle = tokensieve.apply(tower, "grid@2:6")
        once = tower(images)
        with pytest.raises(UserError, match="another plan"):
            tokensieve.apply(tower, "random@2:6")
        assert torch.equal(once, tower(images))
        handle.remove()
        handle.remove()
        assert_untouched(tower, before)
        handle.attach()
        handle.attach()
        assert torch.equal(once, tower(images))
        handle.remove()
    assert_untouched(tower, before)


@pytest.mark.parametrize("where", [0, 1, 3])
def test_an_exception_leaves_no_trace(where):
    """Before, inside and after the cut block."""
    tower = make_tower(pool_type="avg")
    images, before = images_for(tower), snapshot(tower)
    with torch.no_grad():
        stock = tower(images)
        hook = tower.transformer.resblocks[where].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), tokensieve.apply(tower, "anchor@2:6(k=2,rest=merge)"):
            tower(images)
        hook.remove()
        assert_untouched(tower, before)
        assert torch.equal(stock, tower(images))


def test_nan_is_an_error_that_names_the_layer():
    tower = make_tower()
    images = images_for(tower)
    images[1, 0, 0, 0] = float("nan")
    with torch.no_grad(), tokensieve.apply(tower, "anchor@3:6(k=2)"), pytest.raises(UserError, match="layer 3 contain NaN"):
        tower(images)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("random@5:3", "no layer 5 in a tower of 4 blocks"),
        ("random@-6:3", "no layer -6"),
        ("random@0.attn:3", "no layer 0"),
        ("anchor@0:3", "none has run at @0"),
        ("random@2:-24", "nothing would be left"),
        ("random@1:10 + grid@2:-10", "nothing would be left"),
        ("random@llm.2:3", "no language decoder"),
        ("grid@out:6(rest=zero) + grid@out:3", "nothing can follow"),
    ],
)
def test_plans_that_do_not_fit_are_refused_at_once(plan, message):
    tower = make_tower()
    before = snapshot(tower)
    with pytest.raises(UserError, match=message):
        tokensieve.apply(tower, plan)
    assert_untouched(tower, before)


def test_negative_layers_count_as_hidden_states_do():
    tower = make_tower()
    with torch.no_grad(), tokensieve.apply(tower, "grid@-1:10 + random@-4:20 + pool:15") as handle:
        tower(images_for(tower))
    assert [(row.layer, row.tokens_out) for row in handle.ledger] == [("1", 20), ("2", 15), ("4", 10)]


RESNET = {"layers": [1, 1, 1, 1], "width": 8, "image_size": 64}


@pytest.mark.parametrize("model", [nn.Linear(2, 2), open_clip_model(**RESNET).visual], ids=["linear", "resnet"])
def test_what_cannot_be_cut_says_why(model):
    with pytest.raises(Uncuttable) as error:
        tokensieve.apply(model, "anchor")
    assert error.value.reason


def test_gradient_checkpointing_is_refused():
    tower = make_tower()
    with tokensieve.apply(tower, "random:5"):
        tower.set_grad_checkpointing(True)
        with pytest.raises(UserError, match="set_grad_checkpointing"):
            tower(images_for(tower))
    with pytest.raises(UserError, match="set_grad_checkpointing"):
        tokensieve.apply(tower, "random:5")


def test_zero_fill_at_the_output_is_zero_after_the_norm_and_keeps_sizes():
    for pool in ("tok", "avg"):
        tower = make_tower(output_tokens=True, pool_type=pool)
        nn.init.normal_(tower.ln_post.bias)
        images = images_for(tower)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", PlanWarning)
            with tokensieve.apply(tower, "anchor@2:12(k=2,rest=merge) + anchor@out:6(k=2,rest=zero)") as handle:
                pooled, tokens = tower(images)
                sizes = handle._pass.sizes
        assert tokens.shape[1] == 12 and ((tokens != 0).any(-1).sum(1) == 6).all()
        merged, last = [r for _, r in handle.stages]
        assert_near(sizes.gather(1, last.index), merged.sizes.gather(1, last.index))
        if pool == "avg":
            mean = (sizes[..., None] * tokens).sum(1) / sizes.sum(1, keepdim=True)
            assert_near(pooled, mean @ tower.proj, steps=1000)


def test_zero_fill_on_a_cls_feature_is_said():
    tower = make_tower()
    with pytest.warns(PlanWarning, match="CLS feature and stays"), tokensieve.apply(tower, "anchor@out:6(k=2,rest=zero)"):
        pass


def test_a_foreign_forward_is_not_taken_for_a_plan():
    tower = make_tower()
    block = tower.transformer.resblocks[2]
    stock = block.forward
    block.forward = lambda *args, **kwargs: stock(*args, **kwargs)
    with torch.no_grad(), tokensieve.apply(tower, "grid@3:6") as handle:
        tower(images_for(tower))
    assert handle.ledger[0].tokens_out == 6 and "forward" in block.__dict__


@pytest.mark.parametrize("plan", ["grid@2:6", "anchor@2:6(k=2,rest=merge)", "grid@2.attn:12 + pool@3:4"])
def test_a_wrapper_that_came_after_the_plan_stays_when_the_plan_goes(plan):
    """As PEFT, accelerate and torchao wrap modules."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    calls = []

    class Count(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            calls.append(module)
            return args, kwargs

    tower = make_tower()
    images, block = images_for(tower), tower.transformer.resblocks[1]
    with torch.no_grad():
        stock = tower(images)
        handle = tokensieve.apply(tower, plan)
        reduced = tower(images)
        wrapped = add_hook_to_module(block, Count()).forward
        assert torch.equal(tower(images), reduced) and calls == [block]
        with pytest.raises(UserError, match="another plan"):
            tokensieve.apply(tower, "random@2:6")
        handle.remove()
        assert block.forward is wrapped
        assert torch.equal(tower(images), stock) and calls == [block, block]
        with tokensieve.apply(tower, plan):
            assert torch.equal(tower(images), reduced)
        assert block.forward is wrapped
        remove_hook_from_module(block)
        calls.clear()
        assert torch.equal(tower(images), stock) and torch.equal(copy.deepcopy(tower)(images), stock) and not calls
        with tokensieve.apply(tower, plan):
            assert torch.equal(tower(images), reduced)
        assert torch.equal(tower(images), stock)


@pytest.mark.parametrize("plan", ["anchor@2(k=3,m=6)", "anchor@2(k=3,m=6,rest=merge)", "pool@2:9"])
def test_bf16_and_autocast(plan):
    tower = make_tower()
    with torch.no_grad():  # with weights as large as elsewhere, rounding to 16 bits decides which patches stay
        for parameter in tower.parameters():
            parameter.mul_(0.4 if parameter.dim() > 1 else 1)
    images = images_for(tower)
    with torch.no_grad():
        with tokensieve.apply(tower, plan), torch.autocast("cpu", torch.bfloat16):
            mixed = tower(images)
        with tokensieve.apply(tower, plan):
            exact = tower(images)
        tower.bfloat16()
        with tokensieve.apply(tower, plan) as handle:
            low = tower(images.bfloat16())
    assert mixed.shape == exact.shape
    assert low.dtype == torch.bfloat16 and torch.isfinite(low).all() and handle.ledger[0].tokens_out == 9
    assert torch.cosine_similarity(mixed.float(), exact).min() > 0.95  # also if a near tie falls the other way: 0.98
    assert torch.cosine_similarity(low.float(), exact).min() > 0.95


def test_training_passes_gradients_and_patch_dropout_is_counted():
    tower = make_tower(patch_dropout=0.5).train()
    with tokensieve.apply(tower, "anchor@2:6(k=2,rest=merge)") as handle:
        tower(images_for(tower)).square().sum().backward()
    assert [(row.tokens_in, row.tokens_out) for row in handle.ledger] == [(12, 6)]
    assert handle.kept is None and handle.groups is None, "which patches patch dropout left is not known"
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in tower.parameters() if p.requires_grad)


def test_the_model_keeps_its_own_api(tiny_clip):
    model, _, tokenizer = tiny_clip.make()
    images, text = images_for(model.visual), tokenizer(["a", "b"])
    with torch.no_grad():
        with tokensieve.apply(model, Plan.parse("grid@2:6")) as handle:
            image_features, text_features, _ = model(images, text)
            assert_near(model.encode_image(images, normalize=True), image_features)
        assert handle.kept.shape == (3, 6)
        assert torch.equal(text_features, model.encode_text(text, normalize=True))


def test_stock_blocks_run_where_nothing_is_opened(monkeypatch):
    """Selection without sizes leaves every block but the one it looks at to open_clip's own code."""
    tower = make_tower()
    numbers = {block.attn: number for number, block in enumerate(tower.transformer.resblocks, start=1)}
    ran, stock = [], nn.MultiheadAttention.forward

    def forward(self, *args, **kwargs):
        ran.append(numbers[self])
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(nn.MultiheadAttention, "forward", forward)
    with torch.no_grad(), warnings.catch_warnings(), tokensieve.apply(tower, "anchor@2(k=2,m=4)"):
        tower(images_for(tower))
    assert ran == [1, 3, 4]


def test_a_copy_of_a_model_with_a_plan_on_it_is_refused():
    """The copy's blocks would run the original's weights."""
    tower = make_tower()
    with tokensieve.apply(tower, "grid@2:6"):
        for copying in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UserError, match="remove"):
                copying(tower)
    images = images_for(tower)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(tower)(images), tower(images))


def test_attention_after_a_cut_before_the_first_block_is_of_what_is_left():
    tower = make_tower().double()
    images = images_for(tower).double()
    with torch.no_grad(), tokensieve.apply(tower, "grid@0:12 + anchor@1:5(k=2)") as handle:
        tower(images)
        first = handle.stages[0][1]
        x = tower._embeds(images)
        x = torch.cat([x[:, :1], first.apply(x[:, 1:])], dim=1)
        block = open_tower(tower).blocks[0]
        y, seen = block.attend(x)
        kept = tokensieve.select_tokens_with_scoring(block.mlp(y), 2, 3, attention=seen)
    assert torch.equal(handle.kept, first.index.gather(1, kept))


def test_a_batch_of_smaller_images_than_configured_says_that_everything_is_kept():
    import timm

    model = timm.create_model("vit_tiny_patch16_224", depth=2, dynamic_img_size=True, img_size=64).eval()
    with tokensieve.apply(model, "anchor@1:9(k=2)") as handle, torch.no_grad():
        assert not handle.notes  # 16 patches at the configured size
        with pytest.warns(tokensieve.errors.PlanWarning, match="9 patch tokens arrive"):
            model(torch.randn(1, 3, 48, 48))
        model(torch.randn(1, 3, 48, 48))  # said once
        assert len(handle.notes) == 1 and [vars(row) for row in handle.ledger] == [
            {"layer": "1", "tokens_in": 9, "tokens_out": 9}
        ]


def test_two_names_of_one_layer_are_refused(tiny_clip):
    """After block 2 of 4 is also the third place from the end."""
    model = tiny_clip.make()[0]
    with pytest.raises(UserError, match="two of its places are layer 2 of this model"):
        tokensieve.apply(model, "random@2,-3:50%")


def test_a_handle_prints_its_plan_the_tokens_at_each_cut_and_notes():
    tower = make_tower()
    with torch.no_grad(), tokensieve.apply(tower, "random@1:12 + random@3:50%") as handle:
        assert str(handle).splitlines() == ["random@1:12 + random@3:50% (attached)", "  no forward pass yet"]
        tower(images_for(tower))
        cuts = ["  @1  24 -> 12 tokens", "  @3  12 -> 6 tokens"]
        assert str(handle).splitlines() == ["random@1:12 + random@3:50% (attached)", *cuts]
        assert repr(handle) == "Handle('random@1:12 + random@3:50%', attached, 24 -> 6 tokens)"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        handle = tokensieve.apply(tower, "random@1:6000")
    handle.remove()
    assert "(not attached)" in str(handle) and "  note: random@1:6000: at layer 1 24 patch tokens arrive" in str(handle)
    assert handle.excess == handle.notes
