"""Methods for videos against their rules, written again here: slowly, in float64, video by video, token by token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError
from tokensieve.methods import get_method
from tokensieve.methods.block_seeds import BLOCK, find_blocks
from tokensieve.methods.controls import cells, centres, runs_of_frames
from tokensieve.methods.farthest_points import farthest_points
from tokensieve.methods.holitom import find_windows
from tokensieve.plan import Plan
from tokensieve.testing import check_method, make_view

Array = NDArray[np.float64]
VIDEO = ("evs", "vidcom2", "vidcom2_vllm", "vcast", "holitom", "fastvid", "flashvid", "llava_scissor", "frames")
FRAMES, H, W, D = 14, 3, 4, 16
n, N = H * W, FRAMES * H * W


def a_video(seed: int = 0, still: float = 0.5, batch: int = 2) -> View:
    """Scenes of some frames, in which a share of the places hardly changes."""
    drawn = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawn)

    scene = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3])
    base = draw(batch, 4, 1, D) + draw(batch, 4, n, D)
    moves = torch.rand(batch, 1, n, 1, generator=drawn) > still
    tokens = base[:, scene] + draw(batch, FRAMES, n, D) * torch.where(moves, 0.8, 0.15)
    heads = 2
    return make_view(
        tokens=tokens.flatten(1, 2),
        grid=(FRAMES, H, W),
        q=1.5 * draw(batch, heads, N + 1, 8),
        k=draw(batch, heads, N + 1, 8),
        samples=torch.arange(batch),
    )


def attention_of(view: View, b: int, received: bool = False) -> Array:
    """The attention of CLS, or the mean of all rows, frame by frame: (F, n)."""
    assert view.attention is not None
    q, k = (x[b].double().numpy() for x in (view.attention.q, view.attention.k))
    logits = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    rows = weights.mean(0)
    return np.asarray((rows.mean(0) if received else rows[0])[1:].reshape(FRAMES, n))


def tokens_of(view: View, b: int) -> Array:
    return np.asarray(view.tokens[b].double().numpy().reshape(FRAMES, n, D))


def cos(a: Array, b: Array) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def decide(name: str, view: View, keep: int, **options: object) -> Reduction:
    reduction: Reduction = get_method(name).decide(view, keep, **options)
    return reduction


def real(reduction: Reduction, b: int) -> int:
    return reduction.k if reduction.counts is None else int(reduction.counts[b])


def check_outputs(reduction: Reduction, view: View, b: int, golden: dict[int, Array]) -> None:
    """golden: the output tokens, by the token that represents each."""
    count = real(reduction, b)
    assert reduction.index[b, :count].tolist() == sorted(golden)
    out = reduction.apply(view.tokens)[b, :count].double().numpy()
    np.testing.assert_allclose(out, np.stack([golden[i] for i in sorted(golden)]), atol=2e-5)


@pytest.mark.parametrize("name", VIDEO)
def test_checks(name: str) -> None:
    check_method(name)


def frame_scores(x: Array, rho: float) -> tuple[Array, list[int]]:
    """VidCom2: V + W, (F, n), and the number of each frame."""
    variance = x.reshape(N, D).var(0)
    channels = sorted(range(D), key=lambda c: variance[c])[: D // 2]
    u = x[..., channels] / np.linalg.norm(x[..., channels], axis=-1, keepdims=True)

    def g(token: Array, centre: Array) -> float:
        return sum(math.exp(-((token - centre) ** 2).sum() / (2 * a)) for a in (1 / 8, 1 / 4, 1 / 2, 1, 2))

    v = np.array([[g(token, u.mean((0, 1))) for token in frame] for frame in u])
    w = np.array([[g(token, frame.mean(0)) for token in frame] for frame in u])
    unusual = -v.mean(1)
    p = np.exp((unusual - unusual.max()) / 0.01)
    p /= p.sum()
    return v + w, [max(1, round(min(1, rho * (1 + each - p.mean())) * n)) for each in p]


@pytest.mark.parametrize("keep", [20, 42, 100])
def test_vidcom2_and_its_exact_form(keep: int) -> None:
    view = a_video()
    free, exact = decide("vidcom2", view, keep), decide("vidcom2_vllm", view, keep)
    for b in range(2):
        scores, counts = frame_scores(tokens_of(view, b), keep / N)
        chosen = {f * n + i for f, count in enumerate(counts) for i in sorted(range(n), key=lambda i: scores[f, i])[:count]}
        assert free.index[b, : real(free, b)].tolist() == sorted(chosen)
        flat = scores.reshape(N)
        while len(chosen) > max(FRAMES, keep):
            chosen.remove(max(chosen, key=lambda i: flat[i]))
        while len(chosen) < max(FRAMES, keep):
            chosen.add(min(set(range(N)) - chosen, key=lambda i: flat[i]))
        assert exact.index[b].tolist() == sorted(chosen)


@pytest.mark.parametrize("keep", [5, 43, 120, 160])
def test_vcast(keep: int) -> None:
    view = a_video()
    reduction = decide("vcast", view, keep)
    total = max(FRAMES, keep)
    for b in range(2):
        x = tokens_of(view, b)
        z = x.mean(1) / np.linalg.norm(x.mean(1), axis=-1, keepdims=True)
        turns = [1.0, *(1 - cos(z[f] - z[f - 1], z[f + 1] - z[f]) for f in range(1, FRAMES - 1)), 1.0]
        weight = np.exp(np.array(turns) / 0.7)
        weight /= weight.sum()
        due = weight * (total - FRAMES)
        counts = [min(n, 1 + math.floor(each)) for each in due]
        fraction = [each - math.floor(each) for each in due]
        while sum(counts) < total:
            counts[max((f for f in range(FRAMES) if counts[f] < n), key=lambda f: fraction[f])] += 1
        chosen = []
        for f in range(FRAMES):
            length = np.linalg.norm(x[f], axis=-1)
            length = (length - length.min()) / (length.max() - length.min())
            score = [1 - cos(x[f, i], z[f]) + length[i] for i in range(n)]
            chosen += [f * n + i for i in sorted(range(n), key=lambda i: -score[i])[: counts[f]]]
        assert reduction.index[b].tolist() == sorted(chosen)


@pytest.mark.parametrize("frames", [10, 25, 49])
def test_vcast_keeps_the_same_of_each_frame_of_a_still_clip(frames: int) -> None:
    picture = torch.randn(1, 10, D, generator=torch.Generator().manual_seed(0))
    view = make_view(tokens=picture.repeat(1, frames, 1), grid=(frames, 2, 5))
    for each in (2, 5, 9):
        kept = decide("vcast", view, each * frames).index[0] // 10
        assert kept.bincount(minlength=frames).tolist() == [each] * frames


def test_a_share_is_not_rounded_to_tokens_of_the_video() -> None:
    """Of 12 tokens of a frame 37.7% are 4.524, which vidcom2 rounds to 5; 31 of the 84 tokens of 7 frames would be 4.43."""
    picture = torch.randn(1, n, D, generator=torch.Generator().manual_seed(0))
    still, moving = make_view(tokens=picture.repeat(1, 7, 1), grid=(7, H, W)), a_video()
    for view, name, keep, share, number, wanted in (
        (still, "vidcom2", 31, "0.377", 4 * 7, 5 * 7),
        (moving, "holitom", 56, "0.3334", 4 * FRAMES, 5 * FRAMES),
    ):
        options = {"tau": 1.0} if name == "holitom" else {}  # nothing is static
        assert real(decide(name, view, keep, **options), 0) == number, name
        assert real(decide(name, replace(view, share=Fraction(share)), keep, **options), 0) == wanted, name


@pytest.mark.parametrize(("width", "frames"), [(13, 4), (13, 8)])
def test_flashvid_rounds_up_the_share_of_each_frame(width: int, frames: int) -> None:
    view = make_view(batch=1, grid=(frames, 1, width))
    step = Plan.parse("flashvid@out:31.25%").steps[0]
    assert step.budget is not None
    keep = int(frames * width * step.budget.amount)
    assert real(decide("flashvid", replace(view, share=step.budget.amount), keep), 0) == frames * 5  # ceil(4.0625)


def peaks(x: Array, clusters: int, k: int) -> tuple[list[int], list[int]]:
    """DPC-KNN: centres, and for each token the number of its centre."""
    d = np.array([[np.linalg.norm(a - b) for b in x] for a in x]) / math.sqrt(x.shape[1])
    score = density_scores(x, k)
    centres = sorted(range(len(x)), key=lambda i: -score[i])[:clusters]
    labels = [centres.index(i) if i in centres else min(range(clusters), key=lambda c: d[i, centres[c]]) for i in range(len(x))]
    return centres, labels


def density_scores(x: Array, k: int) -> list[float]:
    """Density times the distance to the next denser token."""
    d = np.array([[np.linalg.norm(a - b) for b in x] for a in x]) / math.sqrt(x.shape[1])
    rho = [math.exp(-np.mean(np.sort(row)[:k] ** 2)) for row in d]
    score = []
    for i in range(len(x)):
        denser = [d[i, j] for j in range(len(x)) if (rho[j], -j) > (rho[i], -i)]
        score.append(rho[i] * (min(denser) if denser else d.max()))
    return score


def all_windows(frames: int) -> list[list[tuple[int, int]]]:
    """Every way to part frames into windows."""
    ways = []
    for cuts in itertools.product((False, True), repeat=frames - 1):
        starts = [0, *(f + 1 for f, cut in enumerate(cuts) if cut)]
        ways.append(list(zip(starts, [*starts[1:], frames], strict=True)))
    return ways


def gain_of(way: list[tuple[int, int]], static: Tensor) -> int:
    return sum(int(static[start : stop - 1].all(0).sum()) * (stop - start - 1) for start, stop in way if stop - start > 1)


@pytest.mark.parametrize("seed", range(4))
def test_windows_have_the_largest_gain(seed: int) -> None:
    static = torch.rand(8, 5, generator=torch.Generator().manual_seed(seed)) > 0.4
    windows, gain = find_windows(static)
    assert windows in all_windows(9) and gain == gain_of(windows, static)
    assert gain == max(gain_of(way, static) for way in all_windows(9))
    assert find_windows(static[:0]) == ([(0, 1)], 0)


@pytest.mark.parametrize(
    ("keep", "still", "density"),
    [(30, 0.5, 0.0), (60, 0.5, 0.0), (40, 0.9, 0.0), (25, 0.0, 0.0), (60, 0.5, 0.4), (60, 0.2, 1.0), (100, 0.9, 0.7)],
)
def test_holitom(keep: int, still: float, density: float) -> None:
    view = a_video(still=still)
    reduction = decide("holitom", view, keep, density=density)
    for b in range(2):
        x, a = tokens_of(view, b), attention_of(view, b, received=True)
        static = torch.tensor([[cos(x[f, i], x[f + 1, i]) > 0.8 for i in range(n)] for f in range(FRAMES - 1)])
        windows, gain = find_windows(static)
        share = min(1, keep / N / (1 - gain / N))
        golden: dict[int, Array] = {}
        for start, stop in windows:
            places = [i for i in range(n) if stop - start > 1 and all(static[f, i] for f in range(start, stop - 1))]
            if count := round(len(places) * share):
                mixed = mixed_peaks(x[start:stop, places].mean(0), count)
                golden |= {start * n + places[centre]: token for centre, token in mixed.items()}
            rest = [i for i in range(n) if i not in places]
            count = math.ceil(len(rest) * share)
            attended = round(count * (1 - density))
            for f in range(start, stop):
                order = sorted(rest, key=lambda i: -a[f, i])
                golden |= {f * n + i: x[f, i] for i in order[:attended]}
                if others := sorted(order[attended:]) if count > attended else []:
                    mixed = mixed_peaks(x[f, others], count - attended)
                    golden |= {f * n + others[centre]: token for centre, token in mixed.items()}
        check_outputs(reduction, view, b, golden)


def mixed_peaks(x: Array, count: int) -> dict[int, Array]:
    """HoliTom: peaks, each mixed with the mean of the others of its cluster."""
    middles, labels = peaks(x, count, min(7, count))
    made = {}
    for c, centre in enumerate(middles):
        others = [x[j] for j in range(len(x)) if labels[j] == c and j != centre]
        made[centre] = 0.6 * x[centre] + 0.4 * np.mean(others, axis=0) if others else x[centre]
    return made


def parted(vectors: Array) -> list[range]:
    """Segments: at the 7 smallest cosines of neighbours, and at all below 0.9."""
    cosines = [cos(vectors[f], vectors[f + 1]) for f in range(FRAMES - 1)]
    cuts = {f for f in range(FRAMES - 1) if cosines[f] < 0.9} | set(sorted(range(FRAMES - 1), key=lambda f: cosines[f])[:7])
    starts = [0, *(f + 1 for f in sorted(cuts))]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], FRAMES], strict=True)]


@pytest.mark.parametrize("keep", [14, 42, 100])
def test_fastvid(keep: int) -> None:
    view = a_video(still=0.9)
    reduction = decide("fastvid", view, keep)
    for b in range(2):
        x, a = tokens_of(view, b), attention_of(view, b)
        due = max(1, keep // FRAMES)
        for_anchors = int(due * 0.4)
        kept = [sorted(range(n), key=lambda i: -a[f, i])[: due - for_anchors] for f in range(FRAMES)]
        others = [[i for i in range(n) if i not in kept[f]] for f in range(FRAMES)]
        golden = {f * n + i: x[f, i] for f in range(FRAMES) for i in kept[f]}
        score = [density_scores(x[f, others[f]], 4) for f in range(FRAMES)]
        segments = parted(np.array([(a[f, :, None] * x[f]).sum(0) for f in range(FRAMES)]))
        assert max(map(len, segments)) > 1
        for segment in segments:
            members = [x[f, i] for f in segment for i in others[f]]
            with_anchors = [f for j, f in enumerate(segment) if (len(segment) - 1 - j) % 4 == 0]
            count = min(n - due + for_anchors, for_anchors * len(segment) // math.ceil(len(segment) / 4))
            for f in with_anchors:
                best = [others[f][j] for j in sorted(range(len(others[f])), key=lambda j: -score[f][j])[:count]]
                goal = [max(best, key=lambda i: cos(member, x[f, i])) for member in members] if best else []
                for anchor in best:
                    mine = [member for member, to in zip(members, goal, strict=True) if to == anchor]
                    weight = max(0.6, 1 / (len(mine) + 1))
                    golden[f * n + anchor] = weight * x[f, anchor] + (1 - weight) * np.mean(mine, axis=0)
        check_outputs(reduction, view, b, golden)


@pytest.mark.parametrize(("keep", "similar"), [(42, 0.8), (100, 0.8), (42, 0.2), (90, -0.5)])
def test_flashvid(keep: int, similar: float) -> None:
    view = a_video(still=0.9)
    reduction = decide("flashvid", view, keep, similar=similar)
    for b in range(2):
        x, a = tokens_of(view, b), attention_of(view, b)
        due = math.ceil(keep / FRAMES)
        each = math.ceil(0.7 * due)
        chosen: list[list[int]] = []
        for f in range(FRAMES):
            d = np.array([[(1 - cos(x[f, i], x[f, j])) * a[f, j] for j in range(n)] for i in range(n)])
            picked = [max(range(n), key=lambda j: min(d[i, j] for i in range(n) if i != j))]
            while len(picked) < each:
                picked.append(max(set(range(n)) - set(picked), key=lambda j: min(d[i, j] for i in picked)))
            chosen.append(picked)
        golden = {f * n + i: x[f, i] for f in range(FRAMES) for i in chosen[f]}
        for segment in parted(x.mean(1)):
            links: dict[tuple[int, int], tuple[float, int]] = {}
            for f, i in itertools.product(segment[1:], range(n)):
                free = [j for j in range(n) if j not in chosen[f - 1]]
                if i not in chosen[f] and free:
                    best = max(free, key=lambda j: cos(x[f, i], x[f - 1, j]))
                    links[f, i] = cos(x[f, i], x[f - 1, best]), best
            linked = {token for token, (closeness, _) in links.items() if closeness > similar}
            if len(segment) * n - len(linked) < due * len(segment):
                ranked = sorted((closeness for closeness, _ in links.values()), reverse=True)
                ranked += [-1.0] * (len(segment) * n - len(ranked))
                limit = max(ranked[(n - due) * len(segment) - 1], -1 + 1e-6)
                linked = {token for token, (closeness, _) in links.items() if closeness > limit}
            trees: dict[tuple[int, int], list[Array]] = {}
            for f, i in itertools.product(segment, range(n)):
                if i in chosen[f]:
                    continue
                root = (f, i)
                while root in linked:
                    root = root[0] - 1, links[root][1]
                trees.setdefault(root, []).append(x[f, i])
            share = (due - each) * len(segment) / max(1, len(trees))
            for f in segment if due > each else ():
                here = [root for root in sorted(trees) if root[0] == f]
                means = np.array([np.mean(trees[root], axis=0) for root in here])
                if share >= 1 or not here:
                    golden |= {f * n + root[1]: mean for root, mean in zip(here, means, strict=True)}
                    continue
                count = math.ceil(len(here) * share)
                middles, labels = peaks(means, count, min(count, 7))
                for c, centre in enumerate(middles):
                    golden[f * n + here[centre][1]] = means[[j for j in range(len(here)) if labels[j] == c]].mean(0)
        check_outputs(reduction, view, b, golden)


def graph(x: Array, tau: float) -> list[tuple[int, list[int]]]:
    """Connected components: the token with most neighbours, and all tokens of each."""
    near = [[j for j in range(len(x)) if cos(x[i], x[j]) > tau or i == j] for i in range(len(x))]
    left, found = set(range(len(x))), []
    while left:
        component, front = set[int](), [min(left)]
        while front:
            i = front.pop()
            if i not in component:
                component.add(i)
                front += near[i]
        left -= component
        found.append((min(component, key=lambda i: (-len(near[i]), i)), sorted(component)))
    return sorted(found)


@pytest.mark.parametrize(("keep", "tau"), [(N, 0.9), (N, 0.6), (10, 0.9)])
def test_llava_scissor(keep: int, tau: float) -> None:
    view = a_video()
    reduction = decide("llava_scissor", view, keep, tau=tau)
    for b in range(2):
        x = tokens_of(view, b)
        parts = [(f * n + first, [f * n + i for i in some]) for f in range(FRAMES) for first, some in graph(x[f], tau)]
        flat = x.reshape(N, D)
        means = np.array([flat[some].mean(0) for _, some in parts])
        made = []
        for middle, some in graph(means, tau):
            made.append((parts[middle][0], means[some].mean(0), sum(len(parts[j][1]) for j in some)))
        assert 1 < len(made) < N
        made = sorted(made, key=lambda each: -each[2])[:keep]
        goal = [max(range(len(made)), key=lambda t: cos(token, made[t][1])) for token in flat]
        golden = {}
        for t, (first, y, _) in enumerate(made):
            mine = [token for token, to in zip(flat, goal, strict=True) if to == t]
            golden[first] = (y + sum(mine)) / (1 + len(mine))
        check_outputs(reduction, view, b, golden)


def test_llava_scissor_joins_what_its_sample_is_near_to() -> None:
    """A chain of tokens of which only neighbours are alike: joined whole if all ask, in parts if few do."""
    angles = torch.arange(60) * 0.3
    tokens = torch.stack([angles.cos(), angles.sin()], dim=1)[None]
    tokens = torch.cat([tokens * torch.linspace(1, 2, 60)[:, None], torch.zeros(1, 60, 2)], dim=2)
    view = make_view(tokens=tokens[:, :20], grid=(1, 4, 5))
    assert int(decide("llava_scissor", view, 20, tau=0.95).counts[0]) == 1  # type: ignore[index]
    few = decide("llava_scissor", view, 20, tau=0.95, eps=1.0)
    assert 1 < int(few.counts[0]) < 20  # type: ignore[index]


def test_evs_keeps_a_whole_frame_of_a_video_and_the_budget_of_an_image() -> None:
    for grid, keep, wanted in (((1, 3, 4), 5, 12), ((4, 1, 3), 2, 3), ((4, 1, 3), 5, 5), ((3, 4), 5, 5)):
        view = make_view(grid=grid)
        assert decide("evs", view, keep).k == wanted
        assert decide("evs", view, keep).index[0, : min(3, wanted)].tolist() == [0, 1, 2]


@pytest.mark.parametrize("options", ["holitom(tau=2)", "holitom(density=1.1)", "flashvid(alpha=0)", "llava_scissor(eps=0)"])
def test_options_that_make_no_sense(options: str) -> None:
    with pytest.raises(UserError, match=options.split("(")[0]):
        Plan.parse(options)


def test_frames_keeps_whole_frames() -> None:
    view = a_video()
    for keep, wanted in ((7 * n, [1, 3, 5, 7, 9, 11, 13]), (2 * n + 5, [3, 10]), (3, [7]), (N, list(range(FRAMES)))):
        kept = decide("frames", view, keep)
        assert kept.index[0].tolist() == [f * n + i for f in wanted for i in range(n)]


@pytest.mark.parametrize("grid", [(8, 4, 4), (5, 3, 2), (1, 4, 5), (30, 2, 2), (3, 1, 7)])
def test_cells_partition_the_video(grid: tuple[int, int, int]) -> None:
    frames, h, w = grid
    total = frames * h * w
    for keep in range(1, total + 1):
        cell = cells(grid, total, keep)
        assert (cell.bincount(minlength=keep) > 0).all() and int(cell.amax()) == keep - 1
        middle = centres(grid, cell, keep)
        assert torch.equal(cell[middle], torch.arange(keep))


def test_cells_of_a_video_are_blocks_of_space_and_time() -> None:
    assert cells((4, 2, 2), 16, 2).reshape(4, 4).tolist() == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]
    assert cells((2, 4, 4), 32, 4).reshape(2, 4, 4)[0].tolist() == cells((4, 4), 16, 4).reshape(4, 4).tolist()
    assert runs_of_frames((8, 14, 14), 392) == [(1, 78), (2, 78), (1, 79), (2, 78), (2, 79)]


def test_methods_for_images_take_the_grid_of_a_video() -> None:
    view = make_view(batch=2, grid=(3, 4, 4))
    for name in ("random", "grid", "pool", "cover", "tomesd", "vscan", "hiprune", "cosine", "divprune"):
        reduction = decide(name, view, 24)
        assert reduction.apply(view.tokens).shape[:2] == (2, 24), name


@pytest.fixture
def long_video() -> Callable[[int], View]:
    def make(frames: int) -> View:
        drawn = torch.Generator().manual_seed(1)
        return make_view(tokens=torch.randn(1, frames * 64, 8, generator=drawn), grid=(frames, 8, 8))

    return make


def test_cover_of_a_long_video_takes_the_farthest_seeds_of_all_blocks(long_video: Callable[[int], View]) -> None:
    view, keep = long_video(40), 321
    reduction, blocks = decide("cover", view, keep), find_blocks(view, keep)
    assert len(blocks) == 3 and torch.equal(torch.cat(blocks).sort().values, torch.arange(view.n))
    x = view.tokens[0].double().numpy()
    length = np.linalg.norm(x, axis=-1)
    z = x * np.minimum(1, 2 * np.sort(length)[(view.n - 1) // 2] / length)[:, None]
    ranked: list[tuple[float, int]] = []
    for block in blocks:
        places = {int(at) % 64 for at in block}
        assert len(block) == 40 * len(places)  # through all of its time
        own = z[block]
        seeds = [int(np.argmax(((own - own.mean(0)) ** 2).sum(-1)))]
        ranked.append((math.inf, int(block[seeds[0]])))
        least = np.full(len(own), math.inf)
        while len(seeds) < 4 * math.ceil(keep * len(block) / view.n):
            least = np.minimum(least, ((own - own[seeds[-1]]) ** 2).sum(-1))
            seeds.append(int(np.argmax(least)))
            ranked.append((float(least[seeds[-1]]), int(block[seeds[-1]])))
    wanted = sorted(at for _, at in sorted(ranked, reverse=True)[:keep])
    assert reduction.index[0].tolist() == wanted
    unit = x / length[:, None]
    for block in blocks:
        mine = [i for i, at in enumerate(wanted) if at in set(block.tolist())]
        best = np.array(mine)[(unit[block] @ unit[[wanted[i] for i in mine]].T).argmax(1)]
        assert reduction.groups[0][block].tolist() == best.tolist()


def test_cover_of_a_still_video_spends_nothing_on_what_repeats() -> None:
    drawn = torch.Generator().manual_seed(0)
    still = torch.randn(1, 1, 64, 8, generator=drawn) + 0.01 * torch.randn(1, 40, 64, 8, generator=drawn)
    view = make_view(tokens=still.flatten(1, 2), grid=(40, 8, 8))
    reduction = decide("cover", view, 100)
    assert sorted({int(i) % 64 for i in reduction.index[0]}) == list(range(64))
    back = reduction.apply(view.tokens)[0][reduction.groups[0]]
    assert float((back - view.tokens[0]).norm() / view.tokens[0].norm()) < 0.02


def test_blocks_are_parts_of_the_video(long_video: Callable[[int], View]) -> None:
    for grid, keep in (((3000, 1, 1), 30), ((3000, 1, 2), 5), ((50, 8, 8), 2), ((700, 2, 2), 9), ((2, 40, 40), 900)):
        view = make_view(tokens=torch.zeros(1, math.prod(grid), 1), grid=grid)
        blocks = find_blocks(view, keep)
        assert torch.equal(torch.cat(blocks).sort().values, torch.arange(view.n)) and len(blocks) <= keep
        assert keep < 9 or max(map(len, blocks)) <= 2 * BLOCK
    cut = replace(long_video(40), grid=None)
    assert [len(block) for block in find_blocks(cut, 100)] == [854, 853, 853]


def test_cover_of_a_short_video_is_that_of_its_tokens(long_video: Callable[[int], View]) -> None:
    view = long_video(16)
    assert view.n == BLOCK
    index, groups = farthest_points(view.tokens, 100, 2.0)
    reduction = decide("cover", view, 100)
    assert torch.equal(reduction.index, index) and torch.equal(reduction.groups, groups)
    for keep in (1, 2, 3, 2559):
        few = decide("cover", long_video(40), keep)
        assert few.k == keep and len(few.groups.unique()) == keep
