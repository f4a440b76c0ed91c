"""What the page does with the models of one type: their samples, what they say about an image, how they are called elsewhere.

A model type names its Subject (`ModelType.demo`). A Subject runs in one thread: plans are put on one model
in turn.
"""

from __future__ import annotations

import argparse
import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from tokensieve.cutting.handle import Handle
from tokensieve.drawing.band import Band
from tokensieve.drawing.geometry import Frame, find_frame
from tokensieve.drawing.sheet import Picture, draw
from tokensieve.models.loading.loaded import Loaded
from tokensieve.models.registry import open_tower, open_vlm
from tokensieve.models.tower import Tower
from tokensieve.parts.protocol import Weights

FULL = "all tokens"  # the model without a plan, on the page


@dataclass(frozen=True)
class ModelName:
    """A model as the command line names it."""

    model: str
    pretrained: str
    model_type: str

    @property
    def flags(self) -> list[str]:
        """What to type to name it."""
        words = ["--model", self.model, *(["--pretrained", self.pretrained] if self.pretrained else [])]
        return [*words, "--model_type", self.model_type]


@dataclass(frozen=True)
class Shown:
    """The images of one run, by slot, and where they come from."""

    images: Mapping[str, Image.Image]
    files: Mapping[str, str]  # the names of uploaded files by slot; none: it is a sample
    sample: int | None  # the number of the sample
    key: tuple[str, ...]  # equal for equal images

    @property
    def number(self) -> int:
        """The number within a run, which seeds random choices."""
        return 0 if self.sample is None else self.sample


class Subject(ABC):
    """The models of one type on the page."""

    kind: str  # how the page shows what the model says: texts, question or people
    dataset: str  # of its samples, as `show` names them
    samples: tuple[int, ...]  # their numbers in it
    plan: str  # to begin with
    prompt_label = ""  # of the text that goes with an image; "": there is none
    max_prompt = 0  # characters of it

    def __init__(self, loaded: Loaded, name: ModelName, weights: Weights = None) -> None:
        self.loaded, self.name, self.weights = loaded, name, weights
        self.model: Any = loaded.model
        self._frames: dict[tuple[str, ...], Frame] = {}

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def slots(self) -> tuple[str, ...]:
        """The images that the model takes together."""
        return ("image",)

    @property
    def tower(self) -> Tower | None:
        """The tower; None: only the language model can be cut, and where patches are in the image is not known."""
        vlm = open_vlm(self.model)
        return open_tower(self.model) if vlm is None else vlm.tower

    @property
    def depth(self) -> tuple[int, int]:
        """Blocks of the tower that can be cut, and layers of the decoder."""
        vlm, tower = open_vlm(self.model), self.tower
        blocks = 0 if tower is None or tower.no_blocks_reason else tower.depth
        return blocks, 0 if vlm is None else vlm.decoder.depth

    @abstractmethod
    def sample(self, number: int) -> Mapping[str, Image.Image]:
        """The images of a sample, by slot."""

    def prompt(self, number: int) -> str:
        """The text that goes with a sample."""
        return ""

    def check_prompt(self, prompt: str) -> str:
        """The text as it is used; a UserError if it cannot be."""
        return ""

    @abstractmethod
    def inputs(self, shown: Shown, prompt: str, copies: int = 1) -> Any:
        """What the model takes: so many copies of the images."""

    @abstractmethod
    def call(self, inputs: Any) -> Any:
        """One pass of the model, which is what is counted and timed."""

    def gflops(self, inputs: Any, handle: Handle) -> float:
        """GFLOPs of one image under a plan."""
        from tokensieve.measuring.flops import gflops

        with handle:
            return gflops(lambda: self.call(inputs))

    @abstractmethod
    def says(self, shown: Shown, prompt: str, handle: Handle) -> dict[str, Any]:
        """What the model says about the images under a plan. The handle's last pass is then that of these images."""

    def bands(self, shown: Shown, handle: Handle) -> dict[str, Band]:
        """What the handle's last pass did to each image."""
        from tokensieve.drawing.band import make_band

        image, tower = shown.images["image"], self.tower
        if tower is None:
            return {"image": make_band(handle, image, frame=Frame(0, 0, *image.size), name=self.title(shown))}
        frame = self._frames.get(shown.key)
        if frame is None:
            self._frames = {shown.key: find_frame(self.loaded.transform, image.size)}  # that of the last image is enough
            frame = self._frames[shown.key]
        return {"image": make_band(handle, image, frame=frame, grid=tower.grid, name=self.title(shown))}

    def picture(self, shown: Shown, bands: Sequence[Mapping[str, Band]]) -> Picture:
        """The picture to save: what every plan did."""
        return draw([band for one in bands for band in one.values()])

    def title(self, shown: Shown) -> str:
        """The name of the images in a picture."""
        return ", ".join(shown.files.values()) or f"{self.dataset}:{shown.sample}"

    def command(self, shown: Shown, prompt: str, plans: Sequence[str]) -> str:
        """What to type to draw the same picture."""
        words = [*self.show_words(shown), "--plan", plans[0], *(["--compare", *plans[1:]] if plans[1:] else [])]
        words += [*self.prompt_words(prompt), *self.name.flags]
        files = self.weights if isinstance(self.weights, list) else []
        return shlex.join(["tokensieve", "show", *words, *(["--weights", *map(str, files)] if files else [])])

    def show_words(self, shown: Shown) -> list[str]:
        """How `show` names the images."""
        return [*shown.files.values()] if shown.sample is None else [f"{self.dataset}:{shown.sample}"]

    def prompt_words(self, prompt: str) -> list[str]:
        """How `show` takes the text."""
        return []

    @abstractmethod
    def python(self, shown: Shown, prompt: str, plan: str) -> str:
        """Python lines that do the same with one plan."""

    def python_apply(self, plan: str) -> str:
        """The part of these lines that puts the plan on the model."""
        weights = f", weights={self.weights!r}" if self.weights else ""
        return f"tokensieve.apply(loaded.model, {plan!r}{weights}) as sieve"

    def python_load(self) -> str:
        """The part of these lines that loads the model."""
        name = self.name
        return f"loaded = loading.load({name.model!r}, {name.pretrained!r}, model_type={name.model_type!r})"


def find_models(args: argparse.Namespace) -> list[ModelName]:
    """The model that the flags name; without any, those that ship with the package."""
    from tokensieve import embedded
    from tokensieve.models import loading
    from tokensieve.models.loading.registry import type_of_name

    if args.model is None and args.pretrained is None and args.model_type is None:
        return [
            ModelName(embedded.MODEL, embedded.PRETRAINED, "open_clip"),
            ModelName(embedded.LLAVA, "", "vlm"),
            ModelName(embedded.REID, "", "reid"),
        ]
    model_type = type_of_name(args.model, args.model_type)
    models, weights = ([value] if value is not None else None for value in (args.model, args.pretrained))
    model, pretrained = loading.model_pairs(models, weights, None, model_type)[0]
    loading.check_model(model, pretrained, model_type)
    return [ModelName(model, pretrained, model_type)]
