"""The data set that ships: scenes drawn on the fly, in splits that share no scene.

A sample is made from (split's seed, index), so nothing is stored and every machine sees the same pictures. Classes are
all 80 pairs of colour and shape; some of them no training picture shows (`pairs="heldout"`), and the candidates are always
all 80, so that a held-out pair has to be found among everything the model knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from tokensieve.embedded import scene_texts
from tokensieve.embedded.clip_texts import ask_clip
from tokensieve.embedded.clips import Clip
from tokensieve.embedded.scenes import HELD_OUT, PAIRS, SEEN, Scene, name_of, render, several, single
from tokensieve.errors import UserError, did_you_mean

SPLITS = ("train", "val", "test")
TEMPLATES = (
    "a {c}",
    "a picture of a {c}",
    "there is a {c} here",
    "a noisy image of a {c}",
    "a {c} in a cluttered scene",
    "this is a drawing of the {c}",
)
_SEEDS = {"val": 2, "test": 3}
_FIRST_TRAIN_SEED = 1000
_LENGTHS = {("train", "seen"): 40_000, ("val", "seen"): 2_000, ("test", "seen"): 4_000}
_HELD_OUT_LENGTHS = {"val": 1_000, "test": 2_000}
_HELD_OUT_START = 10_000_000  # the same seed's far end, so that seen and held-out pictures differ in more than the pair


def split_seed(split: str, run: int = 0) -> int:
    """The seed of a split's scenes. Training runs with different seeds see different scenes, never those of val or test."""
    if split not in SPLITS:
        known = ", ".join(SPLITS)
        raise UserError(f"no split {split!r} of the embedded data; there are: {known}.{did_you_mean(split, SPLITS)}")
    return _FIRST_TRAIN_SEED + run if split == "train" else _SEEDS[split]


class EmbeddedScenes(Dataset[tuple[Any, int]]):
    """One object a picture, to be classified: (image, index into `classes`). Classes take turns, so they are balanced."""

    def __init__(self, split: str = "test", pairs: str = "seen", transform: Callable[[Image.Image], Any] | None = None) -> None:
        self.seed = split_seed(split)
        if pairs not in ("seen", "heldout"):
            raise UserError(f"pairs={pairs!r}: allowed are 'seen' and 'heldout'")
        if split == "train" and pairs == "heldout":
            raise UserError("held-out pairs are never in the training split; use the split 'val' or 'test'")
        self.pairs = SEEN if pairs == "seen" else HELD_OUT
        self.start = 0 if pairs == "seen" else _HELD_OUT_START
        self.length = _LENGTHS[split, "seen"] if pairs == "seen" else _HELD_OUT_LENGTHS[split]
        self.transform = transform
        self.classes = [name_of(pair) for pair in PAIRS]
        self.templates = list(TEMPLATES)

    def __len__(self) -> int:
        return self.length

    def scene(self, index: int) -> Scene:
        return single(self.seed, self.start + index, self.pairs[index % len(self.pairs)])

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        image = Image.fromarray(render(self.scene(index)))
        label = PAIRS.index(self.pairs[index % len(self.pairs)])
        return (self.transform(image) if self.transform else image), label


_CAPTIONS_START, _QUESTIONS_START, _SELECTION_START, _CLIPS_START = 20_000_000, 30_000_000, 40_000_000, 50_000_000


class EmbeddedCaptions(Dataset[tuple[Any, list[str]]]):
    """Several objects a picture, with a caption from each one's position that names all: (image, captions)."""

    def __init__(self, split: str = "test", transform: Callable[[Image.Image], Any] | None = None, length: int = 1_000) -> None:
        self.seed, self.transform, self.length = split_seed(split), transform, length
        self.pairs = SEEN if split == "train" else PAIRS

    def __len__(self) -> int:
        return self.length

    def scene(self, index: int) -> Scene:
        return several(self.seed, _CAPTIONS_START + index, self.pairs)

    def __getitem__(self, index: int) -> tuple[Any, list[str]]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        scene = self.scene(index)
        image = Image.fromarray(render(scene))
        return (self.transform(image) if self.transform else image), scene_texts.captions(scene)


class EmbeddedSelection(Dataset[tuple[Any, list[str]]]):
    """Two pictures alike in all but one thing, and two captions, the i-th true of the i-th picture only: (images, captions).

    What differs takes turns (scenes.DIFFERENCES): two objects have each other's colour, or each other's place, or one object is
    another. With a transform the images are one tensor (2, 3, h, w). By chance image_acc and text_acc are 1/4, acc is 1/6.
    """

    def __init__(self, split: str = "test", transform: Callable[[Image.Image], Any] | None = None, length: int = 1_200) -> None:
        self.seed, self.transform, self.length = split_seed(split), transform, length
        self.pairs = SEEN if split == "train" else PAIRS

    def __len__(self) -> int:
        return self.length

    def scenes(self, index: int) -> tuple[Scene, Scene]:
        difference = scene_texts.DIFFERENCES[index % len(scene_texts.DIFFERENCES)]
        return scene_texts.twins(self.seed, _SELECTION_START + index, difference, self.pairs)

    def __getitem__(self, index: int) -> tuple[Any, list[str]]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        both = self.scenes(index)
        images = [Image.fromarray(render(scene)) for scene in both]
        made = torch.stack([self.transform(image) for image in images]) if self.transform else images
        return made, [scene_texts.caption(scene) for scene in both]


class EmbeddedQuestions(Dataset[tuple[Any, scene_texts.Question]]):
    """Several objects a picture, with a question and its short answer: (image, question). Kinds of questions take turns.

    The objects are of the pairs that training shows; with `pairs="all"` of the held-out ones too.
    """

    def __init__(
        self,
        split: str = "test",
        pairs: str = "seen",
        transform: Callable[[Image.Image], Any] | None = None,
        length: int = 2_000,
    ) -> None:
        self.seed, self.transform, self.length = split_seed(split), transform, length
        if pairs not in ("seen", "all"):
            raise UserError(f"pairs={pairs!r}: allowed are 'seen' and 'all'")
        if split == "train" and pairs == "all":
            raise UserError("held-out pairs are never in the training split; use the split 'val' or 'test'")
        self.pairs = SEEN if pairs == "seen" else PAIRS

    def __len__(self) -> int:
        return self.length

    def ask(self, index: int) -> tuple[Scene, scene_texts.Question]:
        return scene_texts.ask(self.seed, _QUESTIONS_START + index, self.pairs)

    def __getitem__(self, index: int) -> tuple[Any, scene_texts.Question]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        scene, question = self.ask(index)
        image = Image.fromarray(render(scene))
        return (self.transform(image) if self.transform else image), question


class EmbeddedClips(Dataset[tuple[list[Image.Image], scene_texts.Question]]):
    """Clips of eight frames, each with a question and its short answer: (frames, question). Kinds of questions take turns."""

    def __init__(self, split: str = "test", length: int = 1_000) -> None:
        self.seed, self.length = split_seed(split), length

    def __len__(self) -> int:
        return self.length

    def ask(self, index: int) -> tuple[Clip, scene_texts.Question]:
        return ask_clip(self.seed, _CLIPS_START + index, SEEN)

    def __getitem__(self, index: int) -> tuple[list[Image.Image], scene_texts.Question]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        clip, question = self.ask(index)
        return [Image.fromarray(render(scene)) for scene in clip.scenes()], question


def as_batch(images: list[np.ndarray]) -> np.ndarray:
    """Pictures (H, W, 3) stacked as the models want them: uint8 (B, 3, H, W)."""
    return np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2))
