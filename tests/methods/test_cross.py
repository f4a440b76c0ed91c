"""The pruner heads: the formula, soft masks that become hard, gradients through a frozen decoder, no look at the answer."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import tokensieve
from tests.support import vlm_models
from tests.support.reference import in_float64
from tests.support.rounding import assert_best, assert_near
from tokensieve import UserError
from tokensieve.core import Question
from tokensieve.cutting.handle import Handle
from tokensieve.methods.cross import Heads, cross
from tokensieve.plan import Plan
from tokensieve.testing import make_view

LAYERS, KEEP = (1, 3, 5), (20, 12, 6)
PLAN = "cross@llm.1,3,5"


@pytest.fixture(scope="module")
def model():
    return vlm_models.llava().double().requires_grad_(False)


@pytest.fixture
def heads():
    torch.manual_seed(2)
    part = Heads(width=32, layers=LAYERS, d_internal=16, heads=4, keep=KEEP, arriving=36)
    with torch.no_grad():  # as initialised, the logits of one layer are nearly equal
        for head in part.layer.values():
            head.out.weight.mul_(30)
    return part


BATCH = vlm_models.prompts(words=(5, 9))
BATCH["pixel_values"] = BATCH["pixel_values"].double()


def slow_logit(head, token, size, words):
    """One token's logit by loops over heads and words, for a head in float64."""
    v = head.vision(head.vision_norm(token)) + head.size.weight[:, 0] * size.log()
    said = [head.nothing[0, 0], *(head.question(head.question_norm(word)) for word in words)]
    d = len(v) // head.heads
    heard, odds = [], []
    for h in range(head.heads):
        part = slice(h * d, (h + 1) * d)
        share = torch.stack([head.q(v)[part] @ head.k(word)[part] / math.sqrt(d) for word in said]).softmax(0)
        heard.append(sum(w * head.v(word)[part] for w, word in zip(share, said, strict=True)))
        odds.append(((1 - share[0]) / len(words) / share[0]).log())
    h = head.norm(v + head.o(torch.cat(heard)))
    return head.out(F.gelu(head.hidden(h)))[0] + head.gain * sum(odds) / head.heads


@torch.no_grad()
def test_the_logits_are_those_of_the_formula(heads):
    view = replace(make_view(merged=True), part=heads, place="llm.3")
    logits, exact = heads(view), in_float64(heads.layer["3"])
    for b in range(3):
        words = view.question.tokens[b][view.question.mask[b]].double()
        wanted = [slow_logit(exact, view.tokens[b, i].double(), view.sizes[b, i].double(), words) for i in (0, 5, 23)]
        assert_near(logits[b, [0, 5, 23]], torch.stack(wanted))
    padded = Question(view.question.tokens.masked_fill(~view.question.mask[..., None], 9.0), view.question.mask)
    assert_near(heads(replace(view, question=padded)), logits)
    assert heads(replace(view, question=Question(padded.tokens, torch.zeros_like(padded.mask)))).isfinite().all()


def tau_of(probabilities, ranked, temperature):
    """The threshold that each probability was made with, in float64."""
    return ranked.double() - temperature * probabilities.double().logit()


def test_probabilities_in_training_a_choice_in_use(heads):
    view = replace(make_view(), part=heads.eval(), place="llm.1")
    logits = heads(view)
    hard = cross(view, 7)
    assert hard.soft is None
    assert_best(hard.index, logits)
    heads.soft = True
    heads.temperature.fill_(0.5)
    soft = cross(view, 7)
    assert_near(soft.soft.sum(-1), torch.full((3,), 7.0))
    tau = tau_of(soft.soft, logits, 0.5)
    assert float((tau.amax(-1) - tau.amin(-1)).detach().max()) < 1e-4  # one for each image
    assert torch.equal(soft.index, hard.index)
    heads.train()
    noisy = cross(view, 7)
    u = view.noise()
    tau = tau_of(noisy.soft, logits + u.log() - (1 - u).log(), 0.5)
    assert float((tau.amax(-1) - tau.amin(-1)).detach().max()) < 1e-3
    assert_near(noisy.soft.sum(-1), torch.full((3,), 7.0))
    assert torch.equal(noisy.soft, cross(view, 7).soft)
    assert not torch.equal(noisy.soft, cross(replace(view, samples=view.samples + 9), 7).soft)


def test_a_later_cut_counts_by_what_is_still_there(heads):
    view = replace(make_view(), part=heads.eval(), place="llm.1")
    heads.soft = True
    present = cross(view, 9).soft.detach()
    later = cross(replace(view, place="llm.3", present=present), 4)
    assert_near((present * later.soft).sum(-1), torch.full((3,), 4.0))


