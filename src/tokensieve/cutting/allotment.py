"""How a budget is shared: by the images of a prompt, and by the tiles of an image, in proportion to their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tokensieve.cutting.choice import Chooser
from tokensieve.cutting.placement import Cut


def allot(total: int, sizes: Sequence[int]) -> list[int]:
    """Shares a number of tokens in proportion to sizes: each gets at least 1 and at most its size.

    What rounding down leaves goes to the largest remainders, of equal ones to the first.
    """
    whole = sum(sizes)
    total = min(max(total, len(sizes)), whole)
    shares = [total * size // whole for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: -(total * sizes[i] % whole))
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    for i in (i for i, share in enumerate(shares) if share == 0):
        shares[shares.index(max(shares))] -= 1
        shares[i] = 1
    return shares


def image_budgets(
    cut: Cut, chooser: Chooser, counts: Sequence[int], firsts: Sequence[int], prompts: Sequence[int]
) -> list[int]:
    """The number of tokens that each image keeps, by a budget of each image or of each prompt, counted as the method counts.

    counts: tokens of each image; firsts: before any cut; prompts: the prompt that each is in, if the budget is of each prompt.
    """
    if cut.budget.scope == "image":
        return [chooser.tokens_to_keep(cut, *each) for each in zip(counts, firsts, strict=True)]
    budgets = [0] * len(counts)
    for prompt in dict.fromkeys(prompts):
        images = [i for i, own in enumerate(prompts) if own == prompt]
        of_prompt = [counts[i] for i in images]
        total = chooser.tokens_to_keep(cut, sum(of_prompt), sum(firsts[i] for i in images))
        for i, share in zip(images, allot(total, of_prompt), strict=True):
            budgets[i] = share
    return budgets
