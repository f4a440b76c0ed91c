"""Choice by score and coverage: the greedy choice by loops, farthest points among equals, and parts that start there."""

from dataclasses import replace

import pytest
import torch

from tests.support.rounding import assert_near
from tokensieve import UserError
from tokensieve.methods.cross import Heads, cross
from tokensieve.methods.farthest_points import farthest_points
from tokensieve.methods.merger import Merger, merger
from tokensieve.methods.spread import CLIP, StandardisedScores, coverage
from tokensieve.scoring import top
from tokensieve.testing import make_view


def drawn(seed=0, spread=1.0):
    made = torch.Generator().manual_seed(seed)
    return spread * torch.randn(3, 24, generator=made), torch.randn(3, 24, 32, generator=made)


def slow_choice(scores, tokens, keep):
    """One image, in float64: the tokens in the order in which they are chosen."""
    x = tokens.double()
    norm = x.norm(dim=-1)
    x = x * (CLIP * norm.median() / norm).clamp_max(1.0)[:, None]
    x = x - x.mean(0)
    unit, chosen = x.square().sum(-1).mean(), []
    for _ in range(keep):
        sums = []
        for i in range(len(x)):
            others = x[chosen] if chosen else torch.zeros(1, x.shape[1], dtype=torch.float64)
            distance = (x[i] - others).square().sum(-1).min() / unit
            sums.append(-torch.inf if i in chosen else float(scores[i].double() + distance.log()))
        chosen.append(max(range(len(x)), key=sums.__getitem__))
    return sorted(chosen)


@pytest.mark.parametrize("keep", [1, 2, 7, 24])
def test_the_largest_sums_are_the_greedy_choice(keep):
    scores, tokens = drawn(spread=0.5)
    chosen = top(scores + coverage(scores, tokens, keep), keep)
    assert chosen.tolist() == [slow_choice(scores[b], tokens[b], keep) for b in range(3)]


def test_equal_scores_give_farthest_points_and_large_ones_decide():
    _, tokens = drawn()
    equal, (index, _) = torch.zeros(3, 24), farthest_points(tokens, 8, CLIP)
    assert torch.equal(top(coverage(equal, tokens, 8), 8), index)
    strong = 1000 * drawn()[0]
    assert torch.equal(top(strong + coverage(strong, tokens, 8), 8), top(strong, 8))


def test_of_two_equal_tokens_one_is_taken():
    scores, tokens = drawn(spread=0.1)
    tokens[:, 5] = tokens[:, 4]
    scores[:, 4:6] = 2.0
    chosen = top(scores + coverage(scores, tokens, 8), 8)
    assert ((chosen == 4).sum(1) + (chosen == 5).sum(1)).tolist() == [1, 1, 1]
    assert torch.isin(torch.tensor([4, 5]), top(scores, 8)).all()


def test_tokens_that_are_gone_do_not_matter():
    scores, tokens = drawn()
    left = torch.arange(3, 24, 2)
    present = torch.zeros(3, 24).index_fill(1, left, 1.0)
    added = coverage(scores, tokens, 4, present)[:, left]
    alone = coverage(scores[:, left], tokens[:, left], 4)
    assert_near(added, alone, steps=100)
    standard = StandardisedScores()
    assert_near(standard(scores, present)[:, left], standard(scores[:, left]), steps=100)


def test_parts_start_near_farthest_points_and_learn_their_scale():
    torch.manual_seed(0)
    view = make_view()
    index, _ = farthest_points(view.tokens, 8, CLIP)
    heads = Heads(width=32, layers=(1,), d_internal=16, keep=(8,), choice="spread").eval()
    centres = Merger(width=32, hidden=16, keep=8, choice="spread").eval()
    for part, method, place in ((heads, cross, "llm.1"), (centres, merger, "out")):
        (scale,) = [value for name, value in part.named_parameters() if name.endswith("standardised.scale")]
        assert 0 < scale < 0.2
        scale.data.zero_()
        assert torch.equal(method(replace(view, part=part, place=place), 8).index, index)
        scale.data.fill_(0.7)
        assert type(part)(**part.settings).settings == part.settings
        with pytest.raises(UserError, match=r"choice='best' is not one of top, spread"):
            type(part)(**part.settings | {"choice": "best"})
    logits = heads(replace(view, part=heads, place="llm.1")).detach()
    assert float(logits.mean(-1).abs().max()) < 1e-6
    assert_near(logits.std(-1, correction=0), torch.full((3,), 0.7), steps=100)
