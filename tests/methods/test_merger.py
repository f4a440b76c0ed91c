"""The trained merger: the formula, means that keep their norms, gradients to every weight, the question, and its budget."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import tokensieve
from tests.support import vlm_models
from tests.support.rounding import assert_best, assert_near
from tokensieve import UserError
from tokensieve.core import Question
from tokensieve.methods.merger import Merger, merger, sparsity
from tokensieve.methods.registry import get_method
from tokensieve.testing import fresh_part, make_view

METHOD = get_method("merger")


def view_of(part, **given):
    return replace(make_view(**given), part=part, place="out")


@pytest.fixture(params=["simple", "question_aware"])
def part(request):
    torch.manual_seed(1)
    return Merger(width=32, kind=request.param, hidden=16, keep=7)


def slow(part, view, centres):
    """Means by loops over tokens and centres, from the scorer's own view of the tokens, in float64."""
    _, seen = part(view)
    seen, q, k = seen.double(), part.q.weight.double(), part.k.weight.double()
    t, d = float(part.temperature), part.q.out_features
    means, sizes = [], []
    for b, chosen in enumerate(centres.tolist()):
        share = torch.zeros(view.n, len(chosen), dtype=torch.float64)
        for i in range(view.n):
            logits = [float((q @ seen[b, i]) @ (k @ seen[b, c])) / math.sqrt(d) / t for c in chosen]
            share[i] = torch.tensor(logits, dtype=torch.float64).softmax(0)
            if i in chosen:
                share[i] = F.one_hot(torch.tensor(chosen.index(i)), len(chosen)).double()
        mass = share * view.sizes_or_ones()[b][:, None]
        means.append((mass.T @ view.tokens[b].double()) / mass.sum(0)[:, None])
        sizes.append(mass.sum(0))
    return torch.stack(means), torch.stack(sizes)


@pytest.mark.parametrize("merged", [False, True])
@torch.no_grad()
def test_means_of_the_tokens_around_the_best(part, merged):
    part.temperature.fill_(0.7)
    view = view_of(part.eval(), merged=merged)
    made = merger(view, 7)
    scores, _ = part(view)
    assert_best(made.index, scores)
    means, sizes = slow(part, view, made.index)
    assert_near(made.apply(view.tokens), means)
    assert_near(made.sizes, sizes)
    assert_near(made.sizes.sum(1), view.sizes_or_ones().sum(1))


def test_norms_do_not_grow():
    part = Merger(width=32, keep=3).eval()
    view = view_of(part)
    assert merger(view, 3).apply(view.tokens).norm(dim=-1).max() <= view.tokens.norm(dim=-1).max()
    same = replace(view, tokens=view.tokens[:, :1].expand(-1, 24, -1) + 1e-3 * view.tokens)
    torch.testing.assert_close(merger(same, 3).apply(same.tokens), same.tokens[:, :3], atol=0.02, rtol=0.02)


def test_before_any_training_it_joins_what_is_alike(part):
    """Tokens of six kinds: whoever is no centre goes to a centre of its own kind, where there is one."""
    torch.manual_seed(0)
    kinds = torch.randint(0, 6, (3, 24))
    tokens = torch.randn(6, 32)[kinds] + 0.1 * torch.randn(3, 24, 32)
    view = replace(view_of(part.eval()), tokens=tokens)
    made = merger(view, 10)
    went = kinds.gather(1, made.index.gather(1, made.groups))  # (3, 24), the kind of the centre each joined
    there = torch.stack([torch.isin(kinds[b], kinds[b, made.index[b]]) for b in range(3)])
    assert (went == kinds)[there].float().mean() > 0.95


def test_every_weight_learns_through_a_frozen_projector(part):
    view = view_of(part.train())
    projector = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    projector(merger(view, 7).apply(view.tokens)).square().mean().backward()
    for name, parameter in part.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().max() > 1e-9, name


