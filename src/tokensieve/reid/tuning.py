"""Re-identification models in `tokensieve tune`: features of objects, and whom each object is most similar to."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tokensieve.data.images import BrokenImage, decode
from tokensieve.data.source import Inputs
from tokensieve.errors import UserError
from tokensieve.reid import data as reid_data
from tokensieve.reid.batches import inputs_of
from tokensieve.reid.data import ReidData
from tokensieve.reid.layouts import MODALITIES
from tokensieve.reid.loading import OURS
from tokensieve.reid.own import holds_objects, layout_of
from tokensieve.reid.scan import eight_bits
from tokensieve.reid.task import VAL_IDENTITIES
from tokensieve.tasks.fidelity.measures import cosine_distance, rank_correlation, same_nearest
from tokensieve.tuning.images import ImageSet, draw_numbers, read_again, select_from, select_readable
from tokensieve.tuning.subject import Subject

DATASET = "embedded-reid"


class ObjectFeatures(Subject):
    """The cosine of features; how often the nearest other object is the same; the correlation of whole rankings.

    Of files: folder: or csv: data of objects; a folder with the folders RGB, NI and TI (or some of them), which hold the images
    of an object under one name; or plain images, which are taken as RGB.
    """

    unit = "object"

    def shipped(self) -> ImageSet | None:
        if self.request.model not in OURS:
            return None
        self.shots: ReidData = reid_data.load(DATASET, split="val", val_identities=VAL_IDENTITIES)
        return draw_numbers(f"{DATASET} (val)", len(self.shots), self.request)

    def find_files(self) -> ImageSet:
        assert self.request.images is not None
        if any(map(holds_objects, self.request.images)):
            return self._find_objects(self.request.images)
        folders = [Path(text).expanduser() for text in self.request.images]
        self.modalities = [name for name in MODALITIES if any((folder / name).is_dir() for folder in folders)]
        if self.modalities and len(folders) > 1:
            raise UserError("--images: of folders with a folder for each modality give one")
        if not self.modalities:
            self.modalities, inner = [MODALITIES[0]], self.request.images
        else:
            inner = [str(folders[0] / self.modalities[0])]
        return select_from(inner, self.request, self._read)

    def _find_objects(self, names: Sequence[str]) -> ImageSet:
        """The readable objects of folder: or csv: data, as indices."""
        if len(names) > 1:
            raise UserError(f"--images {names[0]} {names[1]}: of objects give one data set")
        has_train = "train" in layout_of(names[0]).splits
        split = "train" if has_train else "gallery"  # test splits choose nothing, where there are others
        self.shots = reid_data.load(names[0], split=split, whole=False)
        common = [name for name in MODALITIES if any(name in shot.files for shot in self.shots.shots)]
        self.modalities, self.shots = common, reid_data.load(names[0], split=split, modalities=common)
        found = select_readable([str(n) for n in range(len(self.shots))], self.request, lambda n: self.shots.read(int(n)))
        items = [int(number) for number in found.items]
        remark = f"the plan was chosen on {names[0]}: the split train" if has_train else ""
        return replace(found, items=items, fingerprint=self.shots.fingerprint, remark=remark)

    def _read(self, file: str) -> dict[str, Image.Image]:
        """The images of an object by modality, from the file of the first one; BrokenImage if one is missing or damaged."""
        first, *others = self.modalities
        made = {first: decode(file, eight_bits)}
        path = Path(file)
        for name in others:
            matches = sorted((path.parent.parent / name).glob(f"{glob.escape(path.stem)}.*"))
            if not matches:
                raise BrokenImage(f"there is no image of {name}")
            made[name] = decode(matches[0], eight_bits)
        return made

    def batch(self, start: int, stop: int) -> Inputs:
        items = self.images.items[start:stop]
        transform: Any = self.loaded.transform
        if isinstance(items[0], int):
            modalities = self.loaded.model.modalities if self.request.images is None else self.modalities
            samples = [transform(self.shots.read(item, modalities)) for item in items]
            return inputs_of(samples, [self.shots.shots[item].camera for item in items])
        samples = [transform(read_again(item, self._read)) for item in items]
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def run(self, model: Any, inputs: Inputs) -> Tensor:
        assert not isinstance(inputs, Tensor)
        features: Tensor = model.encode(inputs)
        return features

    def compare(self, full: Tensor, reduced: Tensor) -> dict[str, Tensor]:
        return {
            "distance": cosine_distance(full, reduced),
            "nearest": same_nearest(full, reduced),
            "rank_correlation": rank_correlation(full, reduced),
        }

    def about(self) -> Mapping[str, Any]:
        return {} if self.request.images is None else {"modalities": self.modalities}
