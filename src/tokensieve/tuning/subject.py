"""What is tuned: a model with images, and how a reduced model is compared with the full one. Model types declare theirs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tokensieve.data.source import Inputs
from tokensieve.errors import UserError
from tokensieve.models.loading.loaded import Loaded
from tokensieve.tuning.images import ImageSet, Request


class Subject(ABC):
    """Images for a model of one type, and the comparison with the full model.

    Made before the model is loaded, so that what is wrong with the images is known at once.
    """

    unit = "image"
    distance = "1 - cosine"  # the name of what is minimised: the first measure
    loaded: Loaded

    def __init__(self, request: Request) -> None:
        self.request = request
        self.images = self.find()

    def find(self) -> ImageSet:
        """The images of the request, or those that ship with the model."""
        if self.request.images is not None:
            return self.find_files()
        shipped = self.shipped()
        if shipped is None:
            raise UserError(f"--images is missing: give a folder of images to tune {self.request.model} on")
        return shipped

    @abstractmethod
    def shipped(self) -> ImageSet | None:
        """The images that ship with the model; None if it has none."""

    @abstractmethod
    def find_files(self) -> ImageSet:
        """The images that the request names."""

    def prepare(self, loaded: Loaded) -> None:
        """Takes the loaded model."""
        self.loaded = loaded

    @abstractmethod
    def batch(self, start: int, stop: int) -> Inputs:
        """The images from number `start` to before `stop` as the model takes them, on the CPU."""

    @abstractmethod
    def run(self, model: Any, inputs: Inputs) -> Tensor:
        """The outputs that are compared, (B, F). Its time and its operations are those of the plan."""

    @abstractmethod
    def compare(self, full: Tensor, reduced: Tensor) -> dict[str, Tensor]:
        """Measures by name, each (N,), of the outputs of the same images (N, F); the first is the distance to minimise."""

    def image_tokens(self, inputs: Inputs) -> int:
        """Patch tokens of one image, of models whose tower does not tell."""
        raise UserError(f"{type(self.loaded.model).__name__}: its tower cannot be opened")

    def about(self) -> Mapping[str, Any]:
        """What else belongs to the result."""
        return {}