def test_the_gate_changes_nothing_forward_and_asks_for_the_difference_backward(part):
    view = view_of(part.train())
    made = merger(view, 7)
    with torch.no_grad():
        plain = merger(view, 7)
    assert torch.equal(made.index, plain.index)
    torch.testing.assert_close(made.weight, plain.weight, rtol=0, atol=0)
    part.zero_grad()
    wish = torch.randn(3, 7, 32)
    scores, seen = part(view)
    scores.retain_grad()
    made = merger(replace(view, part=Fixed(part, scores, seen)), 7)
    (made.apply(view.tokens) * wish).sum().backward()
    _, nearest = part.assign(seen, made.index)
    merged = plain.apply(view.tokens)
    pull = (wish * (merged - merged.gather(1, nearest[..., None].expand_as(merged)))).sum(-1)  # (3, 7)
    share = scores.detach().softmax(-1)
    expected = torch.zeros(3, 24).scatter(1, made.index, pull) - share * pull.sum(-1, keepdim=True)
    assert_near(scores.grad, expected, steps=1000)


class Fixed:
    """A merger whose scores were computed before, so that their gradient can be looked at."""

    def __init__(self, part, scores, seen):
        self.part, self.scores, self.seen, self.training, self.temperature = part, scores, seen, True, part.temperature
        self.choice = part.choice

    def __call__(self, view):
        return self.scores, self.seen

    def assign(self, tokens, centres):
        share, nearest = self.part.assign(tokens.detach(), centres)
        return share.detach(), nearest


def test_the_scorer_finds_what_the_loss_needs():
    """Four tokens of each image carry a message that the reader wants whole; a merger that ignores them must blur it."""
    torch.manual_seed(0)
    part = Merger(width=32, hidden=32, keep=6).train()
    with torch.no_grad():
        part.novelty.zero_()  # begins without a preference
    mark, adam = torch.randn(32), torch.optim.Adam(part.parameters(), lr=1e-2)

    def draw(step):
        made = torch.Generator().manual_seed(step)
        tokens, carrier = torch.randn(16, 24, 32, generator=made), torch.rand(16, 24, generator=made).argsort(-1)[:, :4]
        message = 2 * mark * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]  # (4, 32), their mean says nothing
        tokens.scatter_add_(1, carrier[..., None].expand(-1, -1, 32), message.expand(16, 4, 32))
        return replace(make_view(), tokens=tokens, sizes=None, samples=16 * step + torch.arange(16), part=part), carrier

    def found(step):
        view, carrier = draw(step)
        chosen = merger(replace(view, part=part.eval()), 6).index
        part.train()
        return torch.stack([torch.isin(c, i).float().mean() for c, i in zip(carrier, chosen, strict=True)]).mean()

    before = found(1000)
    for step in range(120):
        view, carrier = draw(step)
        out = merger(view, 6).apply(view.tokens)  # (16, 6, 32)
        wanted = view.tokens.gather(1, carrier[..., None].expand(-1, -1, 32))
        loss = torch.cdist(wanted, out).amin(-1).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    assert found(1000) > max(0.8, before + 0.3)


def test_noise_in_training_only_and_less_of_it_as_it_cools(part):
    view = view_of(part.eval())
    best = merger(view, 7).index
    part.train()
    tried = merger(view, 7).index
    assert not torch.equal(tried, best) and torch.equal(tried, merger(view, 7).index)
    assert not torch.equal(tried, merger(replace(view, samples=view.samples + 100), 7).index)
    part.temperature.fill_(1e-4)
    assert torch.equal(merger(view, 7).index, best)


def test_sparsity_is_about_the_scores():
    done = torch.full((2, 10), -40.0)
    done[:, :3] = 40.0
    assert sparsity(done, 3) < 1e-6
    assert sparsity(done, 5) > 0.2
    assert float(sparsity(torch.zeros(2, 10), 5)) == pytest.approx(0.5, rel=1e-4)
    assert sparsity(3 * done.sign(), 3) < sparsity(done.sign(), 3)  # falls as they become decisive
    scores = torch.randn(2, 10, requires_grad=True)
    sparsity(scores, 3).backward()
    assert (scores.grad != 0).all()


def test_the_question_matters_and_padding_does_not():
    part = fresh_part(METHOD, 32)
    aware = Merger(width=32, question_width=20, kind="question_aware", hidden=16).eval()
    for parameter in aware.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    view = view_of(aware)
    question = Question(torch.randn(3, 5, 20), torch.tensor([[1, 1, 1, 0, 0]] * 3).bool())
    scores, _ = aware(replace(view, question=question))
    other, _ = aware(replace(view, question=Question(question.tokens.roll(1, 0), question.mask)))
    assert not torch.allclose(scores, other)
    padded = Question(question.tokens.clone(), question.mask)
    padded.tokens[:, 3:] = 7.0
    assert_near(aware(replace(view, question=padded))[0], scores)
    assert_near(part(replace(view, question=question))[0], part(replace(view, question=padded))[0])
    with pytest.raises(UserError, match="needs a question"):
        aware(replace(view, question=None))


