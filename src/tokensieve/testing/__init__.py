"""Conformance checks that every method has to pass, ours and yours: check_method("anchor") or check_method(my_function)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from tokensieve.core import Question, Reduction, View
from tokensieve.errors import UserError
from tokensieve.methods.registry import Method, describe, get_method
from tokensieve.plan import Budget, make_step
from tokensieve.rest import apply_rest
from tokensieve.scoring import Attention


def make_view(
    batch: int = 3,
    grid: tuple[int, int] = (6, 4),
    width: int = 32,
    heads: int = 4,
    dtype: torch.dtype = torch.float32,
    merged: bool = False,
    seed: int = 0,
) -> View:
    """A View of made-up tokens with a CLS token and attention; merged: some tokens already stand for several patches."""
    generator = torch.Generator().manual_seed(seed)
    n = grid[0] * grid[1]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    sizes = torch.randint(1, 5, (batch, n), generator=generator).float() if merged else None
    bias = None if sizes is None else torch.nn.functional.pad(sizes.log(), (1, 0))[:, None, None]
    shape = (batch, heads, n + 1, width // heads)
    return View(
        tokens=draw(batch, n, width),
        prefix=draw(batch, 1, width),
        grid=None if merged else grid,
        attention=Attention(draw(*shape), draw(*shape), prefix=1, scale=(width // heads) ** -0.5, bias=bias),
        sizes=sizes,
        samples=torch.arange(batch) + 7,
        seed=seed,
        question=Question(draw(batch, 5, width), torch.arange(5) < 3 + torch.arange(batch)[:, None] % 3),
    )


def check_method(method: str | Method | Callable[..., Reduction]) -> None:
    """Runs every check; an AssertionError names the rule that the method breaks."""
    if isinstance(method, str):
        method = get_method(method)
    elif not isinstance(method, Method):
        method = describe(method)
    if method.on_image:
        raise UserError(f"{method.name} acts on the image; check_method is for methods that act on tokens")
    for view in (make_view(), make_view(grid=(5, 7), seed=1), make_view(merged=True, seed=2)):
        for keep in _budgets(method, view):
            for rest in ("drop", "merge", "fuse") if method.selects else ("drop",):
                _check_one(method, view, keep, rest)
    _check_bf16(method)


def decide(method: Method, view: View, keep: int, rest: str = "drop") -> Reduction:
    """What the plumbing makes of the method's answer at this view; a part that is missing is a fresh one, in evaluation."""
    if method.part is not None and view.part is None:
        view = replace(view, part=fresh_part(method, view.tokens.shape[2], view.n))
    known = view.part.places() if hasattr(view.part, "places") else None
    if not view.place and known:
        view = replace(view, place=known[0])
    step = make_step(method, None, Budget.parse(str(keep)), {"rest": rest} if method.selects and rest != "drop" else {})
    return apply_rest(view, method.decide(view, keep, **step.arguments()), rest)


def fresh_part(method: Method, width: int, patches: int | None = None, seed: int = 0) -> nn.Module:
    """The method's trained module before any training, the same one each time, with no weight left at 0.

    patches: how many tokens it will see, for modules that are made for a number of them.
    """
    made_for = {"patches": patches} if patches and "patches" in inspect.signature(method.part).parameters else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        part: nn.Module = method.part(width=width, **made_for)
        for parameter in part.parameters():
            nn.init.normal_(parameter, std=0.1)
    return part.eval()


def _budgets(method: Method, view: View) -> tuple[int, ...]:
    """How many tokens to ask for: any number that the method can keep, or the one that its module leaves."""
    part = None if method.part is None else fresh_part(method, view.tokens.shape[2], view.n)
    fixed = part.budget("") if method.mixes and part is not None else None  # type: ignore[operator]
    if fixed is not None:
        return (fixed,)
    least = 1 if method.min_keep is None else method.min_keep(view.n)
    return tuple(max(keep, least) for keep in (1, 2, view.n // 3, view.n - 1))


def one_image(view: View, b: int) -> View:
    """The same view of one image of the batch."""
    part = slice(b, b + 1)
    attention = view.attention
    if attention is not None:
        bias = None if attention.bias is None else attention.bias[part]
        attention = Attention(attention.q[part], attention.k[part], attention.prefix, attention.scale, bias)
    return replace(
        view,
        tokens=view.tokens[part],
        prefix=view.prefix[part],
        attention=attention,
        sizes=None if view.sizes is None else view.sizes[part],
        samples=None if view.samples is None else view.samples[part],
        question=None if view.question is None else view.question.rows(torch.tensor([b])),
    )


def _check_one(method: Method, view: View, keep: int, rest: str) -> None:
    what = f"{method.name}(rest={rest}) at {keep} of {view.n}"
    before = view.tokens.clone()
    result = decide(method, view, keep, rest)
    batch, n = view.tokens.shape[:2]
    assert torch.equal(before, view.tokens), f"{what}: changed the tokens it was shown"
    expected = n if method.name == "none" else keep + (rest == "fuse")
    assert result.index.shape == (batch, expected), f"{what}: {tuple(result.index.shape)} instead of {(batch, expected)}"
    assert result.apply(view.tokens).shape == (batch, expected, view.tokens.shape[2]), f"{what}: wrong shape of the output"
    chosen = result.index[:, :keep]
    assert ((chosen >= 0) & (chosen < n)).all(), f"{what}: indices outside the tokens"
    assert method.mixes or all(len(row.unique()) == len(row) for row in chosen), f"{what}: a token is chosen twice"
    if method.selects:
        assert (chosen.diff(dim=1) > 0).all(), f"{what}: indices are not in raster order"
    _check_sizes(method, result, view, what)
    again = decide(method, view, keep, rest)
    assert torch.equal(result.index, again.index), f"{what}: another choice in a second run"
    for b in range(batch):
        alone = decide(method, one_image(view, b), keep, rest)
        assert torch.equal(alone.index[0], result.index[b]), f"{what}: an image's choice depends on its batch"
        torch.testing.assert_close(alone.as_weight()[0], result.as_weight()[b], msg=f"{what}: weights depend on the batch")
    groups = result.groups
    assert method.mixes or torch.equal(groups.gather(1, chosen), torch.arange(chosen.shape[1]).expand_as(chosen)), (
        f"{what}: a token that stands for an output does not belong to it"
    )


def _check_sizes(method: Method, result: Reduction, view: View, what: str) -> None:
    weight, sizes = result.as_weight(), result.sizes_after(view.sizes)
    assert torch.isfinite(weight).all(), f"{what}: weights are not finite"
    torch.testing.assert_close(weight.sum(-1), torch.ones(weight.shape[:2]), msg=f"{what}: weights of a token do not add to 1")
    if result.is_selection or method.mixes:
        return
    assert sizes is not None and (sizes > 0).all(), f"{what}: a merge without sizes"
    covered = (view.sizes_or_ones() * (result.groups >= 0)).sum(-1)
    torch.testing.assert_close(sizes.sum(-1), covered, msg=f"{what}: sizes are not conserved")


def _check_bf16(method: Method) -> None:
    view = make_view(dtype=torch.bfloat16, seed=3)
    for rest in ("drop", "merge", "fuse") if method.selects else ("drop",):
        result = decide(method, view, _budgets(method, view)[-1] if method.mixes else 5, rest)
        out = result.apply(view.tokens)
        assert out.dtype == torch.bfloat16 and torch.isfinite(out).all(), f"{method.name}(rest={rest}): not safe in bf16"
