"""The state of one call of a vision-language model: its image features, its prompt, and the decoder pass under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokensieve.core import Question, frame_numbers
from tokensieve.cutting.cache import Stage
from tokensieve.errors import UserError
from tokensieve.models.decoder import Projected
from tokensieve.models.image_grid import ImageTokens
from tokensieve.models.sight import LayerKind
from tokensieve.scoring import flat_index, gather_rows


@dataclass
class ImageFeatures:
    """The features of images, or of videos, that a call computed last. A video is one image here."""

    lengths: list[int]  # tokens of each image, counted like the placeholders in the sequence
    probes: tuple[Probe, Probe]  # the first and the last token, which identify them
    kept: Sequence[Tensor] | None = None  # (K,) for each image, placeholders with a token, in the order of tokens; None: all
    sizes: Tensor | None = None  # (I, K), number of patches merged into each of them; None: one each
    grids: Sequence[tuple[int, ...] | None] = ()  # of each image, `View.grid` of its tokens; empty: unknown
    frames: Sequence[Tensor] | None = None  # (K,) for each video that was cut: the frame of each token; None: see grids
    stays: Sequence[Tensor] | None = None  # (S,) for each image, placeholders of tokens that no method sees: they stay
    first: int = 0  # the number of the first of them among the images of the pass


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
    grid: tuple[int, ...] | None = None  # of its tokens, while none is missing
    frames: Tensor | None = None  # (G, N), of videos: the frame of each token
    stays: Tensor | None = None  # (G, S), positions of tokens that stay
    carried: dict[str, Tensor] = field(default_factory=dict)  # by step: (G, N), what its method carries from cut to cut

    @property
    def n_now(self) -> int:
        """The tokens that a budget counts."""
        return self.at.shape[1] if self.count is None else self.count

    @property
    def first(self) -> int:
        """The tokens before any cut in the decoder."""
        return self.at.shape[1] if self.entered is None else self.entered.shape[1]

    def of_images(self, picked: list[int]) -> ImageGroup:
        """Some images of the group, with all their tokens."""
        return replace(self.select(picked, self.at.shape[1]), grid=self.grid)

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
            frames=part(self.frames),
            carried={name: values[picked, :count] for name, values in self.carried.items()},
        )


@dataclass
class DecoderPass:
    """One forward pass of the decoder. Counts are known as numbers, so that no layer has to wait for a tensor."""

    shape: tuple[int, int]  # B, L of the new tokens
    device: torch.device
    past: Tensor | None = None  # (B, P), False where earlier tokens are padding; None: none is
    real: Tensor | None = None  # (B, L), False where new tokens are padding; None: none is
    blocks: Tensor | None = None  # (B, L), new tokens of one block (a number from 0 on) see each other; None: there are none
    n_before: int = 0  # tokens of earlier passes, with those that were dropped
    images: VisionTokens | None = None  # None: nothing is cut in this pass, since it has no image
    bias: Tensor | None = None  # (B, L), log of sizes and of soft masks so far
    next_layer: int = 0  # the layer that is to run next, behind the first cut
    is_in_layer: bool = False  # a layer behind a cut is running
    at: Tensor | None = None  # (B, K), positions of the tokens that the layers get; None: all
    whole: Tensor | None = None  # (B, L, D), states of all tokens at the last cut, while the layers get fewer
    stage: Stage | None = None  # the tokens that the layers get and those in their caches
    masks: dict[LayerKind, Tensor | None] = field(default_factory=dict)  # in the form that the layers of this stage expect
    tables: dict[LayerKind, tuple[Tensor, ...]] = field(default_factory=dict)  # (B, K, d), rotary, of the tokens they get
    embeds: Tensor | None = None  # (B, L, D), the decoder's input, if a method asks for it
    projected: Projected | None = None  # queries and keys of the layer that just ran, if the next cut asks for them
    last: int = 0  # the last layer that runs
    layers_read: int = 0  # so many first layers return all tokens, because somebody reads their states

    def to(self, device: torch.device) -> None:
        """Moves all tensors to the device of the next layer, for a model on several devices."""
        holders: list[Any] = [self] if self.images is None else [self, self.images, *self.images.groups]
        for holder in holders:
            for name, value in vars(holder).items():
                if isinstance(value, Tensor):
                    setattr(holder, name, value.to(device))
        if self.stage is not None:
            self.stage = self.stage.to(device)
        self.masks = {kind: None if mask is None else mask.to(device) for kind, mask in self.masks.items()}
        self.tables = {kind: tuple(table.to(device) for table in tables) for kind, tables in self.tables.items()}
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
    n_others: list[int]  # for each sequence, tokens that are neither padding nor vision tokens that can be cut
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

    features: dict[str, ImageFeatures] = field(default_factory=dict)  # by medium
    are_used: bool = False  # a pass has started with these features: those of another medium that follow do not join them
    has_new_features: bool = False  # this call computed them, not an earlier one
    is_computing: bool = False  # features are being computed
    layouts: list[ImageTokens] = field(default_factory=list)  # of images whose tiles are the rows of the tower's batch
    packed: list[Tensor] = field(default_factory=list)  # (N, 2) of each of them: whether a token was kept, and its size
    prompt: Prompt | None = None
    prompt_length: int | None = None  # tokens of the prompt, inside generate()
    labels: Tensor | None = None  # (B, L): tokens with a label are the answer, not the question
    image_masks: dict[str, Tensor] = field(default_factory=dict)  # by medium: (B, L), placeholders of the next pass
    arguments: Mapping[str, Any] | None = None  # of the model that puts features into the sequence, until the decoder runs
    run: DecoderPass | None = None  # the pass under way
    expects_step: bool = False  # generate() has prepared the inputs of its next step

    def question_mask(self, context: Mapping[str, Any], real: Tensor, image_mask: Tensor) -> Tensor:
        """Tokens of the question: context["question"], or else the text of the prompt. (B, L)

        image_mask: (B, L), tokens that are no text of the prompt.
        """
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
    """The first and the last token of the features (N, E) of some images, of those at the placeholders kept (K,). Repeated for
    beams, they stay first and last."""
    first, last = (0, lengths[-1] - 1) if kept is None else (int(kept[0][0]), int(kept[-1][-1]))
    return Probe(first, features[0][first].detach()), Probe(last - lengths[-1], features[-1][last].detach())


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


def find_prompts(counts: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The prompt that each image is in. counts: placeholders of each prompt; lengths: of each image."""
    if sum(counts) != sum(lengths):
        raise UserError(f"the prompts have {sum(counts)} placeholders, but their {len(lengths)} images {sum(lengths)} tokens")
    rows, row, left = [], -1, 0
    for length in lengths:
        while not left:
            row, left = row + 1, counts[row + 1]
        if length > left:
            raise UserError("the tokens of an image are split between two prompts; give every prompt whole images")
        rows.append(row)
        left -= length
    return rows


