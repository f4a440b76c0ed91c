"""What published methods may see and give beyond tokens and attention: ragged counts, earlier blocks, schedules, text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from tests.support import vlm_models
from tests.support.vlm_models import single
from tokensieve.core import Reduction, View
from tokensieve.cutting.handle import Handle
from tokensieve.errors import UserError
from tokensieve.methods.registry import Method, Place, describe
from tokensieve.models.registry import open_tower
from tokensieve.plan import Budget, Plan, Step, Where
from tokensieve.scoring import top
from tokensieve.testing.tiny_models import hf_model, open_clip_model, timm_model

N = 16  # patches of the tiny towers


def plan_of(method: Method, where: str, budget: str = "100%") -> Plan:
    return Plan((Step(method, Where.parse(where), Budget.parse(budget)),))


def loud(view: View, keep: int) -> Reduction:
    """The tokens with a norm above the mean norm of their image: a different number for each image."""
    norms = view.tokens.float().norm(dim=-1)
    real = torch.ones_like(norms, dtype=torch.bool) if view.sizes is None else view.sizes > 0
    mean = (norms * real).sum(1, keepdim=True) / real.sum(1, keepdim=True)
    chosen = (norms >= mean) & real
    return Reduction.keep_some(chosen, view.sizes, norms)


LOUD = describe(loud, adaptive=True)


def towers() -> list[tuple[str, Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]]:
    return [
        ("open_clip", open_clip_model, lambda model, x: model.encode_image(x)),
        ("timm", lambda: timm_model(class_token=False, global_pool="avg"), lambda model, x: model(x)),
        ("hf", lambda: hf_model("CLIPVision"), lambda model, x: model(pixel_values=x).pooler_output),
        ("siglip", lambda: hf_model("SiglipVision"), lambda model, x: model(pixel_values=x).pooler_output),
    ]


@pytest.mark.parametrize(("name", "make", "encode"), towers())
@pytest.mark.parametrize("where", ["1", "1,2", "2.attn"])
def test_a_ragged_batch_is_as_image_by_image(name: str, make: Any, encode: Any, where: str) -> None:
    torch.manual_seed(0)
    model = make().double().eval()
    images = (
        torch.randn(5, 3, 32, 32, dtype=torch.float64) * torch.linspace(0.5, 3, 5, dtype=torch.float64)[:, None, None, None]
    )
    with torch.no_grad(), Handle(model, plan_of(LOUD, where)) as handle:
        together = encode(model, images)
        kept, rows = handle.kept, handle.ledger
        assert kept is not None
        alone, counts = [], []
        for image in images:
            alone.append(encode(model, image[None]))
            assert handle.kept is not None
            counts.append(handle.kept.shape[1])
            assert torch.equal(kept[len(counts) - 1, : counts[-1]], handle.kept[0])
    assert len(set(counts)) > 1  # or the test shows nothing
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)
    assert vars(rows[-1])["mean_out"] == sum(counts) / 5 and vars(rows[-1])["least_out"] == min(counts)
    assert rows[-1].tokens_out == max(counts)
    assert ((kept >= 0).sum(1) == torch.tensor(counts)).all()


@pytest.mark.parametrize("where", ["out", "2", "llm.2", "llm.1,3"])
def test_a_ragged_batch_in_a_language_model_is_as_prompt_by_prompt(where: str) -> None:
    model = vlm_models.llava().double()
    batch = vlm_models.prompts((1, 2), (4, 7))
    batch = batch | {
        "pixel_values": batch["pixel_values"].double() * torch.tensor([0.5, 1.0, 3.0])[:, None, None, None].double()
    }
    with torch.no_grad(), Handle(model, plan_of(LOUD, where)):
        together = model(**batch).logits[:, -1]
        alone = [model(**single(batch, row, row, row + 1)).logits[:, -1] for row in range(2)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-4)


RAGGED = (
    "ats@2,4,6.attn:50%",
    "ats@2,4,6.attn:-20",
    "pixelprune@0 + ats@4.attn:50%",
    "pact@2(norm=1.0) + prumerge@6:30%",
    "pact@2 + prumerge_plus@6:9",
    "ats@2:100(rest=merge) + pact@4:50%(norm=1.0)",
    "ats@2:100 + flowcut:25%",
)


@pytest.mark.parametrize("plan", RAGGED)
def test_budgets_and_choices_behind_ragged_tokens_are_those_of_each_image(plan: str) -> None:
    torch.manual_seed(0)
    model: Any = VisionTransformer(img_size=56, patch_size=4, embed_dim=48, depth=8, num_heads=4, num_classes=10)
    model = model.double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15)
    images = torch.randn(4, 3, 56, 56, dtype=torch.float64)
    images[1] *= 0.1
    images[2, :, :28] = 0
    images[3] = nn.functional.interpolate(torch.randn(1, 3, 4, 4, dtype=torch.float64), 56)[0]
    with torch.no_grad(), Handle(model, Plan.parse(plan)) as handle:
        together, in_batch = model(images), _counts(handle)
        alone, by_image = [], []
        for image in images:
            alone.append(model(image[None]))
            by_image.append(_counts(handle))
    assert in_batch == [[k for (k,) in of_cut] for of_cut in zip(*by_image, strict=True)]
    assert any(len({*counts}) > 1 for counts in in_batch)  # or the test shows nothing
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


def _counts(handle: Handle) -> list[list[int]]:
    """The tokens that each image has behind each cut."""
    stages: list[Reduction] = [reduction for _, reduction in handle.stages]
    return [[each.k] * len(each.index) if each.counts is None else each.counts.tolist() for each in stages]


@pytest.mark.parametrize("plan", ["ats@1:20/tile + pact@2:30", "ats@1:20/tile + ats@2:50%", "ats@1:60"])
def test_a_budget_that_ragged_tiles_share_counts_their_own_tokens(plan: str) -> None:
    model, batch = vlm_models.relative("llava_next")
    model, batch = vlm_models.in_float64(model, batch)
    with torch.no_grad(), Handle(model, Plan.parse(plan)) as handle:
        together = model(**vlm_models.rows_of(batch, [[0], [1]], (4, 4))).logits[:, -1]
        alone = [model(**vlm_models.rows_of(batch, [[row]], (4,))).logits[:, -1] for row in range(2)]
        assert handle.ledger
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


def test_only_adaptive_methods_follow_an_adaptive_one_in_a_tower() -> None:
    steps = (*plan_of(LOUD, "1").steps, *Plan.parse("random@2:50%").steps)
    with pytest.raises(UserError, match="different number of tokens"):
        Handle(open_clip_model(), Plan(steps))


def test_a_block_that_has_not_run_is_an_error_when_the_plan_is_made() -> None:
    model = open_clip_model(layers=6).visual  # hiprune reads block 2 of 6
    with pytest.raises(UserError, match=r"hiprune@1:8: hiprune needs the attention of block 2, which .* use it at @2 or later"):
        Handle(model, Plan.parse("hiprune@1:8"))
    with Handle(model, Plan.parse("hiprune@2:8")), torch.no_grad():
        assert model(torch.randn(1, 3, 32, 32)).shape == (1, 16)


def test_earlier_blocks_are_seen_among_the_tokens_that_are_left() -> None:
    torch.manual_seed(0)
    model: Any = open_clip_model().eval()
    seen: list[View] = []

    def watch(view: View, keep: int) -> Reduction:
        seen.append(view)
        return Reduction.keep(top(view.earlier[1].cls_row(), keep), view.n)

    method = describe(watch, needs=("attention",), layers=lambda depth: (1,))
    images = torch.randn(2, 3, 32, 32)
    steps = (*Plan.parse("grid@2:9").steps, *plan_of(method, "3", "4").steps)
    with torch.no_grad(), Handle(model, Plan(steps)) as handle:
        model.encode_image(images)
        kept = handle.stages[0][1].index
    blocks = open_tower(model).blocks
    states: list[Tensor] = []
    hook = blocks[0].module.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    with torch.no_grad():
        model.encode_image(images)
        hook.remove()
        row = blocks[0].attend(states[0])[1].cls_row()  # (B, N)
    torch.testing.assert_close(seen[0].earlier[1].cls_row(), row.gather(1, kept))
    assert (seen[0].layer, seen[0].depth) == (3, 3)


def test_tokens_before_the_mlp() -> None:
    torch.manual_seed(0)
    model: Any = timm_model().eval()
    seen: list[View] = []

    def watch(view: View, keep: int) -> Reduction:
        seen.append(view)
        return Reduction.keep(top(view.noise(), keep), view.n)

    inputs: list[Tensor] = []
    model.blocks[1].norm2.register_forward_hook(lambda module, args, out: inputs.append(args[0]))
    with torch.no_grad(), Handle(model, plan_of(describe(watch, needs=("before",)), "2", "5")):
        model(torch.randn(2, 3, 32, 32))
    assert seen[0].before is not None and torch.equal(seen[0].before, inputs[0][:, 1:])
    for where in ("0", "2.attn"):
        with pytest.raises(UserError, match="before and after the MLP"):
            Handle(model, plan_of(describe(watch, needs=("before",)), where, "5"))


def test_schedules_extra_tokens_and_carried_numbers() -> None:
    torch.manual_seed(0)
    model: Any = timm_model().eval()
    carried: list[Tensor | None] = []

    def fall(view: View, keep: int) -> Reduction:
        carried.append(view.carried)
        order = torch.arange(view.n).expand(len(view.tokens), -1)
        rest = order[:, keep - 1 : keep]  # the extra token is the last kept one again, so that the count shows
        index = torch.cat([order[:, :keep].flip(1), rest + 1], dim=1)
        return Reduction(index, view.n, carry=order.float() if view.carried is None else view.carried + 100)

    def count(place: Place, options: Any) -> int:
        assert place.first == N and place.total == 3
        return (12, 8, 3)[place.number]

    method = describe(fall, selects=False, count=count, extra=1)
    with torch.no_grad(), Handle(model, plan_of(method, "1,2,3")) as handle:
        model(torch.randn(2, 3, 32, 32))
        assert [row.tokens_out for row in handle.ledger] == [13, 9, 4]
    assert carried[0] is None and carried[1] is not None and carried[2] is not None
    assert carried[1][0].tolist() == [*range(11, -1, -1), 12]
    assert carried[2][0].tolist() == [104, 105, 106, 107, 108, 109, 110, 111, 103]


def test_without_proportional_attention_sizes_are_kept_but_not_added() -> None:
    torch.manual_seed(0)
    model: Any = timm_model().eval()
    sizes: list[Tensor | None] = []

    def half(view: View, keep: int) -> Reduction:
        sizes.append(view.sizes)
        groups = torch.arange(view.n).expand(len(view.tokens), -1) % keep
        made = Reduction.merge(groups, torch.arange(keep).expand(len(view.tokens), -1), view.sizes_or_ones())
        made.prop_attn = False
        return made

    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), Handle(model, plan_of(describe(half, selects=False), "1,2", "50%")):
        with_plan = model(images)
    assert sizes[0] is None and sizes[1] is not None and sizes[1].unique().tolist() == [2.0]
    with torch.no_grad():  # every token is the mean of two, then of four: the stock blocks on shorter sequences
        x = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))
        for block, halves in zip(model.blocks, (True, True, False), strict=True):
            x = block(x)
            if halves:
                n = (x.shape[1] - 1) // 2
                x = torch.cat([x[:, :1], (x[:, 1 : n + 1] + x[:, n + 1 :]) / 2], dim=1)
        torch.testing.assert_close(with_plan, model.forward_head(model.norm(x)), rtol=0, atol=1e-5)


def test_the_text_comes_from_the_caller() -> None:
    torch.manual_seed(0)
    model: Any = open_clip_model().eval()
    seen: list[View] = []

    def near(view: View, keep: int) -> Reduction:
        seen.append(view)
        assert view.text is not None and view.image_embeds is not None
        return Reduction.keep(top((view.image_embeds @ view.text.transpose(1, 2)).mean(-1), keep), view.n)

    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), Handle(model, plan_of(describe(near, needs=("text",)), "2", "5")) as handle:
        with pytest.raises(UserError, match="encode_text"):
            model.encode_image(images)
        with handle.call(context={"text": torch.randn(2, 16)}):
            model.encode_image(images)
        with handle.call(context={"text": torch.randn(2, 12)}), pytest.raises(UserError, match="space of the text"):
            model.encode_image(images)
    assert seen[0].text is not None and seen[0].text.shape == (2, 1, 16)


@pytest.mark.parametrize("name", ["trim", "mmtok", "laps", "cdpruner"])
def test_a_model_without_a_text_tower_takes_the_text_of_the_caller(name: str) -> None:
    """So plans with these methods are no error before the first call, which says what is missing."""
    torch.manual_seed(0)
    model: Any = timm_model().eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), Handle(model, Plan.parse(f"{name}@2:5")) as handle:
        with pytest.raises(UserError, match="needs the text of each image; give its embeddings"):
            model(images)
        width = open_tower(model).project(torch.zeros(1, 1, model.embed_dim)).shape[-1]
        with handle.call(context={"text": torch.randn(2, width)}):
            assert model(images).isfinite().all()
        assert handle.ledger[0].tokens_out in (5, 6)


def test_ats_samples_eight_tokens_with_cls_at_least() -> None:
    torch.manual_seed(0)
    model: Any = timm_model().eval()
    few, least = Handle(model, Plan.parse("ats@2.attn:3")), Handle(model, Plan.parse("ats@2.attn:7"))
    assert ["ats cannot keep fewer than 7" in note for note in few.notes] == [True] and not least.notes
    images, outputs = torch.randn(2, 3, 32, 32), []
    for handle in (few, least):
        with torch.no_grad(), handle:
            outputs.append(model(images))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("attention", ["layer", "previous"])
def test_the_rows_of_the_text_are_those_of_the_layer(attention: str) -> None:
    """Against the attention maps that transformers itself returns."""
    model = vlm_models.llava(implementation="eager")
    batch = vlm_models.prompts((1, 1), (4, 7))
    seen: list[View] = []

    def watch(view: View, keep: int) -> Reduction:
        assert view.attention is not None
        view.attention.question_rows()  # of this moment
        seen.append(view)
        return Reduction.keep(top(view.noise(), keep), view.n)

    method = describe(watch, needs=("attention", "question", "inputs"))
    step = Step(method, Where.parse("llm.2"), Budget.parse("10"), (("attention", attention),))
    layer = 2 if attention == "layer" else 1
    with torch.no_grad():
        stock = model(**batch, output_attentions=True).attentions[layer].float()  # (B, H, L, L)
        embeds = model.get_input_embeddings()(batch["input_ids"]).float()
        with Handle(model, Plan((step,))):
            model(**batch)
    view = seen[0]
    assert view.attention is not None and view.inputs is not None and view.question is not None
    heads, mask = view.attention.text_heads(), view.attention.question_rows().mask
    is_image = batch["input_ids"] == vlm_models.IMAGE
    for row in range(2):
        words = (~is_image[row] & batch["attention_mask"][row].bool()).nonzero()[:, 0]
        at = is_image[row].nonzero()[:, 0]
        assert torch.equal(mask[row].nonzero()[:, 0], torch.arange(len(words)))
        golden = stock[row][:, words][:, :, at]
        torch.testing.assert_close(heads[row, :, : len(words)].float(), golden, rtol=0, atol=1e-5)
        torch.testing.assert_close(view.inputs.question.tokens[row, : len(words)].float(), embeds[row, words])
        assert view.attention.question_rows().follows[row, : len(words)].tolist() == (words > at.max()).tolist()
    assert view.inputs.tokens.shape[1] == view.n and view.final_norm is not None


def test_the_rotary_tables_are_those_of_the_decoder() -> None:
    """Of the tokens that are left, with padding before one prompt; behind a first cut too. Asked for, or not there."""
    model = vlm_models.llava()
    batch = vlm_models.prompts((1, 1), (4, 7))
    seen: list[View] = []

    def watch(view: View, keep: int) -> Reduction:
        seen.append(view)
        return Reduction.keep(top(view.noise(), keep), view.n)

    def step(needs: tuple[str, ...], place: str, budget: str) -> Step:
        return Step(describe(watch, needs=needs), Where.parse(place), Budget.parse(budget))

    asks = ("question", "rotary")
    with torch.no_grad(), Handle(model, Plan((step(asks, "llm.1,2", "50%"), step((), "llm.3", "50%")))) as handle:
        model(**batch)
        groups = handle.groups
    assert groups is not None and len(seen) == 3 and seen[2].rotary is None
    table = model.model.language_model.rotary_emb
    length = batch["input_ids"].shape[1]
    cos, sin = table(torch.zeros(1, 1, 1), torch.arange(length)[None])  # (1, L, d)
    is_image = batch["input_ids"] == vlm_models.IMAGE
    for view in seen[:2]:
        assert view.rotary is not None and view.question is not None
        for row in range(2):
            words = (~is_image[row] & batch["attention_mask"][row].bool()).nonzero()[:, 0]
            for got, golden in zip(view.rotary.question, (cos, sin), strict=True):
                torch.testing.assert_close(got[row, : len(words)].float(), golden[0, words])
            assert view.rotary.tokens[0].shape[:2] == view.tokens.shape[:2]
    assert seen[0].rotary is not None
    for got, golden in zip(seen[0].rotary.tokens, (cos, sin), strict=True):
        for row in range(2):
            torch.testing.assert_close(got[row].float(), golden[0, is_image[row].nonzero()[:, 0]])


def test_rotary_tables_are_refused_in_a_tower() -> None:
    model: Any = timm_model().eval()
    with pytest.raises(UserError, match="rotary embedding of the language model; use it in the decoder"):
        Handle(model, plan_of(describe(any_tokens, needs=("rotary",)), "2", "5"))


def any_tokens(view: View, keep: int) -> Reduction:
    return Reduction.keep(top(view.noise(), keep), view.n)


@pytest.mark.parametrize("tau", [0.0, 0.1])
@pytest.mark.parametrize("anchored", [True, False])
def test_pixelprune_follows_its_rule(tau: float, anchored: bool) -> None:
    """Against the rule patch by patch, through a tower: flat areas of a drawing are predicted, its edges are kept."""
    torch.manual_seed(0)
    model: Any = timm_model().eval()
    images = torch.zeros(3, 3, 32, 32)
    images[0, :, 8:24, 8:24] = 1.0
    images[1] = torch.rand(3, 4, 4).round().repeat_interleave(8, 1).repeat_interleave(8, 2)
    images[2] = torch.linspace(0, 1, 32)
    plan = Plan.parse(f"pixelprune(tau={tau},anchored={str(anchored).lower()},std=1.0)")
    with torch.no_grad(), Handle(model, plan) as handle:
        model(images)
        groups = handle.groups
    assert groups is not None
    for image, group in zip(images, groups, strict=True):
        patches = image.unfold(1, 8, 8).unfold(2, 8, 8).permute(1, 2, 0, 3, 4).flatten(2)  # (4, 4, F)
        assert (group >= 0).tolist() == _kept_by_rule(patches, tau, anchored)


def _kept_by_rule(patches: Tensor, tau: float, anchored: bool) -> list[bool]:
    seen, kept = patches.clone(), []

    def alike(x: Tensor, y: Tensor) -> bool:
        return bool((x - y).abs().max() <= tau)

    for r in range(4):
        for c in range(4):
            if r == c == 0:
                kept.append(True)
                continue
            if r == 0 or c == 0:
                guess = seen[r, c - 1] if r == 0 else seen[r - 1, c]
            else:
                left, above, corner = seen[r, c - 1], seen[r - 1, c], seen[r - 1, c - 1]
                guess = above if alike(corner, left) and not alike(corner, above) else left
            kept.append(not alike(patches[r, c], guess))
            if anchored and not kept[-1]:
                seen[r, c] = guess
    return kept


def test_what_was_before_the_mlp_follows_an_earlier_cut_behind_the_same_block() -> None:
    """The second method sees the same tokens before and after the MLP as a first cut at that place leaves."""
    torch.manual_seed(0)
    model: Any = open_clip_model(layers=2).eval()
    seen: list[View] = []

    def changed(view: View, keep: int) -> Reduction:
        seen.append(view)
        assert view.before is not None
        scores = (view.tokens - view.before).norm(dim=-1)
        return Reduction.keep(top(scores, keep), view.n, scores=scores)

    step = plan_of(describe(changed, needs=("before",)), "1", "4").steps
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        for first in ((), Plan.parse("grid@1:9").steps):
            with Handle(model, Plan((*first, *step))):
                model.encode_image(images)
    alone, behind = seen
    with torch.no_grad(), Handle(model, Plan.parse("grid@1:9")) as handle:
        model.encode_image(images)
        index = handle.kept
    assert index is not None and alone.before is not None and behind.before is not None
    at = index[..., None].expand(-1, -1, alone.before.shape[2])
    torch.testing.assert_close(behind.before, alone.before.gather(1, at))
    torch.testing.assert_close(behind.tokens, alone.tokens.gather(1, at))
