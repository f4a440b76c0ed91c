"""The state of one call of a vision-language model: its image features, its prompt, and the decoder pass under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokensieve.core import Question
from tokensieve.errors import UserError
from tokensieve.models.decoder import Projected
from tokensieve.scoring import flat_index, gather_rows


@dataclass
class ImageFeatures:
    """The image features that a call computed last."""

    lengths: list[int]  # tokens of each image, counted like the placeholders in the sequence
    probes: tuple[Probe, Probe]  # the first and the last token, which identify them
    kept: Sequence[Tensor] | None = None  # (K,) for each image, placeholders with a token, in the order of tokens; None: all
    sizes: Tensor | None = None  # (I, K), number of patches merged into each of them; None: one each


@dataclass
class ImageGroup:
    """Images of a pass that have the same number of tokens left."""

    numbers: list[int]  # indices of the images of ImageFeatures
    sequences: list[int]  # the sequence of each image
    rows: Tensor  # (G,), the same
    at: Tensor  # (G, N), positions of its tokens in that sequence
    sizes: Tensor | None = None  # (G, N), number of patches merged into each token
    present: Tensor | None = None  # (G, N), the probability that each token is there, behind a soft cut; None: all are
    count: int | None = None  # tokens that a hard cut would have left, behind a soft one; None: N
    entered: Tensor | None = None  # (G, N0), positions of its tokens before any cut in the decoder
    carried: dict[str, Tensor] = field(default_factory=dict)  # by step: (G, N), what its method carries from cut to cut

    def select(self, picked: list[int], count: int) -> ImageGroup:
        """Some images of the group, with their first tokens."""

        def part(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[picked, :count]

        assert self.entered is not None
        return ImageGroup(
            [self.numbers[i] for i in picked],
            [self.sequences[i] for i in picked],
            self.rows[picked],
            self.at[picked, :count],
            part(self.sizes),
            part(self.present),
            self.count,
            self.entered[picked],
            {name: values[picked, :count] for name, values in self.carried.items()},
        )


@dataclass
class DecoderPass:
    """One forward pass of the decoder. Counts are known as numbers, so that no layer has to wait for a tensor."""

    shape: tuple[int, int]  # B, L of the new tokens
    device: torch.device
    past: Tensor | None = None  # (B, P), False where earlier tokens are padding; None: none is
    real: Tensor | None = None  # (B, L), False where new tokens are padding; None: none is
    images: VisionTokens | None = None  # None: nothing is cut in this pass, since it has no image
    bias: Tensor | None = None  # (B, L), log of sizes and of soft masks so far
    next_layer: int = 0  # the layer that is to run next, behind the first cut
    is_in_layer: bool = False  # a layer behind a cut is running
    at: Tensor | None = None  # (B, K), positions of the tokens that the layers get; None: all
    whole: Tensor | None = None  # (B, L, D), states of all tokens at the last cut, while the layers get fewer
    mask: Tensor | None = None  # in the form that the layers of this stage expect
    tables: tuple[Tensor, ...] = ()  # (B, K, d), rotary tables of the tokens that the layers get
    embeds: Tensor | None = None  # (B, L, D), the decoder's input, if a method asks for it
    projected: Projected | None = None  # queries and keys of the layer that just ran, if the next cut asks for them
    last: int = 0  # the last layer that runs
    is_read_between_layers: bool = False  # every layer returns all tokens

    def to(self, device: torch.device) -> None:
        """Moves all tensors to the device of the next layer, for a model on several devices."""
        holders: list[Any] = [self] if self.images is None else [self, self.images, *self.images.groups]
        for holder in holders:
            for name, value in vars(holder).items():
                if isinstance(value, Tensor):
                    setattr(holder, name, value.to(device))
        self.tables = tuple(table.to(device) for table in self.tables)
        self.projected = None if self.projected is None else Projected(*(each.to(device) for each in self.projected))
        self.device = device

    def shorten(self, x: Tensor) -> Tensor:
        """The states (B, L, D) of the tokens that the layers get, (B, K, D). The others are kept for `restore`."""
        if self.at is None:
            return x
        self.whole = x
        return gather_rows(x, self.at)

    def restore(self, x: Tensor) -> Tensor:
        """The states (B, L, D) of all tokens, from those that the layers got; a dropped token has its last state."""
        if self.whole is None:
            return x
        assert self.at is not None
        whole, self.whole = self.whole.to(x.device), None
        index = flat_index(self.at.to(x.device), whole.shape[1])
        return whole.flatten(0, 1).index_copy(0, index, x.flatten(0, 1).to(whole.dtype)).view_as(whole)

    def short_positions(self, at: Tensor, rows: Tensor) -> Tensor:
        """Where the tokens at positions (G, N) of these rows are among those that the layers got: (G, N)."""
        return at if self.at is None else torch.searchsorted(self.at[rows], at)


@dataclass
class VisionTokens:
    """The vision tokens of a pass, and the other tokens of their sequences."""

    groups: list[ImageGroup]
    left: Tensor  # (B, L), new tokens that have not been dropped
    question: Tensor  # (B, L), tokens of the question
    n_question: int  # tokens of the longest question
    n_others: list[int]  # for each sequence, tokens that are neither padding nor vision tokens
    end_with_image: bool  # the last token of a prompt is a vision token, which may be dropped
    packed: tuple[Tensor, Tensor] | None = None  # (B, T) each: positions of the question, packed to the left, and its mask

    def counts(self) -> list[int]:
        """How many tokens of each sequence are left."""
        counts = list(self.n_others)
        for group in self.groups:
            for row in group.sequences:
                counts[row] += group.at.shape[1]
        return counts

    def question_positions(self) -> tuple[Tensor, Tensor]:
        """Where the tokens of each question are, packed to the left, (B, T); and which of them are no padding, (B, T)."""
        if self.packed is None:
            order = question_order(self.question, self.n_question)
            self.packed = order, self.question.gather(1, order)
        return self.packed

    def question_of(self, x: Tensor) -> Question:
        """The questions among the states (B, L, D)."""
        order, mask = self.question_positions()
        return Question(gather_rows(x, order.to(x.device)), mask.to(x.device))

    def last_of_question(self) -> Tensor:
        """The position of the last token of each question, (B,)."""
        return self.question.int().cumsum(1).argmax(1)


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


class Probe(NamedTuple):
    """A token of the image features: its position, and its values."""

    position: int  # of all placeholders; negative: counted from the end
    values: Tensor  # (E,)


def make_probes(features: Sequence[Tensor], kept: Sequence[Tensor] | None, lengths: Sequence[int]) -> tuple[Probe, Probe]:
    """The first and the last token of the features (K, E) of some images. Repeated for beams, they stay first and last."""
    first, last = features[0][0].detach(), features[-1][-1].detach()
    if kept is None:
        return Probe(0, first), Probe(-1, last)
    return Probe(int(kept[0][0]), first), Probe(int(kept[-1][-1]) - lengths[-1], last)


def check_features(features: Tensor, computed: ImageFeatures | None) -> None:
    """Raises a UserError unless these are the features computed last, once or several times (beams)."""
    if computed is None:
        raise UserError("the image features were computed before the plan was attached; pass pixel values instead")
    flat = features.detach().flatten(0, -2)
    same = len(flat) % sum(computed.lengths) == 0
    if not same or not all(_is_same(flat[probe.position], probe.values) for probe in computed.probes):
        raise UserError("the image features are not those computed last; pass pixel values with every call")


def _is_same(feature: Tensor, known: Tensor) -> bool:
    """Whether a token is the known one, maybe in another precision."""
    known = known.to(feature.device)
    if feature.dtype == known.dtype and torch.equal(feature, known):
        return True
    return torch.allclose(feature.float(), known.float(), rtol=1e-2, atol=1e-6, equal_nan=True)


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
        numbers, sequences, places = (list(column) for column in zip(*members, strict=True))
        rows, at = (torch.tensor(column, device=image_mask.device) for column in (sequences, places))
        if features.kept is not None:
            at = at.gather(1, torch.stack([features.kept[image] for image in numbers]).to(at.device))
        sizes = None if features.sizes is None else features.sizes[numbers][:, : at.shape[1]]
        groups.append(ImageGroup(numbers, sequences, rows, at, sizes, entered=at))
    return groups


def longest(mask: Tensor) -> int:
    """The number of marked tokens of the row (B, L) that has most of them."""
    return int(mask.sum(1).amax()) if len(mask) else 0


def question_order(mask: Tensor, most: int) -> Tensor:
    """Where the marked tokens of each row are, at most so many, packed to the left: (B, L) -> (B, T)."""
    return (~mask).int().argsort(dim=1, stable=True)[:, : max(1, most)]
