"""Which tokens stay: as many as was promised, the same as the method itself says, and the same when an image comes again."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from tokensieve.core import View
from tokensieve.embedded import llava_path
from tokensieve.errors import UserError
from tokensieve.methods import get_method, list_methods
from tokensieve.scoring import Attention
from tokensieve.serving.choosing import OBJECTS, REMEMBERED, ImageCutter, in_raster_order, size_of
from tokensieve.serving.served_plan import ServedPlan, read_served_plan

CONFIG = json.loads((llava_path() / "config.json").read_text())
SIDE, WIDTH = 14, 16
N = SIDE * SIDE


def plan_for(text: str) -> ServedPlan:
    plan = read_served_plan(CONFIG | {"tokensieve_plan": text})
    assert plan is not None
    return plan


def tokens_of(images: int, seed: int = 0) -> Tensor:
    return torch.randn(images, N, WIDTH, generator=torch.Generator().manual_seed(seed))


def attention_of(images: int, seed: int = 1) -> Attention:
    q, k, v = torch.randn(3, images, 2, N + 1, 8, generator=torch.Generator().manual_seed(seed))
    return Attention(q, k, 1, 8**-0.5, v=v)


def served_methods() -> list[str]:
    names = []
    for method in list_methods():
        try:
            plan_for(f"{method.name}@out:60")
        except UserError:
            continue
        names.append(method.name)
    return names


def choose(cutter: ImageCutter, tokens: Tensor, hashes: list[int], attention: Attention | None = None) -> Any:
    method = cutter.plan.step.method
    depth = cutter.plan.depth
    earlier = {number: attention_of(len(tokens), number) for number in (() if method.layers is None else method.layers(depth))}
    attention = attention or attention_of(len(tokens))
    return cutter.choose(
        tokens, hashes, prefix=tokens[:, :1] + 1, grid=(SIDE, SIDE), attention=attention, earlier=earlier | {depth: attention}
    )


@pytest.mark.parametrize("name", served_methods())
def test_the_number_of_tokens_is_known_before_the_image(name: str) -> None:
    """vLLM reserves places in the prompt before it encodes the image: the count may depend on nothing but n and the plan."""
    for budget in ("60", "25%", "-100"):
        cutter = ImageCutter(plan_for(f"{name}@out:{budget}"))
        made = choose(cutter, tokens_of(2), [1, 2])
        assert made.k == cutter.plan.kept(N) == made.apply(tokens_of(2)).shape[1]
        assert (made.index.diff(dim=1) >= 0).all()  # the order of their positions


@pytest.mark.parametrize("text", ["divprune@out:40", "cover@out:40", "anchor@out:40", "visionzip@out:40"])
def test_it_is_what_the_method_says(text: str) -> None:
    plan, tokens = plan_for(text), tokens_of(3)
    view = View(tokens, tokens[:, :1] + 1, (SIDE, SIDE), attention_of(3), place="out", layer=7, depth=7)
    made = get_method(plan.step.method.name).decide(view, 40)
    order = made.index.argsort(dim=1, stable=True)
    index = order[..., None].expand(-1, -1, WIDTH)
    made.norm = plan.step.options.get("norm", 0.0)
    torch.testing.assert_close(choose(ImageCutter(plan), tokens, [1, 2, 3]).apply(tokens), made.apply(tokens).gather(1, index))


@pytest.mark.parametrize("text", ["divprune@out:40", "cover@out:40", "visionzip@out:40", "random@out:40", "atc@out:40"])
def test_an_image_that_comes_again_keeps_its_tokens(text: str) -> None:
    """In another batch, with other rounding, and after others: the first decision holds."""
    cutter, tokens = ImageCutter(plan_for(text)), tokens_of(4)
    first = choose(cutter, tokens[:2], [10, 11])
    other = tokens + 0.3 * torch.randn(tokens.shape, generator=torch.Generator().manual_seed(5))
    again = choose(cutter, other[[2, 1, 3, 0]], [12, 11, 13, 10])
    assert torch.equal(again.index[1], first.index[1]) and torch.equal(again.index[3], first.index[0])
    same = other[[1, 0]]
    torch.testing.assert_close(again.apply(other[[2, 1, 3, 0]])[[1, 3]], first.select_images(torch.tensor([1, 0])).apply(same))
    assert torch.equal(choose(cutter, other[:1] * 0 + 1, [10]).index, first.index[:1])  # nothing is decided again


def test_images_are_forgotten_in_the_order_of_their_last_use() -> None:
    cutter = ImageCutter(plan_for("divprune@out:40"), remembered=2 * (OBJECTS + 40 * 2))
    before = choose(cutter, tokens_of(1, seed=1), [1]).index
    choose(cutter, tokens_of(1, seed=2), [2])
    choose(cutter, tokens_of(1, seed=3), [1])  # used again
    choose(cutter, tokens_of(1, seed=3), [3])  # 2 is forgotten
    assert torch.equal(choose(cutter, tokens_of(1, seed=4), [1]).index, before)
    assert len(cutter._known) == 2 and (2, N) not in cutter._known


def test_what_is_remembered_is_small_and_has_a_limit_in_bytes() -> None:
    cutter = ImageCutter(plan_for("visionzip@out:64"))
    choose(cutter, tokens_of(2), [1, 2])
    choose(cutter, tokens_of(2), [3, 3])  # an image twice in a batch is stored once
    stored = list(cutter._known.values())
    tensors = [value for each in stored for value in vars(each).values() if isinstance(value, Tensor)]
    assert len(stored) == 3 and all(each.is_floating_point() or each.dtype == torch.int16 for each in tensors)
    assert cutter._bytes == sum(map(size_of, stored)) and size_of(stored[0]) < OBJECTS + 6 * N + 2 * 64
    assert cutter.remembered == REMEMBERED == 128 << 20
    limited = ImageCutter(plan_for("atc@out:64"), remembered=100_000)  # mixtures take more
    for number in range(40):
        choose(limited, tokens_of(1, seed=number), [number])
    assert limited._bytes == sum(map(size_of, limited._known.values())) <= 100_000
    tiny = ImageCutter(plan_for("divprune@out:40"), remembered=1)
    assert choose(tiny, tokens_of(2), [1, 2]).k == 40 and not tiny._known and not tiny._bytes


UNUSABLE = {
    "one NaN": lambda x: x.index_fill(-2, torch.tensor([5]), torch.nan),
    "NaN": lambda x: x * torch.nan,
    "infinity": lambda x: x * torch.inf,
    "beyond half precision": lambda x: (x * 3e4).half(),
}


@pytest.mark.parametrize("change", UNUSABLE)
@pytest.mark.parametrize("name", served_methods())
def test_numbers_that_are_not_finite_do_not_end_the_server(name: str, change: str) -> None:
    """The image keeps as many tokens as was promised; another of its batch keeps those that it would keep alone."""
    cutter, tokens = ImageCutter(plan_for(f"{name}@out:60")), tokens_of(2)
    bad = UNUSABLE[change](tokens)
    if bad.dtype == torch.float32:
        bad[1] = tokens[1]
    clean = attention_of(2)
    q, k, v = (torch.cat([UNUSABLE[change](x[:1]).to(x), x[1:]]) for x in (clean.q, clean.k, clean.v))
    made = choose(cutter, bad, [1, 2], Attention(q, k, 1, 8**-0.5, v=v))
    assert made.k == cutter.plan.kept(N) == made.apply(bad).shape[1] and int(made.index.max()) < N
    if bad.dtype == torch.float32:
        alone = choose(ImageCutter(cutter.plan), tokens, [1, 2])
        assert torch.equal(made.index[1], alone.index[1])


def test_one_batch_decides_as_single_images_do() -> None:
    tokens = tokens_of(4)
    together = choose(ImageCutter(plan_for("cover@out:30")), tokens, [1, 2, 3, 4])
    for row in range(4):
        alone = choose(ImageCutter(plan_for("cover@out:30")), tokens[row : row + 1], [9])
        assert torch.equal(alone.index[0], together.index[row])


def test_random_depends_on_the_image_and_not_on_its_place() -> None:
    cutter = ImageCutter(plan_for("random@out:20"))
    made = choose(cutter, tokens_of(2), [5, 6]).index
    assert not torch.equal(made[0], made[1])
    assert torch.equal(choose(ImageCutter(cutter.plan), tokens_of(3, seed=2), [7, 6, 5]).index[[2, 1]], made)


def test_everything_is_kept_where_the_budget_allows_it() -> None:
    made = choose(ImageCutter(plan_for("divprune@out:500")), tokens_of(2), [1, 2])
    assert torch.equal(made.apply(tokens_of(2)), tokens_of(2))


def test_raster_order_keeps_the_groups() -> None:
    made = in_raster_order(choose_raw("visionzip@out:40"))
    raw = choose_raw("visionzip@out:40")
    order = raw.index.argsort(dim=1, stable=True)
    tokens = tokens_of(2)
    torch.testing.assert_close(made.apply(tokens), raw.apply(tokens).gather(1, order[..., None].expand(-1, -1, WIDTH)))
    assert torch.equal(made.index, raw.index.gather(1, order))


def choose_raw(text: str) -> Any:
    tokens = tokens_of(2)
    plan = plan_for(text)
    return plan.step.method.decide(View(tokens, tokens[:, :1], (SIDE, SIDE), attention_of(2), place="out"), 40)
