"""Ranking by the definitions, one query after another."""

from __future__ import annotations

import math
from typing import Any


def slow_ranking(queries: Any, gallery: Any, query_ids: Any, gallery_ids: Any, query_groups: Any, gallery_groups: Any) -> Any:
    """By the definitions, in plain Python: of each query (AP, place of the first right answer), or None."""

    def unit(vector: Any) -> list[float]:
        length = math.sqrt(sum(float(x) ** 2 for x in vector))
        return [float(x) / length for x in vector]

    candidates = [unit(row) for row in gallery]
    found: list[Any] = []
    for number, row in enumerate(queries):
        query = unit(row)
        distances = []
        for index, candidate in enumerate(candidates):
            mine = gallery_ids[index] == query_ids[number]
            if mine and gallery_groups[index] == query_groups[number]:
                continue
            distance = sum((x - y) ** 2 for x, y in zip(query, candidate, strict=True))
            distances.append((round(distance, 7), index, mine))
        hits, precisions, first = 0, [], None
        for place, (_, _, mine) in enumerate(sorted(distances), start=1):
            if mine:
                hits += 1
                precisions.append(hits / place)
                first = first or place
        found.append((sum(precisions) / hits, first) if hits else None)
    return found
