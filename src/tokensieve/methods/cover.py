"""Cover: a few seeds that are far apart from each other, everything merged into its most similar seed, norms restored.

Nothing is dropped, so little is lost: each output token is the size-weighted mean of one group of similar tokens. Averaging
shortens tokens, and later attention and the head respond to the norm; `norm=2` (the default here) makes up for it. No attention
is needed, so the method can stand at every position.

Of a long video seeds are found block by block (`block_seeds.py`), so that the cost stays linear in the number of tokens.

Own method of this project. Formulation, in float32 (the choice depends on rounding): seeds and groups as in
`farthest_points`, norms clipped at `clip` times the image's median norm; output j is m_j * (n_j / |m_j|) ** norm with m_j the
mean of its group and n_j the mean norm of its members.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError
from tokensieve.methods.block_seeds import BLOCK, block_seeds
from tokensieve.methods.farthest_points import farthest_points
from tokensieve.methods.registry import method


def check_options(options: Mapping[str, Any]) -> None:
    """Raises a UserError for options that make no sense."""
    if not options["clip"] > 0:
        raise UserError(f"cover: clip={options['clip']} is not above 0; 2 is the default, inf clips nothing")


@method(
    summary="seeds far apart from each other; every token joins its most similar seed, norms are restored",
    selects=False,
    check=check_options,
    budget=lambda options: "25%",
    norm=2.0,
)
def cover(view: View, keep: int, *, clip: float = 2.0) -> Reduction:
    is_long = view.frames is not None and view.n > BLOCK
    index, groups = block_seeds(view, keep, clip) if is_long else farthest_points(view.tokens, keep, clip)
    return Reduction.merge(groups, index, view.sizes_or_ones())