def test_the_question_begins_near_no_effect():
    torch.manual_seed(0)
    part = Merger(width=32, kind="question_aware", hidden=16)
    view = view_of(part)
    told, _ = part(view)
    other, _ = part(replace(view, question=Question(view.question.tokens.roll(1, 0), view.question.mask)))
    assert 0 < (told - other).abs().max() < 0.1 * told.std()


@pytest.mark.parametrize("plan, left", [("merger@out", 9), ("merger@out:50%", 18), ("merger@out:5", 5)])
@torch.no_grad()
def test_it_keeps_what_it_was_trained_for_unless_told(plan, left):
    model, batch = vlm_models.llava(), vlm_models.prompts()
    part = Merger(width=24, question_width=32, kind="question_aware", keep=9).eval()
    with tokensieve.apply(model, plan, weights={"merger": part}) as handle:
        assert model(**batch).logits.isfinite().all()
    assert [(row.layer, row.tokens_in, row.tokens_out) for row in handle.ledger] == [("out", 36, left)]
    with pytest.raises(UserError, match=r"@out"):
        tokensieve.apply(model, "merger@llm.2:5", weights={"merger": Merger(width=32).eval()})


@pytest.mark.parametrize("plan", ["merger@out:9", "pool@llm.0:9", "merger@out:18 + pool@llm.0:9"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_the_decoder_hears_a_merged_token_as_often_as_it_stands_for_patches(plan, implementation):
    """Against the decoder's layers run one by one on the tokens that are left, with log(size) on their keys."""
    model, batch = vlm_models.in_float64(vlm_models.llava(implementation=implementation), vlm_models.prompts((1,), (5,)))
    weights = {"merger": Merger(width=24, question_width=32, keep=9).eval()} if "merger" in plan else None
    with tokensieve.apply(model, plan, weights=weights) as handle:
        fast = model(**batch).logits[0, -1]
        again = model.generate(
            **batch, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True
        ).logits
    whole = handle.reduction
    inner, ids = model.model, batch["input_ids"][0]
    tower = inner.vision_tower(batch["pixel_values"], output_hidden_states=True).hidden_states[-2][:, 1:]
    if plan.startswith("pool"):  # in the decoder it is the projected tokens that are mixed
        made = whole.apply(inner.multi_modal_projector(tower))[0]
    elif "pool" in plan:
        first, second = (stage for _, stage in handle.stages)
        made = second.apply(inner.multi_modal_projector(first.apply(tower)))[0]
    else:
        made = inner.multi_modal_projector(whole.apply(tower))[0]
    vision = (ids == vlm_models.IMAGE).nonzero()[:, 0]
    where = torch.cat([(ids != vlm_models.IMAGE).nonzero()[:, 0], vision[whole.index[0]]]).sort().values
    states, bias = inner.get_input_embeddings()(ids[where]), torch.zeros(len(where), dtype=torch.float64)
    for place, state, size in zip(vision[whole.index[0]], made, handle.stages[-1][1].sizes[0], strict=True):
        states[where == place], bias[where == place] = state, size.log()
    for layer in inner.language_model.layers:
        tables = inner.language_model.rotary_emb(states[None], where[None])
        mask = torch.full((len(where), len(where)), -torch.inf, dtype=torch.float64).triu(1) + bias
        states = layer(states[None], attention_mask=mask[None, None], position_embeddings=tables)[0]
    slow = model.lm_head(inner.language_model.norm(states))[-1]
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(again[0][0], fast, atol=1e-5, rtol=1e-5, check_dtype=False)
    assert float(bias.exp().sum()) == pytest.approx(len(ids), rel=1e-4)  # all patches and all words


def test_settings_build_it_again():
    part = Merger(width=24, question_width=32, kind="question_aware", hidden=40, keep=9, temperature=0.3)
    again = Merger(**part.settings)
    again.load_state_dict(part.state_dict())
    assert again.settings == part.settings and part.settings["keep"] == 9
    with pytest.raises(UserError, match="simple, question_aware"):
        Merger(width=24, kind="clever")
    with pytest.raises(UserError, match=r"hidden=30 \(of width 32\) cannot be divided among 4 heads"):
        Merger(width=32, kind="question_aware", hidden=30)
