"""Re-identification on the page of `demo`: the nearest people of a small gallery.

Samples and gallery are shots of the test set of the embedded people, drawn one by one: the whole set would take a minute.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tokensieve.cutting.handle import Handle
from tokensieve.data.images import decode
from tokensieve.demo.subject import Shown, Subject
from tokensieve.drawing.band import Band
from tokensieve.drawing.sheet import Picture
from tokensieve.embedded.people import camera as people_camera
from tokensieve.embedded.people.dataset import CAMERAS, DATASETS, QUALITY, shots
from tokensieve.reid import drawing, ranking
from tokensieve.reid.batches import inputs_of

NEAREST = 5
SHOTS = list(shots(DATASETS["embedded-reid"]["test"]))  # (pid, camera, shot) of the queries, in their order
QUERIES = (0, 121, 245, 366, 493, 605)
OTHERS = (49, 172, 311, 436, 557, 679)  # of the gallery, who are none of the queries


@lru_cache(maxsize=64)
def draw_shot(number: int) -> dict[str, Image.Image]:
    """The images of a query by modality, as the files of the data set hold them."""
    found = {}
    for modality, pixels in people_camera.draw(*SHOTS[number]).images.items():
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
        found[modality] = decode(io.BytesIO(file.getvalue()), lambda image: image.convert("RGB"))
    return found


def make_gallery() -> list[int]:
    """For every query a shot of the same person by another camera; and others."""
    matches = []
    for number in QUERIES:
        pid, camera, shot = SHOTS[number]
        matches.append(SHOTS.index((pid, (camera + 1) % CAMERAS, shot)))
    return [*matches, *OTHERS]


class People(Subject):
    """Re-identification models."""

    kind = "people"
    dataset = "embedded-reid"
    samples = QUERIES

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.plan = str(self.model.plan)
        self.gallery = make_gallery()
        self._features: dict[tuple[str, tuple[str, ...]], Tensor] = {}  # of the gallery, by plan and modalities

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(self.model.modalities)

    def sample(self, number: int) -> Mapping[str, Image.Image]:
        return {slot: draw_shot(number)[slot] for slot in self.slots}

    def inputs(self, shown: Shown, prompt: str, copies: int = 1) -> dict[str, Tensor]:
        inputs = self._batch([shown.images] * copies, [] if shown.sample is None else [SHOTS[shown.sample][1]] * copies)
        return inputs

    def _batch(self, objects: Sequence[Mapping[str, Image.Image]], cameras: Sequence[int]) -> dict[str, Tensor]:
        transform: Any = self.loaded.transform
        made = inputs_of([transform(images) for images in objects], cameras)
        if not cameras or 0 < self.model.settings.cameras < CAMERAS:
            del made["cameras"]
        return {name: value.to(self.device) for name, value in made.items()}

    def call(self, inputs: dict[str, Tensor]) -> Tensor:
        found: Tensor = self.model.encode(inputs)
        return found

    def says(self, shown: Shown, prompt: str, handle: Handle) -> dict[str, Any]:
        slots = tuple(shown.images)
        plan = str(handle.plan)
        far = self._features.get((plan, slots))
        if far is None:
            objects = [{slot: draw_shot(number)[slot] for slot in slots} for number in self.gallery]
            with handle, handle.call(samples=torch.tensor(self.gallery)):
                far = self.call(self._batch(objects, [SHOTS[number][1] for number in self.gallery])).float().cpu()
            while len(self._features) > 16:
                del self._features[next(iter(self._features))]
            self._features[plan, slots] = far
        with handle, handle.call(samples=torch.tensor([shown.number])):
            near = self.call(self.inputs(shown, prompt)).float().cpu()
        pid, camera = (-1, -1) if shown.sample is None else SHOTS[shown.sample][:2]
        order = ranking.order(
            near[0],
            far,
            query_id=pid,
            gallery_ids=[SHOTS[number][0] for number in self.gallery],
            query_group=camera,
            gallery_groups=[SHOTS[number][1] for number in self.gallery],
        )
        people = []
        for row, is_match, distance in list(zip(*(column.tolist() for column in order), strict=True))[:NEAREST]:
            number = self.gallery[row]
            people.append({"sample": number, "name": f"person {SHOTS[number][0]}", "distance": distance, "match": is_match})
        return {"kind": self.kind, "people": people, "known": shown.sample is not None}

    def bands(self, shown: Shown, handle: Handle) -> dict[str, Band]:
        size, grid = self.model.settings.image_size, self.model.grid
        return drawing.picture_object(handle, shown.images, size=size, grid=grid, name=self.title(shown)).bands

    def picture(self, shown: Shown, bands: Sequence[Mapping[str, Band]]) -> Picture:
        return drawing.draw([drawing.ObjectPicture(self.title(shown), "", dict(one)) for one in bands])

    def show_words(self, shown: Shown) -> list[str]:
        if shown.sample is None:
            return [f"{slot}={file}" for slot, file in shown.files.items()]
        return [f"{self.dataset}:{shown.sample}"]

    def python(self, shown: Shown, prompt: str, plan: str) -> str:
        lines = ["import torch", "import tokensieve", "from tokensieve.models import loading"]
        if shown.sample is None:
            lines += ["from tokensieve.data.images import open_photo", "", self.python_load()]
            files = ", ".join(f"{slot!r}: open_photo({file!r})" for slot, file in shown.files.items())
            lines += [f"images = {{{files}}}"]
        else:
            lines += ["from tokensieve.reid.data import load", "", self.python_load()]
            lines += [f'queries = load("{self.dataset}", split="query")  # drawn once, which takes a minute']
            lines += [f"images = queries.read({shown.sample})"]
        lines += ["inputs = {name: image[None] for name, image in loaded.transform(images).items()}"]
        if shown.sample is not None:
            lines += [f'inputs["cameras"] = torch.tensor([queries.shots[{shown.sample}].camera])']
        lines += [f"with torch.inference_mode(), {self.python_apply(plan)}:", "    feature = loaded.model.encode(inputs)"]
        return "\n".join([*lines, "print(feature.shape, sieve.ledger)"])
