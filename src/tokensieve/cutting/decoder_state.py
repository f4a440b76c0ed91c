"""The state of one call of a vision-language model: its image features, its prompt, and the decoder pass under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokensieve.core import Question
from tokensieve.errors import UserError


@dataclass
class ImageFeatures:
    """The image features that a call computed last."""

    lengths: list[int]  # tokens of each image, counted like the placeholders in the sequence
    total: float  # the sum of the features, which identifies them
    kept: Sequence[Tensor] | None = None  # (K,) for each image, placeholders with a token, in the order of tokens; None: all
    sizes: Tensor | None = None  # (I, K), number of patches merged into each of them; None: one each


@dataclass
class ImageGroup:
    """Images of a pass that have the same number of tokens left."""

    images: Tensor  # (G,), indices of the images of ImageFeatures
    rows: Tensor  # (G,), the sequence of each image
    at: Tensor  # (G, N), positions of its tokens in that sequence
    sizes: Tensor | None = None  # (G, N), number of patches merged into each token
    present: Tensor | None = None  # (G, N), the probability that each token is there, behind a soft cut; None: all are
    count: int | None = None  # tokens that a hard cut would have left, behind a soft one; None: N


@dataclass
class DecoderPass:
    """One forward pass of the decoder."""

    past: Tensor | None  # (B, P), False where earlier tokens are padding; None: none is
    real: Tensor  # (B, L), False where new tokens are padding
    question: Tensor  # (B, L)
    groups: list[ImageGroup]
    left: Tensor  # (B, L), new tokens that have not been dropped
    bias: Tensor | None = None  # (B, L), log of sizes and of soft masks so far
    next_layer: int = 0  # the layer that is to run next, behind the first cut
    at: Tensor | None = None  # (B, K), positions of the tokens that are left; None: all
    mask: Tensor | None = None  # in the form that the layers of this stage expect
    tables: tuple[Tensor, ...] = ()  # (B, K, d), rotary tables of the tokens that are left

    def to(self, device: torch.device) -> None:
        """Moves all tensors to the device of the next layer, for a model on several devices."""
        for holder in (self, *self.groups):
            for name, value in vars(holder).items():
                if isinstance(value, Tensor):
                    setattr(holder, name, value.to(device))
        self.tables = tuple(table.to(device) for table in self.tables)


@dataclass
class Prompt:
    """The text of a call."""

    ids: Tensor | None  # (B, L)
    attention_mask: Tensor | None  # (B, L)


@dataclass
class DecoderCall:
    """The state of one call of a vision-language model."""

    features: ImageFeatures | None = None
    has_new_features: bool = False  # this call computed them, not an earlier one
    prompt: Prompt | None = None
    prompt_length: int | None = None  # tokens of the prompt, inside generate()
    labels: Tensor | None = None  # (B, L): tokens with a label are the answer, not the question
    image_mask: Tensor | None = None  # (B, L), placeholders of the next pass
    run: DecoderPass | None = None  # the pass under way
    expects_step: bool = False  # generate() has prepared the inputs of its next step

    def question_mask(self, context: Mapping[str, Any], real: Tensor, image_mask: Tensor) -> Tensor:
        """Tokens of the question: context["question"], or else the text of the prompt. (B, L)"""
        mask = context.get("question")
        if mask is not None:
            if mask.shape != real.shape:
                raise UserError(f'context["question"] is {tuple(mask.shape)}, but the sequences are {tuple(real.shape)}')
            return torch.as_tensor(mask).to(real.device, torch.bool)
        text = real & ~image_mask
        if self.labels is not None and self.labels.shape == text.shape:
            without_label = text & (self.labels.to(text.device) == -100)
            text = torch.where(without_label.any(1, keepdim=True), without_label, text)  # all labelled: labels are ignored
        if self.prompt_length is not None:
            text[:, self.prompt_length :] = False  # without a cache, generated tokens are fed again in every step
        return text


def check_features(features: Tensor, computed: ImageFeatures | None) -> None:
    """Raises a UserError unless these are the features computed last, once or several times (beams)."""
    if computed is None:
        raise UserError("the image features were computed before the plan was attached; pass pixel values instead")
    times = len(features.flatten(0, -2)) / sum(computed.lengths)
    total, size = float(features.detach().sum(dtype=torch.float64)), float(features.detach().abs().sum(dtype=torch.float64))
    if times != int(times) or abs(total - times * computed.total) > 1e-2 * (1 + size**0.5):
        raise UserError("the image features are not those computed last; pass pixel values with every call")


def group_images(image_mask: Tensor, features: ImageFeatures) -> list[ImageGroup]:
    """Groups the images of a pass by their number of placeholders in image_mask (B, L), and of those with a token."""
    counts: list[int] = image_mask.sum(1).tolist()
    times, rest = divmod(sum(counts), sum(features.lengths))  # beams repeat every row and its images
    assert not rest and len(counts) % times == 0
    positions = image_mask.nonzero()[:, 1].tolist()  # row by row
    by_length: dict[tuple[int, int], list[tuple[int, int, list[int]]]] = {}
    image = done = 0
    for row, count in enumerate(counts):
        if row % times == 0:
            first = image  # of this prompt
        image, until = first, done + count
        while done < until:
            n = features.lengths[image]
            left = n if features.kept is None else len(features.kept[image])
            by_length.setdefault((n, left), []).append((image, row, positions[done : done + n]))
            image, done = image + 1, done + n
        if done != until:
            raise UserError("the tokens of an image are split between two prompts; give every prompt whole images")
    groups = []
    for members in by_length.values():
        images, rows, at = (torch.tensor(column, device=image_mask.device) for column in zip(*members, strict=True))
        if features.kept is not None:
            at = at.gather(1, torch.stack([features.kept[image] for image, _, _ in members]).to(at.device))
        groups.append(ImageGroup(images, rows, at, None if features.sizes is None else features.sizes[images]))
    return groups


def flat_index(at: Tensor, length: int) -> Tensor:
    """Positions (B, K) in rows of this length, as positions in the flattened rows: copying whole rows is faster."""
    return (at + torch.arange(len(at), device=at.device)[:, None] * length).flatten()


def gather_rows(x: Tensor, at: Tensor) -> Tensor:
    """The states x (B, L, D) at these positions (B, K): (B, K, D)."""
    return x.flatten(0, 1).index_select(0, flat_index(at, x.shape[1])).view(*at.shape, x.shape[2])


def pack_question(x: Tensor, mask: Tensor) -> Question:
    """The marked tokens of each row, packed to the left: (B, L, E), (B, L) -> (B, T, E)."""
    most = max(1, int(mask.sum(1).amax()))
    order = (~mask).int().argsort(dim=1, stable=True)[:, :most]
    return Question(gather_rows(x, order), mask.gather(1, order))
