"""Batches of the objects of a split as they are compared in a test, without changes at random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from tokensieve.data.images import BrokenImage
from tokensieve.errors import UserError
from tokensieve.reid import data as reid_data
from tokensieve.reid.batches import Plain, inputs_of

Inputs = dict[str, Tensor]
KEYS = {  # flags of the commands: keys of the configuration file
    "--pretrained": "PRETRAINED",
    "--model": "TRANSFORMER_TYPE",
    "--dataset_root": "DATASETS.ROOT_DIR",
}


@contextmanager
def named(key: str) -> Iterator[None]:
    """Error messages begin with the key of the configuration file that caused them."""
    try:
        yield
    except UserError as error:
        message = reduce(lambda text, flag: text.replace(*flag), KEYS.items(), str(error))
        raise UserError(f"{key}: {message}") from error


@contextmanager
def named_model(key: str) -> Iterator[None]:
    """Error messages about a model name the key of the configuration file instead of --model."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{key}: {str(error).removeprefix('--model ')}") from None


class Views(Dataset[tuple[list[int], Inputs]]):
    """Item i is the i-th batch of these objects, as they are looked at in a test; what cannot be read is not in it."""

    def __init__(self, found: reid_data.ReidData, plain: Plain, numbers: list[int], size: int, keep_in_memory: bool) -> None:
        self.found, self.plain = found, plain
        self.batches = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        self._kept: dict[int, dict[str, np.ndarray]] | None = {} if keep_in_memory else None

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[list[int], Inputs]:
        numbers, objects = [], []
        for number in self.batches[index]:
            try:
                images = self._read(number)
            except BrokenImage:
                continue
            numbers.append(number)
            objects.append({modality: self.plain.normalised(pixels) for modality, pixels in images.items()})
        cameras = [self.found.shots[number].camera for number in numbers]
        return numbers, inputs_of(objects, cameras) if numbers else {}

    def _read(self, number: int) -> dict[str, np.ndarray]:
        """The images of an object, resized; of one that is kept, as they were read before."""
        known = None if self._kept is None else self._kept.get(number)
        if known is None:
            known = {modality: self.plain.resized(image) for modality, image in self.found.read(number).items()}
            if self._kept is not None:
                self._kept[number] = known
        return known
