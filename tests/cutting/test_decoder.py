"""Plans on vision-language models: what generate() gives is what the tokens that are left would give, however it is asked."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import tokensieve
from tests.support import vlm_models
from tests.support.vlm_models import DECODERS, GRID, IMAGE, single
from tokensieve.core import Reduction, View
from tokensieve.cutting.cache import cached_length
from tokensieve.cutting.handle import Handle
from tokensieve.errors import PlanWarning, Uncuttable, UserError
from tokensieve.methods.registry import describe
from tokensieve.models.registry import open_tower, open_vlm
from tokensieve.models.sight import LayerKind, Sight
from tokensieve.plan import Budget, Plan, Step, Where

N = GRID**2
NEAR = 1e-4  # of logits of about 1; all is in float64, but norms, scores and means are taken in float32
PLANS = (
    "random@llm.2:50%",
    "anchor@out:10(k=4)",
    "anchor@2:12(k=4,rest=merge)",
    "anchor@llm.3:10(k=4)",
    "random@2:30 + grid@out:20 + random@llm.0:15 + anchor@llm.3:8(k=3)",
    "anchor@out:9(k=3,rest=fuse) + random@llm.1,4:50%",
    "anchor@llm.2:9(k=3,rest=merge)",
)


def llava(*args: Any, **kwargs: Any) -> Any:
    return vlm_models.llava(*args, **kwargs).double()


def prompts(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
    batch = vlm_models.prompts(*args, **kwargs)
    return batch | {"pixel_values": batch["pixel_values"].double()}


def answer(model: Any, batch: dict[str, Tensor], **kwargs: Any) -> Any:
    return model.generate(
        **batch, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True, **kwargs
    )


def apart(one: Any, two: Any) -> float:
    """The largest difference of the logits of two generations."""
    return max(float((a - b).abs().max()) for a, b in zip(one.logits, two.logits, strict=True))


@contextmanager
def on(model: Any, plan: str, samples: Tensor | None = None) -> Iterator[Handle]:
    with tokensieve.apply(model, plan) as handle, handle.call(samples=samples):
        yield handle


def placed(decide: Any, where: str, keep: int) -> Step:
    return Step(describe(decide), Where.parse(where), Budget("keep", Fraction(keep)))


# --- the same answer whichever way it is asked for --------------------------------------------------------------------


@pytest.mark.parametrize("decoder", DECODERS)
def test_no_plan_is_the_stock_model_to_the_bit(decoder: str) -> None:
    model, batch = vlm_models.llava(decoder), vlm_models.prompts()
    stock = answer(model, batch)
    before = set(model.__dict__) | set(model.model.__dict__)
    with tokensieve.apply(model, "none"):
        same = answer(model, batch)
    assert all(torch.equal(a, b) for a, b in zip(stock.logits, same.logits, strict=True))
    handle = tokensieve.apply(model, PLANS[4])
    answer(model, batch)
    handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(stock.logits, answer(model, batch).logits, strict=True))
    assert set(model.__dict__) | set(model.model.__dict__) == before
    assert not any("forward" in layer.__dict__ for layer in model.model.language_model.layers)
    assert not model.model._forward_pre_hooks and not model.model.language_model._forward_pre_hooks


@pytest.mark.parametrize("decoder", DECODERS)
def test_everything_kept_is_the_stock_model(decoder: str) -> None:
    model, batch = llava(decoder), prompts(words=(3, 6))
    stock = answer(model, batch)
    with pytest.warns(PlanWarning), tokensieve.apply(model, "random@llm.2:100%"):
        assert apart(stock, answer(model, batch)) < NEAR


@pytest.mark.parametrize(("decoder", "plan"), [("llama", plan) for plan in PLANS] + [(d, PLANS[4]) for d in DECODERS[1:]])
def test_with_cache_or_without_padded_or_alone(decoder: str, plan: str) -> None:
    model, batch = llava(decoder), prompts((1, 2, 1), (5, 3, 9))
    stock = answer(model, batch)
    with on(model, plan, torch.arange(4)) as handle:
        cached = answer(model, batch)
        assert handle.ledger and all(row.tokens_out < row.tokens_in for row in handle.ledger)
        uncached = answer(model, batch, use_cache=False)
        assert apart(cached, uncached) < NEAR
        assert torch.equal(cached.sequences, uncached.sequences)
        assert apart(cached, stock) > 1e-3  # the plan does something
        for row, (first, count) in enumerate(((0, 1), (1, 2), (3, 1))):
            with handle.call(samples=torch.arange(first, first + count)):
                alone = answer(model, single(batch, row, first, count))
            for a, b in zip(alone.logits, cached.logits, strict=True):
                assert torch.allclose(a[0], b[row], atol=NEAR)


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[5]])
def test_beams(plan: str) -> None:
    model, batch = llava(), prompts((1, 2), (5, 7))
    with on(model, plan, torch.arange(3)):
        found = [
            model.generate(**batch, max_new_tokens=5, num_beams=3, do_sample=False, use_cache=cached)
            for cached in (True, False)
        ]
    assert torch.equal(*found)
    with tokensieve.apply(model, "anchor@llm.2:12(k=12)"):  # nothing random: every beam of one prompt alone
        both = model.generate(**batch, max_new_tokens=5, num_beams=3, do_sample=False)
        one = model.generate(**single(batch, 0, 0), max_new_tokens=5, num_beams=3, do_sample=False)
    assert torch.equal(both[0, -5:], one[0, -5:])


def test_kernels_agree() -> None:
    made = []
    for implementation in ("sdpa", "eager"):
        model = llava(implementation=implementation)
        with on(model, PLANS[4], torch.arange(2)):
            made.append(answer(model, prompts((1, 1), (5, 5))))
    assert apart(*made) < NEAR
    made = []  # transformers' eager attention knows no padding in float64; in float32 there must be no near ties
    for implementation in ("sdpa", "eager"):
        model = vlm_models.llava(implementation=implementation)
        with on(model, "random@2:30 + grid@out:20 + random@llm.0:15 + pool@llm.3:8", torch.arange(3)):
            made.append(answer(model, vlm_models.prompts((1, 2), (5, 3))))
    assert apart(*made) < 1e-3 * float(made[0].logits[0].abs().max())


def test_every_layer_has_its_own_cache_length() -> None:
    model, batch = llava(), prompts((1,), (5,))
    length = batch["input_ids"].shape[1]
    with tokensieve.apply(model, "grid@out:20 + grid@llm.2:10 + grid@llm.4:5"):
        cache = answer(model, batch).past_key_values
    text, new = length - N, 3  # the last of four new tokens was not fed back
    assert [cached_length(cache, layer) for layer in range(6)] == [text + new + k for k in (20, 20, 10, 10, 5, 5)]


# --- what it computes -------------------------------------------------------------------------------------------------


def slow(model: Any, batch: dict[str, Tensor], cuts: dict[int, Tensor]) -> Tensor:
    """The logits after one prompt, layer by layer: at a layer, vision tokens other than those named (raster) are gone."""
    inner = model.model
    ids = batch["input_ids"][0]
    states = inner.get_input_embeddings()(ids).clone()
    vision = (ids == IMAGE).nonzero()[:, 0]
    states[vision] = inner.get_image_features(batch["pixel_values"], return_dict=True).pooler_output[0]
    where = torch.arange(len(ids))
    for number, layer in enumerate(inner.language_model.layers):
        if number in cuts:
            stay = torch.tensor([bool(p not in vision or p in vision[cuts[number]]) for p in where])
            states, where = states[stay], where[stay]
        tables = inner.language_model.rotary_emb(states[None], where[None])
        blocked = torch.full((len(where), len(where)), -torch.inf, dtype=states.dtype).triu(1)[None, None]
        states = layer(states[None], attention_mask=blocked, position_embeddings=tables)[0]
    return model.lm_head(inner.language_model.norm(states))[-1]


@pytest.mark.parametrize("decoder", DECODERS)
def test_decoder_cuts_are_those_of_a_slow_loop(decoder: str) -> None:
    model, batch = llava(decoder), prompts((1,), (5,))
    with torch.no_grad(), tokensieve.apply(model, "random@llm.1:20 + random@llm.4:7") as handle:
        fast = model(**batch).logits[0, -1]
        first, second = (reduction.index[0] for _, reduction in handle.stages)
        handle.remove()
        assert torch.allclose(fast, slow(model, batch, {1: first, 4: first[second]}), atol=NEAR)


def test_output_cut_keeps_features_and_places() -> None:
    model, batch = llava(), prompts((1,), (5,))
    with torch.no_grad(), tokensieve.apply(model, "anchor@out:10(k=4)") as handle:
        fast = model(**batch).logits[0, -1]
        kept = handle.kept
        assert kept is not None
        handle.remove()
        assert torch.allclose(fast, slow(model, batch, {0: kept[0]}), atol=NEAR)


def test_the_tower_is_cut_before_the_layer_that_llava_takes() -> None:
    model = llava(layer=-2)
    tower = open_tower(model)
    assert tower.depth == 3 and tower.grid == (GRID, GRID)
    assert open_tower(llava(layer=-1)).depth == 4
    with torch.no_grad():
        pixels = prompts()["pixel_values"]
        full = model.model.get_image_features(pixels, return_dict=True).pooler_output
        with tokensieve.apply(model, "grid@out:9") as handle:
            kept = model.model.get_image_features(pixels, return_dict=True).pooler_output
            index = handle.kept
    assert index is not None
    for image in range(2):
        assert torch.allclose(kept[image][index[image]], full[image][index[image]], atol=NEAR)
        rest = [i for i in range(N) if i not in index[image]]
        assert float(kept[image][rest].abs().max()) == 0


def test_attention_of_a_decoder_layer_is_that_of_the_eager_model() -> None:
    model, batch = llava(implementation="eager"), prompts((1,), (5,))
    seen: dict[str, Tensor] = {}

    def look(view: View, keep: int) -> Reduction:
        seen["row"] = view.coarse()
        return Reduction.keep(torch.arange(keep)[None], view.n)

    step = Step(describe(look, needs=("attention",)), Where.parse("llm.3"), Budget("keep", Fraction(30)))
    with torch.no_grad():
        stock = model(**batch, output_attentions=True).attentions[3].mean(1)  # (1, L, L)
        with Handle(model, Plan((step,))):
            model(**batch)
    vision = batch["input_ids"][0] == IMAGE
    assert torch.allclose(seen["row"].float(), stock[:, -1, vision].float(), atol=NEAR)


def test_attention_of_a_decoder_layer_hears_sizes() -> None:
    model, batch = llava(implementation="eager"), prompts((1,), (5,))
    seen: dict[str, Tensor] = {}

    def look(view: View, keep: int) -> Reduction:
        seen["row"] = view.coarse()
        return Reduction.keep(torch.arange(keep)[None], view.n)

    step = Step(describe(look, needs=("attention",)), Where.parse("llm.3"), Budget("keep", Fraction(8)))
    plan = Plan((*Plan.parse("pool@out:9").steps, step))
    with torch.no_grad(), Handle(model, plan):
        model(**batch, output_attentions=True)  # merged tokens alone: row of the last token, keys in their order
        stock = model(**batch, output_attentions=True).attentions[2]
    assert stock.shape[-1] < batch["input_ids"].shape[1]
    assert 0 < float(seen["row"].sum()) < 1
    alone = {**batch, "input_ids": batch["input_ids"][:, : 2 + N], "attention_mask": batch["attention_mask"][:, : 2 + N]}
    with torch.no_grad(), Handle(model, plan):
        model(**alone)  # no text after the image
    assert 0 < float(seen["row"].sum()) < 1 + 1e-5


def test_a_loss_can_be_taken() -> None:
    model, batch = llava(), prompts((1, 1), (5, 8))
    labels = batch["input_ids"].clone()
    labels[:, :-3] = -100
    with torch.no_grad(), tokensieve.apply(model, "grid@out:20 + grid@llm.2:10"):
        out = model(**batch, labels=labels, output_hidden_states=True)
    assert out.logits.shape[:2] == labels.shape
    assert all(state.shape[:2] == labels.shape for state in out.hidden_states)
    own = torch.nn.functional.cross_entropy(out.logits[:, -4:-1].flatten(0, 1), labels[:, -3:].flatten())
    assert torch.allclose(out.loss.float(), own.float(), atol=NEAR)


def test_gradients_flow_through_the_cuts() -> None:
    model, batch = llava(), prompts((1,), (5,))
    with tokensieve.apply(model, "grid@out:20 + grid@llm.2:10(rest=merge)"):
        model(**batch, labels=batch["input_ids"]).loss.backward()
    assert all(p.grad is not None for p in model.model.multi_modal_projector.parameters())


# --- soft and hard ----------------------------------------------------------------------------------------------------


def test_soft_becomes_hard() -> None:
    """As the probabilities go to 0 and 1, the logits of the soft path become those of the hard one."""
    model, batch = llava(), prompts((1, 2), (5, 3))
    chosen = torch.randperm(N, generator=torch.Generator().manual_seed(1))[:12]
    sharpness = [0.0]

    def soft(view: View, keep: int) -> Reduction:
        logits = torch.full((len(view.tokens), view.n), -1.0)
        logits[:, chosen[chosen < view.n][:keep]] = 1.0
        return Reduction(chosen.sort().values.expand(len(logits), -1), view.n, soft=(logits * sharpness[0]).sigmoid())

    def hard(view: View, keep: int) -> Reduction:
        return Reduction.keep(chosen.expand(len(view.tokens), -1), view.n)

    with Handle(model, Plan((placed(hard, "llm.2", 12),))):
        goal = answer(model, batch)
    gaps = []
    with Handle(model, Plan((placed(soft, "llm.2", 12),))) as handle:
        for sharpness[0] in (0.5, 10.0, 60.0):
            gaps.append(apart(goal, answer(model, batch)))
        assert [vars(row) for row in handle.ledger] == [{"layer": "llm.2", "tokens_in": N, "tokens_out": N}]
        assert apart(answer(model, batch), answer(model, batch, use_cache=False)) < NEAR
    assert gaps[0] > 1e-2 and gaps[1] < gaps[0] and gaps[2] < NEAR


def test_a_soft_mask_acts_and_has_a_gradient() -> None:
    model, batch = llava(), prompts((1,), (5,))
    logits = torch.zeros((1, N), requires_grad=True)

    def soft(view: View, keep: int) -> Reduction:
        return Reduction(torch.arange(keep)[None], view.n, soft=logits.sigmoid())

    stock = model(**batch).logits
    with Handle(model, Plan((placed(soft, "llm.2", 12), placed(soft, "llm.4", 12)))):
        halved = model(**batch)
    assert not torch.allclose(halved.logits[0, -1], stock[0, -1], atol=1e-3)
    halved.logits[0, -1].square().sum().backward()
    assert logits.grad is not None and bool((logits.grad != 0).all())


# --- the question -----------------------------------------------------------------------------------------------------


def asked(model: Any, batch: dict[str, Tensor], where: str, context: dict[str, Any] | None = None, **how: Any) -> list[Tensor]:
    """How many tokens each question has, image by image, every time a method is asked."""
    seen: list[Tensor] = []

    def look(view: View, keep: int) -> Reduction:
        assert view.question is not None and view.place == where
        assert view.question.tokens.shape[:2] == view.question.mask.shape
        seen.append(view.question.mask.sum(1))
        return Reduction(torch.arange(keep).expand(len(view.tokens), -1), view.n)

    step = Step(describe(look, needs=("question",)), Where.parse(where), Budget("keep", Fraction(30)))
    with Handle(model, Plan((step,)), context=context):
        if how.pop("forward", False):
            with torch.no_grad():
                model(**batch)
        else:
            answer(model, batch, **how)
    return seen


@pytest.mark.parametrize("where", ["out", "llm.3"])
def test_the_question_is_the_text_of_the_prompt(where: str) -> None:
    model, batch = llava(), prompts((1, 2), (5, 3))
    wanted = torch.tensor([2 + 1 + 5, 2 + 2 + 3, 2 + 2 + 3])  # before, after each image, asked; the second prompt's twice
    for how in ({}, {"use_cache": False}, {"forward": True}):
        for counts in asked(model, batch, where, **how):
            assert torch.equal(counts, wanted)
    mask = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    mask[:, -4:-2] = True
    assert torch.equal(asked(model, batch, where, {"question": mask}, forward=True)[0], torch.tensor([2, 2, 2]))


# --- going on with a cache --------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_with_its_cache() -> None:
    """Text after an image, and another image after that, with the cache of what came before."""
    model, batch = llava(), prompts((1,), (5,))
    more = prompts((1,), (4,), seed=3)
    ids = torch.cat([batch["input_ids"], more["input_ids"]], dim=1)
    pixels = torch.cat([batch["pixel_values"], more["pixel_values"]])
    with torch.no_grad(), tokensieve.apply(model, "grid@out:20 + grid@llm.2:10"):
        whole = model(input_ids=ids, pixel_values=pixels)
        first = model(**batch, use_cache=True)
        second = model(
            input_ids=more["input_ids"],
            pixel_values=more["pixel_values"],
            past_key_values=first.past_key_values,
            position_ids=torch.arange(batch["input_ids"].shape[1], ids.shape[1])[None],
        )
    assert torch.allclose(whole.logits[0, -1], second.logits[0, -1], atol=NEAR)


CONVERSATIONS = ("grid@llm.2:10", "grid@llm.0:10", "grid@out:10", "pool@out:9 + grid@llm.2:6")


@pytest.mark.parametrize("plan", CONVERSATIONS)
def test_generation_goes_on_with_a_cache(plan: str) -> None:
    """More text after the first answer: as if it were asked at once, by the cache, by a copy of it, or step by step."""
    model, batch = llava(), prompts((1, 2), (5, 3))
    more = torch.tensor([[11, 12, 13], [21, 22, 23]])
    ids = torch.cat([batch["input_ids"], more], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(more)], dim=1)
    with torch.no_grad():
        handle = tokensieve.apply(model, plan)
        cache = model(**batch, use_cache=True).past_key_values
        assert cache.get_seq_length() == batch["input_ids"].shape[1]
        copies = [copy.deepcopy(cache) for _ in range(3)]
        handle.remove()
        with tokensieve.apply(model, plan):  # another handle of the same plan
            whole = model(input_ids=ids, attention_mask=mask, pixel_values=batch["pixel_values"]).logits[:, -1]
            at_once = model(input_ids=more, attention_mask=mask, past_key_values=cache, position_ids=mask.cumsum(1)[:, -3:] - 1)
            unplaced = model(input_ids=more, attention_mask=mask, past_key_values=copies[0])
            said = answer(model, {"input_ids": ids, "attention_mask": mask}, past_key_values=copies[1])
            cropped = copies[2]
            model(input_ids=more, attention_mask=mask, past_key_values=cropped)
            cropped.crop(-2)
            again = model(input_ids=more[:, 1:], attention_mask=mask, past_key_values=cropped)
    assert torch.allclose(again.logits[:, -1], unplaced.logits[:, -1], atol=NEAR)
    assert torch.allclose(said.logits[0], at_once.logits[:, -1].float(), atol=NEAR)
    assert torch.allclose(whole, unplaced.logits[:, -1], atol=NEAR)
    with tokensieve.apply(model, "grid@llm.3:10"), pytest.raises(UserError, match="filled under the plan"):
        model(input_ids=more, past_key_values=cache)


def test_a_padded_text_before_the_image() -> None:
    model = llava()
    text = {
        "input_ids": torch.tensor([[0, 0, 1, 7], [1, 7, 8, 9]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
    }
    batch = prompts((1, 1), (5, 5))
    ids = torch.cat([text["input_ids"], batch["input_ids"]], dim=1)
    mask = torch.cat([text["attention_mask"], batch["attention_mask"]], dim=1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        with tokensieve.apply(model, "grid@llm.2:10"):
            whole = model(input_ids=ids, attention_mask=mask, pixel_values=batch["pixel_values"]).logits[:, -1]
            cache = model(**text, use_cache=True).past_key_values
            after = model(**(batch | {"attention_mask": mask}), past_key_values=cache).logits[:, -1]
    assert torch.allclose(whole, after, atol=NEAR)


def test_guessed_tokens_can_be_taken_back() -> None:
    """Prompt look-up decoding crops the cache."""
    model, batch = llava(), prompts((1,), (5,))
    batch["input_ids"][0, -3:] = batch["input_ids"][0, -4]
    with tokensieve.apply(model, "grid@out:20 + grid@llm.2:10"):
        plain = model.generate(**batch, max_new_tokens=8, do_sample=False)
        guessed = model.generate(**batch, max_new_tokens=8, do_sample=False, prompt_lookup_num_tokens=3)
    assert torch.equal(plain, guessed)


@pytest.mark.parametrize("plan", ["grid@out:4", "cover@2:5", "grid@llm.1:4", "grid@out:9 + grid@llm.3:4(rest=merge)"])
def test_a_prompt_that_ends_with_an_image_is_answered_from_the_last_token_that_is_left(plan: str) -> None:
    model, batch = llava(), prompts(images=(1, 2), words=(0, 0))
    batch = {name: value[:, :-1] if value.dim() == 2 else value for name, value in batch.items()}  # no closing token
    length = batch["input_ids"].shape[1]
    with torch.no_grad(), tokensieve.apply(model, plan) as handle:
        out = model(**batch, output_hidden_states=True)
        states, logits = out.hidden_states[-1], out.logits
        kept = handle.kept.amax(1)[[0, 2]]  # of the last image of each prompt
        answers = answer(model, batch)
    last = length - N + kept
    assert bool((last < length - 1).any())
    assert torch.equal(states[:, -1], states[torch.arange(2), last]) and bool(states[:, -1].abs().sum() > 0)
    assert torch.equal(answers.sequences[:, length], logits[:, -1].argmax(-1))


def test_text_alone_is_the_stock_model() -> None:
    model = llava()
    ids = torch.tensor([[1, 7, 11, 12, 13]])
    stock = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    with tokensieve.apply(model, PLANS[4]), pytest.warns(PlanWarning, match="no image"):
        assert torch.equal(stock, model.generate(input_ids=ids, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[2]])
def test_text_alone_has_no_ledger(plan: str) -> None:
    model, batch, ids = llava(), prompts((1,), (5,)), torch.tensor([[1, 7, 11, 12, 13]])
    with torch.no_grad(), tokensieve.apply(model, plan) as handle:
        model(**batch)
        ledger = handle.ledger
        assert ledger and handle.kept is not None
        with pytest.warns(PlanWarning, match="no image"):
            model(input_ids=ids)
        assert not handle.ledger and handle.kept is None and handle.reduction is None
        model.generate(input_ids=ids, max_new_tokens=2)
        assert not handle.ledger
        model(**batch)
        assert handle.ledger == ledger


# --- what cannot be done ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("random@llm.6:10", "llm.0 to llm.5"),
        ("random@llm.-7:10", "no layer -7"),
        ("random@4:10", "no layer 4 in a tower of 3 blocks"),
        ("random@out:10(rest=zero) + random@llm.2:4", "rest=zero"),
        ("random@out:10(rest=zero)", "rest=zero"),
        ("random@llm.2:-36", "nothing would be left"),
    ],
)
def test_plans_that_do_not_fit(plan: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        tokensieve.apply(llava(), plan)


def test_models_in_a_state_that_cannot_be_cut() -> None:
    batch = prompts((1,), (5,))
    model = llava()
    with tokensieve.apply(model, "random@llm.2:10"):
        with pytest.raises(UserError, match="static"):
            answer(model, batch, cache_implementation="static")
        with pytest.raises(UserError, match="another plan"):
            tokensieve.apply(model, "random@llm.3:10")
        with pytest.raises(UserError, match="another plan"):
            tokensieve.apply(model.model.vision_tower, "random@2:10")
    model = llava()
    model.model.language_model.config._attn_implementation = "flex_attention"
    with pytest.raises(UserError, match="sdpa"):
        tokensieve.apply(model, "random@llm.2:10")
    model = llava()
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(UserError, match="gradient checkpointing"):
        tokensieve.apply(model, "random@llm.2:10")


def test_an_exception_leaves_nothing_behind() -> None:
    model, batch = llava(), prompts((1,), (5,))
    stock = answer(model, batch)

    def broken(view: View, keep: int) -> Reduction:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"), Handle(model, Plan((placed(broken, "llm.2", 12),))):
        answer(model, batch)
    assert apart(stock, answer(model, batch)) == 0


def test_flash_attention_gets_the_mask_it_wants() -> None:
    vlm = open_vlm(llava())
    assert vlm is not None
    vlm.decoder.module.config._attn_implementation = "flash_attention_2"
    alive, x = torch.tensor([[False, True, True], [True, True, True]]), torch.zeros(2, 3, 8)
    assert vlm.decoder.mask(Sight((2, 3)), 3, None, x) is None
    assert torch.equal(vlm.decoder.mask(Sight((2, 3), alive), 3, None, x), alive)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="flash"):
        vlm.decoder.mask(Sight((2, 3), alive), 3, torch.zeros(2, 3), x)
    with pytest.raises(UserError, match="image tokens see those behind them"):
        vlm.decoder.mask(Sight((2, 3), alive, block=torch.zeros(2, 3)), 3, None, x)
    vlm.decoder.kinds[0] = LayerKind("sliding_attention", window=20)
    vlm.decoder.check(20)
    with pytest.raises(UserError, match="sliding window of 20"):
        vlm.decoder.check(21)


def test_two_steps_at_one_layer_are_both_in_the_ledger() -> None:
    model, batch = llava(), prompts((1, 1), (5, 5))
    with tokensieve.apply(model, "grid@2:30 + grid@llm.2:20 + grid@llm.2:10") as handle:
        answer(model, batch, num_beams=2)
        assert [row.tokens_out for row in handle.ledger] == [30, 20, 10]
        assert handle.kept is not None and handle.kept.shape == (2, 10)
        answer(model, prompts((1, 2), (5, 5)), use_cache=False)
        assert len(handle.ledger) == 3


def test_features_of_other_images_are_refused() -> None:
    model, one, two = llava(), prompts((1,), (5,)), prompts((1,), (5,), seed=1)
    with torch.no_grad(), tokensieve.apply(model, "anchor@out:10(k=4)"):
        first, _ = (model.model.get_image_features(batch["pixel_values"], return_dict=True) for batch in (one, two))
        with pytest.raises(UserError, match="computed last"):
            model(one["input_ids"], mm_encoder_outputs={"image": first})


def test_features_of_an_earlier_time_are_refused() -> None:
    model, batch = llava(), prompts((1,), (5,))
    features = model.model.get_image_features(batch["pixel_values"], return_dict=True)
    with tokensieve.apply(model, "random@llm.2:10"), pytest.raises(UserError, match="before the plan was attached"):
        model(batch["input_ids"], mm_encoder_outputs={"image": features})


def test_a_tower_that_cannot_be_cut_says_so() -> None:
    model = llava()
    model.model.config.vision_feature_select_strategy = "full"
    with pytest.raises(Uncuttable, match=r"llm\.0"):
        tokensieve.apply(model, "random@out:10")
    tokensieve.apply(model, "random@llm.0:10").remove()
