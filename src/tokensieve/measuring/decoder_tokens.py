"""The budget of a plan on a vision-language model: the vision tokens that each layer of its decoder runs on."""

from __future__ import annotations

from collections.abc import Sequence

from tokensieve.cutting.passes import Row

DECODER = "llm."  # what the names of cuts in the decoder begin with


def decoder_tokens(ledger: Sequence[Row], tokens: int, depth: int) -> list[int]:
    """The vision tokens of an image that each of the decoder's layers runs on.

    ledger: of the plan. tokens: of an image before any cut. A cut at llm.L is on the input of layer L.
    """
    before = [row.tokens_out for row in ledger if not row.layer.startswith(DECODER)]
    cuts = {int(row.layer.removeprefix(DECODER)): row for row in ledger if row.layer.startswith(DECODER)}
    first = [row.tokens_in for row in cuts.values()]
    current = (before[-1:] or first[:1] or [tokens])[0]
    counts = []
    for layer in range(depth):
        current = cuts[layer].tokens_out if layer in cuts else current
        counts.append(current)
    return counts
