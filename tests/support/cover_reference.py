"""Farthest points and merging by their formulas, by loops in float64."""

from __future__ import annotations

import math

from torch import Tensor

from tokensieve.core import MAX_NORM_RATIO


def slow_farthest_points(x: Tensor, k: int, clip: float, first: int | None = None) -> tuple[list[int], list[int], float]:
    """Seeds in ascending order, groups, and the smallest lead of any decision over the next best, of one image (N, D)."""
    tokens = x.double().tolist()
    norms = [sum(v * v for v in token) ** 0.5 for token in tokens]
    median = sorted(norms)[(len(norms) - 1) // 2]
    clipped = []
    for token, norm in zip(tokens, norms, strict=True):
        factor = min(1.0, clip * median / norm) if median > 0 and norm > 0 else 1.0
        clipped.append([factor * v for v in token])
    mean = [sum(column) / len(clipped) for column in zip(*clipped, strict=True)]

    def apart(a: list[float], b: list[float]) -> float:
        return sum((p - q) ** 2 for p, q in zip(a, b, strict=True))

    lead = float("inf")

    def best(values: list[float], forbidden: list[int]) -> int:
        nonlocal lead
        order = sorted((i for i in range(len(values)) if i not in forbidden), key=lambda i: (-values[i], i))
        if len(order) > 1:
            lead = min(lead, (values[order[0]] - values[order[1]]) / (abs(values[order[0]]) + 1e-30))
        return order[0]

    seeds = [best([apart(token, mean) for token in clipped], []) if first is None else first]
    while len(seeds) < k:
        seeds.append(best([min(apart(token, clipped[seed]) for seed in seeds) for token in clipped], seeds))
    seeds.sort()
    groups = []
    for number, token in enumerate(tokens):
        cosines = [
            sum(p * q for p, q in zip(token, tokens[seed], strict=True)) / (norms[seed] * norms[number] or 1.0)
            for seed in seeds
        ]
        groups.append(seeds.index(number) if number in seeds else best(cosines, []))
    return seeds, groups, lead


def slow_merge(x: Tensor, groups: list[int], sizes: list[float], k: int, power: float) -> list[list[float]]:
    """Output tokens of one image (N, D), by loops in float64."""
    tokens, out = x.double().tolist(), []
    for group in range(k):
        members = [number for number, joined in enumerate(groups) if joined == group]
        mass = sum(sizes[number] for number in members)
        mean = [sum(sizes[number] * tokens[number][d] for number in members) / mass for d in range(x.shape[1])]
        length = math.sqrt(sum(v * v for v in mean))
        lengths = sum(sizes[number] * math.sqrt(sum(v * v for v in tokens[number])) for number in members) / mass
        ratio = min(max(lengths / length if length else MAX_NORM_RATIO, 1.0), MAX_NORM_RATIO)
        out.append([v * ratio**power for v in mean])
    return out
