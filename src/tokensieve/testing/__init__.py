"""Conformance checks that every method has to pass, ours and yours: check_method("anchor") or check_method(my_function)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core import Inputs, Question, Reduction, Rotary, View, frame_numbers
from tokensieve.errors import UserError
from tokensieve.methods.registry import Method, describe, get_method
from tokensieve.plan import Budget, make_step
from tokensieve.rest import apply_rest
from tokensieve.scoring import Attention, TextRows


def make_view(
    batch: int = 3,
    grid: tuple[int, ...] | None = (6, 4),
    width: int = 32,
    heads: int = 4,
    dtype: torch.dtype = torch.float32,
    merged: bool = False,
    seed: int = 0,
    *,
    tokens: Tensor | None = None,
    prefix: Tensor | None = None,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    scale: float | None = None,
    sizes: Tensor | None = None,
    earlier: Mapping[int, tuple[Tensor, Tensor]] | None = None,
    text: Tensor | None = None,
    image_embeds: Tensor | None = None,
    span: tuple[int, int] | None = None,
    **more: Any,
) -> View:
    """A View of given arrays, or of made-up tokens.

    Without `tokens`, everything is made up: a CLS token, attention, a question; `merged`: some tokens already stand for
    several patches. With them, the view holds what is given and nothing else, so that a method can be compared with other
    code number by number: `get_method(name).decide(make_view(tokens=x, q=q, k=k), keep)`.

    Args:
        grid: (h, w), or (frames, h, w) of a video; None: unknown.
        tokens: (B, N, D), without prefix tokens.
        prefix: (B, P, D), CLS first; default: none, or of width 0 where q has more tokens than `tokens`.
        q: (B, H, P+N, d), queries of the block before the cut; may be left out for methods that use keys alone. With `span`,
            q, k and v are those of a whole causal sequence of a language model, (B, H, L, d).
        k: its keys.
        v: its values.
        scale: of the logits; default: 1/sqrt(d).
        sizes: (B, N), the number of patches that each token stands for.
        earlier: by number of a block, from 1: its (q, k).
        text: (B, M, E), or (B, E), embeddings of the text by the model's text tower.
        image_embeds: (B, N, E), the tokens in the space of `text`.
        span: the first vision token of the sequence and the first one behind them.
        more: further fields of `View`, such as layer=4, depth=12.
    """
    if tokens is None:
        return _made_up(batch, grid or (6, 4), width, heads, dtype, merged, seed, more)
    keys, n = k, tokens.shape[1]
    p = 0 if keys is None or span is not None else keys.shape[2] - n
    if prefix is None:
        prefix = tokens.new_zeros((len(tokens), p, tokens.shape[2]))
    sized = None if sizes is None else F.pad(sizes.float().log(), (p, 0))[:, None, None]

    def attention(q: Tensor | None, k: Tensor, v: Tensor | None = None) -> Attention:
        factor = k.shape[-1] ** -0.5 if scale is None else scale
        if span is not None:
            assert q is not None
            return causal_attention(q, k, span, factor)
        return Attention(torch.zeros_like(k) if q is None else q, k, p, factor, sized, has_cls=p > 0, v=v)

    return View(
        tokens=tokens,
        prefix=prefix,
        grid=grid if grid is not None and math.prod(grid) == n else None,
        attention=None if keys is None else attention(q, keys, v),
        sizes=sizes,
        frames=None if grid is None or math.prod(grid) != n else frame_numbers(grid, len(tokens), tokens.device),
        earlier={layer: attention(*pair) for layer, pair in (earlier or {}).items()},
        text=text[:, None] if text is not None and text.dim() == 2 else text,
        image_embeds=image_embeds,
        has_cls=p > 0,
        seed=seed,
        **more,
    )


def causal_attention(q: Tensor, k: Tensor, span: tuple[int, int], scale: float) -> Attention:
    """The attention of a decoder layer with queries and keys (B, H, L, d), as a method sees it: the row of the last token,
    the vision tokens of the span, and the text around them."""
    length, (start, stop) = q.shape[2], span
    order = torch.arange(length, device=q.device)
    logits = (q.float() * scale) @ k.float().transpose(-1, -2)
    lse = logits.masked_fill(order > order[:, None], -torch.inf).logsumexp(-1)  # (B, H, L)
    row = (logits[:, :, -1, start:stop] - lse[:, :, -1:]).exp().mean(1)
    rows = torch.cat([order[-1:], order[start:stop]])
    words = torch.cat([order[:start], order[stop:]])
    mask = torch.ones((len(q), len(words)), dtype=torch.bool, device=q.device)
    text = TextRows(q[:, :, words], k[:, :, words], lse[:, :, words], mask, (words >= stop).expand_as(mask))
    return Attention(q[:, :, rows], k[:, :, rows], 1, scale, row=row, first_lse=lse[:, :, -1:], text=text)


def _made_up(
    batch: int,
    grid: tuple[int, ...],
    width: int,
    heads: int,
    dtype: torch.dtype,
    merged: bool,
    seed: int,
    more: Mapping[str, Any],
) -> View:
    generator = torch.Generator().manual_seed(seed)
    n = math.prod(grid)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    sizes = torch.randint(1, 5, (batch, n), generator=generator).float() if merged else None
    bias = None if sizes is None else F.pad(sizes.log(), (1, 0))[:, None, None]
    shape, words = (batch, heads, n + 1, width // heads), (batch, heads, 5, width // heads)
    scale = (width // heads) ** -0.5
    mask = torch.arange(5) < 3 + torch.arange(batch)[:, None] % 3
    tokens, prefix, q, k = draw(batch, n, width), draw(batch, 1, width), draw(*shape), draw(*shape)
    question = Question(draw(batch, 5, width), mask)
    text = TextRows(draw(*words), draw(*words), torch.full(words[:3], 4.0), mask, torch.ones_like(mask))
    made = View(
        tokens=tokens,
        prefix=prefix,
        grid=None if merged else grid,
        attention=Attention(q, k, prefix=1, scale=scale, bias=bias, v=draw(*shape), text=text),
        sizes=sizes,
        frames=frame_numbers(grid, batch, tokens.device),
        samples=torch.arange(batch) + 7,
        seed=seed,
        question=question,
        layer=4,
        depth=12,
        earlier={number: Attention(draw(*shape), draw(*shape), 1, scale) for number in range(1, 12)},
        before=draw(batch, n, width),
        pixels=draw(batch, n, 3)[:, torch.arange(n) // 2],
        text=draw(batch, 2, 16),
        image_embeds=draw(batch, n, 16),
        inputs=Inputs(draw(batch, n, width), Question(draw(batch, 5, width), mask)),
        rotary=Rotary(rotary_tables(batch, 0, n, width // heads), rotary_tables(batch, n, n + 5, width // heads)),
        final_norm=lambda x: F.rms_norm(x, x.shape[-1:]),
    )
    return replace(made, **more)


def rotary_tables(batch: int, start: int, stop: int, width: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """The rotary tables (cos, sin) of positions from start to stop, (B, L, d) each, with pairs half a head apart."""
    speeds = base ** (-torch.arange(0, width, 2) / width)  # (d / 2,)
    angles = torch.arange(start, stop)[:, None] * speeds.repeat(2)  # (L, d)
    return angles.cos().expand(batch, -1, -1), angles.sin().expand(batch, -1, -1)


def check_method(method: str | Method | Callable[..., Reduction]) -> None:
    """Runs every check, and prints that the method passed; an AssertionError names the rule that it breaks."""
    if isinstance(method, str):
        method = get_method(method)
    elif not isinstance(method, Method):
        method = describe(method)
    if method.on_image:
        raise UserError(f"{method.name} acts on the image; check_method is for methods that act on tokens")
    views = (
        make_view(),
        make_view(grid=(5, 7), seed=1),
        make_view(merged=True, seed=2),
        make_view(batch=2, grid=(4, 2, 3), seed=4),
    )
    tried = [(view, keep, rest) for view in views for keep in _budgets(method, view) for rest in _rests(method)]
    for view, keep, rest in tried:
        _check_one(method, view, keep, rest)
    _check_bf16(method)
    rests = ", ".join(_rests(method))
    print(f"{method.name}: passed, {len(tried)} cases (views x budgets x rest={rests}) and bfloat16")


def _rests(method: Method) -> tuple[str, ...]:
    """The values of the option `rest` that are checked."""
    if not method.selects:
        return ("drop",)
    return ("drop", "merge") if method.adaptive else ("drop", "merge", "fuse")


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
    least = max(least, view.n // view.video_grid()[0]) if view.frames is not None else least  # of a video a whole frame
    return tuple(max(keep, least) for keep in (1, 2, view.n // 3, view.n - 1))


def one_image(view: View, b: int) -> View:
    """The same view of one image of the batch."""
    rows: View = _rows_of(view, torch.tensor([b]))
    return rows


def _rows_of(value: Any, index: Tensor) -> Any:
    """A view, or what it holds, with these images of the batch."""
    if isinstance(value, Tensor):
        return value[index]
    if isinstance(value, Mapping):
        return {name: _rows_of(each, index) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_rows_of(each, index) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: _rows_of(getattr(value, each.name), index) for each in fields(value)})
    return value


def _check_one(method: Method, view: View, keep: int, rest: str) -> None:
    what = f"{method.name}(rest={rest}) at {keep} of {view.n}"
    before = view.tokens.clone()
    result = decide(method, view, keep, rest)
    batch, n = view.tokens.shape[:2]
    assert torch.equal(before, view.tokens), f"{what}: changed the tokens it was shown"
    expected = n if method.name == "none" else keep + method.n_extra(n, keep) + (rest == "fuse")
    if method.adaptive:
        assert result.counts is not None, f"{what}: an adaptive method says how many tokens each image is left with"
        assert result.k <= expected or method.count is not None, f"{what}: {result.k} tokens, at most {expected} are allowed"
        assert ((result.counts >= 1) & (result.counts <= result.k)).all(), f"{what}: counts outside 1 to {result.k}"
        assert (result.sizes_after(view.sizes) == 0).equal(~result.is_real()), f"{what}: padding, and it alone, has size 0"  # type: ignore[union-attr]
        expected = result.k
    assert result.index.shape == (batch, expected), f"{what}: {tuple(result.index.shape)} instead of {(batch, expected)}"
    assert result.apply(view.tokens).shape == (batch, expected, view.tokens.shape[2]), f"{what}: wrong shape of the output"
    chosen = result.index[:, : keep + min(0, method.n_extra(n, keep))]
    assert ((chosen >= 0) & (chosen < n)).all(), f"{what}: indices outside the tokens"
    rows = [row[real[: len(row)]] for row, real in zip(chosen, result.is_real(), strict=True)]
    assert method.mixes or all(len(row.unique()) == len(row) for row in rows), f"{what}: a token is chosen twice"
    if method.selects and not method.adaptive:
        assert (chosen.diff(dim=1) > 0).all(), f"{what}: indices are not in raster order"
    _check_sizes(method, result, view, what)
    again = decide(method, view, keep, rest)
    assert torch.equal(result.index, again.index), f"{what}: another choice in a second run"
    for b in range(batch):
        alone = decide(method, one_image(view, b), keep, rest)
        k = alone.k  # of an adaptive method, without padding
        assert torch.equal(alone.index[0], result.index[b, :k]), f"{what}: an image's choice depends on its batch"
        torch.testing.assert_close(alone.as_weight()[0], result.as_weight()[b, :k], msg=f"{what}: weights depend on the batch")
    if method.mixes or result.weight is not None:
        return
    at, real = result.groups.gather(1, chosen), result.is_real()[:, : chosen.shape[1]]
    assert torch.equal(at[real], torch.arange(chosen.shape[1]).expand_as(chosen)[real]), (
        f"{what}: a token that stands for an output does not belong to it"
    )


def _check_sizes(method: Method, result: Reduction, view: View, what: str) -> None:
    weight, sizes = result.as_weight(), result.sizes_after(view.sizes)
    assert torch.isfinite(weight).all(), f"{what}: weights are not finite"
    if not method.sums:
        total = result.is_real().float()
        torch.testing.assert_close(weight.sum(-1), total, msg=f"{what}: weights of a token do not add to 1")
    if result.is_selection or method.mixes or (method.norm is None and not method.selects):
        return
    assert sizes is not None and (sizes[result.is_real()] > 0).all(), f"{what}: a merge without sizes"
    covered = (view.sizes_or_ones() * (result.groups >= 0)).sum(-1)
    torch.testing.assert_close(sizes.sum(-1), covered, msg=f"{what}: sizes are not conserved")


def _check_bf16(method: Method) -> None:
    view = make_view(dtype=torch.bfloat16, seed=3)
    for rest in _rests(method):
        result = decide(method, view, _budgets(method, view)[-1] if method.mixes else 5, rest)
        out = result.apply(view.tokens)
        assert out.dtype == torch.bfloat16 and torch.isfinite(out).all(), f"{method.name}(rest={rest}): not safe in bf16"