@pytest.mark.parametrize("choice", ["top", "spread"])
@pytest.mark.parametrize("rest", ["drop", "merge", "merge,norm=2", "merge,sizes=no"])
@torch.no_grad()
def test_as_the_temperature_goes_to_0_the_soft_path_becomes_the_hard_one(model, rest, choice):
    """Heads as they are initialised, behind a merge, so that tokens have sizes: the same logits, and the same answers."""
    torch.manual_seed(5)
    part = Heads(width=32, layers=LAYERS, d_internal=16, keep=KEEP, arriving=30, choice=choice).eval()
    text = BATCH["attention_mask"].bool() & (BATCH["input_ids"] != vlm_models.IMAGE)
    with tokensieve.apply(model, f"pool@out:30 + {PLAN}(rest={rest})", weights={"cross": part}) as handle:
        hard = model(**BATCH).logits[text]
        answer = model.generate(**BATCH, max_new_tokens=6, do_sample=False)
        assert [row.tokens_out for row in handle.ledger] == [30, *KEEP]
        part.soft, errors = True, []
        for temperature in (1.0, 1e-3, 1e-7):
            part.temperature.fill_(temperature)
            errors.append(float((model(**BATCH).logits[text] - hard).abs().max()))
            assert_near(
                torch.stack([one.soft for _, one in handle.soft]).cumprod(0).sum(-1).mean(-1), torch.tensor(KEEP).double()
            )
        assert torch.equal(model.generate(**BATCH, max_new_tokens=6, do_sample=False), answer)
        assert [row.tokens_out for row in handle.ledger] == [30, 30, 30, 30]
    assert errors[0] > 0.02 and errors[2] < 2e-4, errors


@torch.no_grad()
def test_shares_of_the_tokens_count_from_what_a_hard_cut_would_leave(model, heads):
    heads.eval()
    heads.soft = True
    with tokensieve.apply(model, "cross@llm.1,3:50%", weights={"cross": heads}) as handle:
        model(**BATCH)
    counts = torch.stack([one.soft for _, one in handle.soft]).cumprod(0).sum(-1)
    assert_near(counts, torch.tensor([[18.0, 18.0], [9.0, 9.0]]))
    with (
        pytest.raises(UserError, match="rest=fuse has no soft form"),
        tokensieve.apply(model, f"{PLAN}(rest=fuse)", weights={"cross": heads}),
    ):
        model(**BATCH)


def trained(part):
    return [(name, parameter) for name, parameter in part.named_parameters() if parameter.requires_grad]


def test_every_weight_of_every_head_learns_through_the_frozen_decoder(model, heads):
    handle = Handle(model, Plan.parse(f"pool@out:30 + {PLAN}"), parts={"cross": heads.train()})  # some tokens stand for two
    with handle:
        model(**BATCH).logits[:, -1].square().mean().backward()
    for name, parameter in trained(heads):
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [name for name, _ in handle.soft] == ["llm.1", "llm.3", "llm.5"]


@pytest.mark.parametrize("rest", ["drop", "merge"])
def test_steps_on_the_hard_path_drop_and_learn(model, heads, rest):
    """Without noise they are the hard path; with noise another choice; every weight of every head learns either way."""
    text = BATCH["attention_mask"].bool() & (BATCH["input_ids"] != vlm_models.IMAGE)
    plan = f"pool@out:30 + {PLAN}(rest={rest})"
    with torch.no_grad(), tokensieve.apply(model, plan, weights={"cross": heads.eval()}) as handle:
        hard = model(**BATCH).logits[text]
        assert [row.tokens_out for row in handle.ledger] == [30, *KEEP]
    heads.train()
    heads.straight = True
    heads.temperature.fill_(1e-6)
    with tokensieve.apply(model, plan, weights={"cross": heads}) as handle:
        straight = model(**BATCH).logits[text]
        assert [row.tokens_out for row in handle.ledger] == [30, *KEEP]
    torch.testing.assert_close(straight, hard, atol=1e-4, rtol=1e-4)
    straight.square().mean().backward()
    for name, parameter in trained(heads):
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    heads.temperature.fill_(1.0)
    with torch.no_grad(), tokensieve.apply(model, plan, weights={"cross": heads}):
        assert not torch.allclose(model(**BATCH).logits[text], hard, atol=1e-2)


@torch.no_grad()
def test_the_answer_is_not_looked_at(model, heads):
    ids = BATCH["input_ids"].clone()
    question = BATCH["attention_mask"].bool() & (ids != vlm_models.IMAGE)
    question[:, -3:] = False  # the last three tokens are the answer
    other = ids.clone()
    other[:, -3:] = (other[:, -3:] + 5) % 60 + 1
    seen = []
    for told in (ids, other):
        handle = Handle(model, Plan.parse(PLAN), context={"question": question}, parts={"cross": heads.train()})
        with handle, handle.call(samples=torch.arange(2)):
            model(**BATCH | {"input_ids": told})
        seen.append(torch.stack([made.soft for _, made in handle.soft]))
    assert_near(seen[0], seen[1])


def test_places_and_budgets(model, heads):
    with tokensieve.apply(model, "cross@llm.1,3:50%", weights={"cross": heads.eval()}) as handle, torch.no_grad():
        model(**BATCH)
    assert [(row.layer, row.tokens_out) for row in handle.ledger] == [("llm.1", 18), ("llm.3", 9)]
    with pytest.raises(UserError, match=r"llm\.2.*@llm\.1, @llm\.3, @llm\.5"):
        tokensieve.apply(model, "cross@llm.2:10", weights={"cross": heads})
    again = Heads(**heads.settings)
    again.load_state_dict(heads.state_dict())
    assert again.settings == heads.settings
    with pytest.raises(UserError, match="cannot be divided"):
        Heads(width=32, d_internal=10, heads=4)
    with pytest.raises(UserError, match="one count for each layer"):
        Heads(width=32, layers=(1, 2), keep=(3,))