def group_images(image_mask: Tensor, features: ImageFeatures) -> list[ImageGroup]:
    """Groups the images of a pass by grid, number of placeholders in image_mask (B, L), and number of those with a token."""
    counts: list[int] = image_mask.sum(1).tolist()
    times, rest = divmod(sum(counts), sum(features.lengths))  # beams repeat every row and its images
    assert not rest and len(counts) % times == 0
    positions = image_mask.nonzero()[:, 1].tolist()  # row by row
    by_shape: dict[tuple[int, int, int, tuple[int, ...] | None], list[tuple[int, int, list[int]]]] = {}
    image = done = 0
    for row, count in enumerate(counts):
        if row % times == 0:
            first = image  # of this prompt
        image, until = first, done + count
        while done < until:
            n = features.lengths[image]
            left = n if features.kept is None else len(features.kept[image])
            grid = features.grids[image] if features.grids else None
            n_stay = 0 if features.stays is None else len(features.stays[image])
            by_shape.setdefault((n, left, n_stay, grid), []).append((image, row, positions[done : done + n]))
            image, done = image + 1, done + n
        if done != until:
            raise UserError("the tokens of an image are split between two prompts; give every prompt whole images")
    groups = []
    for (*_, grid), members in by_shape.items():
        numbers, sequences, places = (list(column) for column in zip(*members, strict=True))
        rows, every = (torch.tensor(column, device=image_mask.device) for column in (sequences, places))
        kept, stays = (
            None if chosen is None else every.gather(1, torch.stack([chosen[image] for image in numbers]).to(every.device))
            for chosen in (features.kept, features.stays)
        )
        at = every if kept is None else kept
        group = ImageGroup([features.first + image for image in numbers], sequences, rows, at, entered=at, stays=stays)
        group.sizes = None if features.sizes is None else features.sizes[numbers][:, : at.shape[1]]
        group.grid = grid
        if grid is not None:
            group.frames = frame_numbers(grid, len(at), at.device)
        elif features.frames is not None:
            group.frames = torch.stack([features.frames[image] for image in numbers]).to(at.device)
        groups.append(group)
    return groups


def longest(mask: Tensor) -> int:
    """The number of marked tokens of the row (B, L) that has most of them."""
    return int(mask.sum(1).amax()) if len(mask) else 0


def question_order(mask: Tensor, most: int) -> Tensor:
    """Where the marked tokens of each row are, at most so many, packed to the left: (B, L) -> (B, T)."""
    return (~mask).int().argsort(dim=1, stable=True)[:, : max(1, most)]
