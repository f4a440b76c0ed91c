"""Batches to learn re-identification from: P identities x K shots, every shot in all its modalities, altered in the same way.

Batch i is a function of the seed and i alone, so a run can be stopped anywhere and resumed, in one process or several.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from tokensieve.data.images import BrokenImage
from tokensieve.errors import UserError
from tokensieve.reid.data import ReidData

HALF = (0.5, 0.5, 0.5)
ERASED = (0.02, 1 / 3)  # share of the image
ASPECT = (math.log(0.3), -math.log(0.3))  # height by width of what is erased, as a logarithm
TRIES = 10  # to find a box that fits
_ORDER, _CHANGES, _MODALITIES = 1, 2, 3  # one stream of random numbers each


class Plain:
    """Images as they are, resized (bicubic) and normalised: for evaluation."""

    def __init__(self, size: tuple[int, int], mean: Sequence[float] = HALF, std: Sequence[float] = HALF) -> None:
        self.size, self.mean, self.std = size, tuple(mean), tuple(std)
        self._scale = (1 / (255 * torch.tensor(self.std))).view(3, 1, 1)
        self._shift = (-torch.tensor(self.mean) / torch.tensor(self.std)).view(3, 1, 1)

    def __call__(self, images: Mapping[str, Image.Image]) -> dict[str, Tensor]:
        return {modality: self.normalised(self.resized(image)) for modality, image in images.items()}

    def resized(self, image: Image.Image) -> np.ndarray:
        """(h, w, 3), uint8."""
        height, width = self.size
        return np.asarray(image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BICUBIC))

    def normalised(self, pixels: np.ndarray) -> Tensor:
        """(h, w, 3), uint8 -> (3, h, w), float."""
        channels = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
        return channels.float().mul_(self._scale).add_(self._shift)


class Augment(Plain):
    """For training: flip, pad with black and crop, the same for all modalities of an object; then erase a box in each.

    Flip and crop move pixels and must be the same, or the patches of the modalities no longer show the same place. Erasing
    moves nothing, and every modality has its own coin and box, as in the field: what glare, darkness or a warm wall hides in
    one modality is still there in the others, and that is what the model shall learn to look for.
    """

    def __init__(
        self,
        size: tuple[int, int],
        flip: float = 0.5,
        padding: int = 10,
        erasing: float = 0.5,
        mean: Sequence[float] = HALF,
        std: Sequence[float] = HALF,
    ) -> None:
        super().__init__(size, mean, std)
        self.flip, self.padding, self.erasing = flip, padding, erasing

    def __call__(self, images: Mapping[str, Image.Image], rng: np.random.Generator | None = None) -> dict[str, Tensor]:
        resized = {modality: self.resized(image) for modality, image in images.items()}
        return self.altered(resized, np.random.default_rng() if rng is None else rng)

    def altered(self, images: Mapping[str, np.ndarray], rng: np.random.Generator) -> dict[str, Tensor]:
        """Images of one object, of the right size, (h, w, 3) uint8 each, flipped, cropped, normalised and erased."""
        (height, width), padding = self.size, self.padding
        flipped = rng.random() < self.flip
        top, left = rng.integers(0, 2 * padding + 1, size=2)
        made = {}
        for modality, pixels in images.items():
            padded = np.zeros((height + 2 * padding, width + 2 * padding, 3), np.uint8)
            padded[padding : padding + height, padding : padding + width] = pixels[:, ::-1] if flipped else pixels
            made[modality] = self._erase(self.normalised(padded[top : top + height, left : left + width]), rng)
        return made

    def _erase(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        """Noise in a box, or nothing. (3, h, w), changed in place."""
        if rng.random() >= self.erasing:
            return image
        height, width = self.size
        for _ in range(TRIES):
            area, aspect = rng.uniform(*ERASED) * height * width, math.exp(rng.uniform(*ASPECT))
            high, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < high < height and 0 < wide < width:
                top, left = rng.integers(0, height - high + 1), rng.integers(0, width - wide + 1)
                noise = torch.from_numpy(rng.standard_normal((3, high, wide), dtype=np.float32))
                image[:, top : top + high, left : left + wide] = noise
                break
        return image


Batch = tuple[dict[str, Tensor], Tensor, list[str]]


class Balanced(Dataset[Batch]):
    """Item i is this process's share of batch `start + i`: (named inputs, labels (B,), what could not be read).

    As the field samples: in an epoch the shots of an identity are shuffled and dealt in groups of K (one with fewer than K
    shots is one group, with repetitions), and a batch is the next group of each of P different identities. What does not fill
    a group or a batch waits for another epoch. The field's own sampler ends an epoch when fewer than P identities are left;
    here identities with many groups are drawn in time, so that every epoch has the same length, `steps_per_epoch`.

    Labels are the places of the identities in `data.pids`. An image that cannot be read is replaced by another shot of the same
    identity, and listed. No inputs: an identity has no shot that can be read; the last message names it. (Nothing is
    raised, since what a worker raises comes with its traceback in the message.)

    With several processes each has P / world of the identities of a batch, K shots of each.
    drop: the probability with which each modality is missing in a batch, in all processes alike; one at least stays.
    keep_in_memory: hold all images, decoded and resized (h x w x 3 bytes for each), in each worker that reads them.
    """

    def __init__(
        self,
        data: ReidData,
        transform: Augment,
        *,
        identities: int,
        shots: int,
        seed: int,
        stop: int,
        start: int = 0,
        rank: int = 0,
        world: int = 1,
        drop: float = 0.0,
        modalities: Sequence[str] | None = None,
        keep_in_memory: bool = False,
    ) -> None:
        if identities > data.identities:
            raise UserError(
                f"a batch of {identities} identities cannot be drawn from the {data.identities} of {data.name} ({data.split}): "
                f"ask for {data.identities} or fewer."
            )
        if identities % world:
            raise UserError(
                f"{identities} identities of a batch cannot be shared by {world} processes: ask for a multiple of {world}."
            )
        self.data, self.transform, self.identities, self.shots = data, transform, identities, shots
        self.seed, self.start, self.stop, self.rank, self.world, self.drop = seed, start, stop, rank, world, drop
        self.modalities = data.modalities if modalities is None else tuple(modalities)
        labels = {pid: label for label, pid in enumerate(data.pids)}
        self.members: list[list[int]] = [[] for _ in data.pids]  # label: its shots
        for index, shot in enumerate(data.shots):
            self.members[labels[shot.pid]].append(index)
        groups = np.array([max(1, len(members) // shots) for members in self.members])
        self.steps_per_epoch = int(groups.sum()) // identities
        while np.minimum(groups, self.steps_per_epoch).sum() < self.steps_per_epoch * identities:
            self.steps_per_epoch -= 1  # an identity can be in a batch once only
        self.groups = np.minimum(groups, self.steps_per_epoch)
        self._epoch: tuple[int, list[list[tuple[int, np.ndarray]]]] = (-1, [])
        self._kept: dict[tuple[int, str], np.ndarray] | None = {} if keep_in_memory else None

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, offset: int) -> Batch:
        if not 0 <= offset < len(self):
            raise IndexError(offset)
        index = self.start + offset
        share = self.identities // self.world
        modalities = self.present(index)
        samples, chosen, labels = [], [], []
        broken: list[str] = []
        for place, (label, shots) in list(enumerate(self.drawn(index)))[self.rank * share : (self.rank + 1) * share]:
            for number, shot in enumerate(shots, place * self.shots):
                rng = np.random.default_rng([self.seed, index, number, _CHANGES])
                taken, images = self._read(int(shot), label, modalities, rng, broken)
                if images is None:
                    return {}, torch.tensor([], dtype=torch.int64), broken
                samples.append(self.transform.altered(images, rng))
                chosen.append(taken)
                labels.append(label)
        return inputs_of(samples, [self.data.shots[i].camera for i in chosen]), torch.tensor(labels), broken

    def drawn(self, index: int) -> list[tuple[int, np.ndarray]]:
        """The P identities (labels) of a whole batch, each with the numbers of its K shots."""
        epoch, place = divmod(index, self.steps_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._plan(epoch))
        return self._epoch[1][place]

    def present(self, index: int) -> tuple[str, ...]:
        """The modalities of a whole batch."""
        rng = np.random.default_rng([self.seed, index, _MODALITIES])
        draws = rng.random(len(self.modalities))
        stays = (draws >= self.drop) | (draws == draws.max())
        return tuple(modality for modality, here in zip(self.modalities, stays, strict=True) if here)

    def _plan(self, epoch: int) -> list[list[tuple[int, np.ndarray]]]:
        """All batches of an epoch."""
        rng = np.random.default_rng([self.seed, epoch, _ORDER])
        orders = [rng.permutation(members) for members in self.members]
        left = self.groups.copy()  # how many groups each identity has still to give
        for _ in range(int(left.sum()) - self.steps_per_epoch * self.identities):  # too few for a batch: from those with most
            left[np.argmax(left + rng.random(len(left)))] -= 1
        batches = []
        for steps in range(self.steps_per_epoch, 0, -1):
            # at random among those with a group left; but who has one for every step to come must be in this one
            wish = rng.random(len(left)) + (left == steps) - 2 * (left == 0)
            batch = np.argsort(-wish, kind="stable")[: self.identities]
            batches.append([(int(label), self._deal(orders[label], left[label] - 1)) for label in batch])
            left[batch] -= 1
        return batches

    def _deal(self, order: np.ndarray, group: int) -> np.ndarray:
        """Group number `group` of a shuffled identity; it begins again from the start if it has fewer than K shots."""
        return np.resize(order, max(self.shots, len(order)))[group * self.shots : (group + 1) * self.shots]

    def _read(
        self, shot: int, label: int, modalities: Sequence[str], rng: np.random.Generator, broken: list[str]
    ) -> tuple[int, dict[str, np.ndarray] | None]:
        """A shot and its images; if they cannot be read, another of the same identity; None if there is no other."""
        try:
            return shot, self._images(shot, modalities)
        except BrokenImage as error:
            broken.append(str(error))
        for other in rng.permutation([i for i in self.members[label] if i != shot]):
            try:
                return int(other), self._images(int(other), modalities)
            except BrokenImage:
                continue
        broken.append(
            f"{self.data.name} ({self.data.split}): none of the {len(self.members[label])} shots of identity "
            f"{self.data.pids[label]} can be read ({broken[-1]}); mend its files, or take them out"
        )
        return shot, None

    def _images(self, shot: int, modalities: Sequence[str]) -> dict[str, np.ndarray]:
        """Decoded and resized."""
        if self._kept is None:
            return {m: self.transform.resized(image) for m, image in self.data.read(shot, modalities).items()}
        if missing := [m for m in modalities if (shot, m) not in self._kept]:
            for m, image in self.data.read(shot, missing).items():
                self._kept[shot, m] = self.transform.resized(image)
        return {m: self._kept[shot, m] for m in modalities}


def inputs_of(samples: Sequence[Mapping[str, Tensor]], cameras: Sequence[int]) -> dict[str, Tensor]:
    """Objects with the same modalities, (3, h, w) each, as named inputs of a batch: (B, 3, h, w) each, and the cameras (B,)."""
    if len({frozenset(sample) for sample in samples}) != 1:
        raise ValueError("the objects of a batch must all have the same modalities")
    inputs = {modality: torch.stack([sample[modality] for sample in samples]) for modality in samples[0]}
    return {**inputs, "cameras": torch.tensor(list(cameras), dtype=torch.int64)}
