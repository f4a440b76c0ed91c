"""TODO docstring."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from tokensieve.config.pruning import PruningTraining
from tokensieve.data import vqa, vqa_items
from tokensieve.data.images import BrokenImage
from tokensieve.errors import UserError
from tokensieve.models.loading import vlm as load_vlm

NO_ANSWER = -100
TRIES = 50  # images in the place of one that cannot be read, before it is taken for the whole data's fault


@dataclass
class Batch:
    """Questions with their answers as the model takes them; padded on the left."""

    inputs: dict[str, Tensor]  # input_ids, attention_mask (B, L), pixel_values
    labels: Tensor  # (B, L), the token to be said next where that is one of the answer, else NO_ANSWER
    question: Tensor  # (B, L), the prompt's words
    words: Tensor  # (B, L), the prompt's and the answer's
    numbers: Tensor  # (B,), which question of the run each is

    def to(self, device: torch.device) -> Batch:
        inputs = {name: value.to(device) for name, value in self.inputs.items()}
        return Batch(inputs, *(x.to(device) for x in (self.labels, self.question, self.words, self.numbers)))


class Batches(Dataset[tuple[Batch | None, list[str]]]):
    """Item i is this process's share of batch `start + i`: the next questions of a shuffle that is new in every epoch.

    In the place of a question whose image cannot be read stands the next of the shuffle; what was wrong comes with the batch.
    None: no image can be read. (Nothing is raised, since what a worker raises comes with its traceback in the message.)
    """

    def __init__(
        self, data: vqa_items.VqaData, collate: Collate, size: int, seed: int, rank: int, world: int, start: int, stop: int
    ) -> None:
        self.data, self.collate, self.size, self.seed, self.rank, self.world = data, collate, size, seed, rank, world
        self.start, self.stop = start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, offset: int) -> tuple[Batch | None, list[str]]:
        whole = self.size * self.world
        index = self.start + offset
        epoch, place = divmod(index, len(self.data) // whole)
        order = np.random.default_rng([self.seed, epoch, 8]).permutation(len(self.data))
        first = place * whole + self.rank * self.size
        numbers = index * whole + self.rank * self.size + torch.arange(self.size)
        items: list[vqa_items.VqaItem] = []
        broken: list[str] = []
        for place in range(first, first + self.size):
            for tried, i in enumerate(np.roll(order, -place)[:TRIES]):
                try:
                    items.append(self.data[int(i)])
                    break
                except BrokenImage as error:
                    broken += [str(error)] if tried == 0 else []
            else:
                return None, broken
        return self.collate(items, numbers), broken


class Collate:
    """Questions with answers -> Batch, by the model's own processor."""

    def __init__(self, processor: Any, template: str, image_token: int, largest: int | None) -> None:
        self.processor, self.template, self.image_token, self.largest = processor, template, image_token, largest

    def __call__(self, items: Sequence[vqa_items.VqaItem], numbers: Tensor) -> Batch:
        words = self.processor.tokenizer
        prompts = [load_vlm.prompt(self.processor, self.template.replace("{question}", item.question)) for item in items]
        told = [f"{prompt} {item.answer}" for prompt, item in zip(prompts, items, strict=True)]
        images = [self.reduced(item).image for item in items]
        begun = bool(words.bos_token) and all(prompt.startswith(words.bos_token) for prompt in prompts)  # not twice
        given = self.processor(images=images, text=told, padding=False, add_special_tokens=not begun)
        rows = [[*row, words.eos_token_id] for row in given["input_ids"]]
        asked = words(prompts, add_special_tokens=not begun)["input_ids"]  # each image is one token here
        starts = [_shared(row, prompt, self.image_token) for row, prompt in zip(rows, asked, strict=True)]
        length = max(map(len, rows))
        ids = torch.full((len(rows), length), words.pad_token_id if words.pad_token_id is not None else words.eos_token_id)
        real, said = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        for b, (row, start) in enumerate(zip(rows, starts, strict=True)):
            ids[b, length - len(row) :] = torch.tensor(row)
            real[b, length - len(row) :] = True
            said[b, length - len(row) + start :] = True
        following = F.pad(ids.masked_fill(~said, NO_ANSWER)[:, 1:], (0, 1), value=NO_ANSWER)
        text = real & (ids != self.image_token)
        pixels = torch.as_tensor(np.stack([np.asarray(x) for x in given["pixel_values"]]))
        inputs = {"input_ids": ids, "attention_mask": real.long(), "pixel_values": pixels}
        return Batch(inputs, following, text & ~said, text, numbers)

    def reduced(self, item: vqa_items.VqaItem) -> vqa_items.VqaItem:
        """The same question, about an image that is not larger than it may be."""
        if self.largest is None or max(item.image.size) <= self.largest:
            return item
        image = item.image.copy()
        image.thumbnail((self.largest, self.largest))
        return replace(item, image=image)


def _shared(row: Sequence[int], prompt: Sequence[int], image: int) -> int:
    """How many tokens a row begins with that are the prompt's, in which every image has one token only."""
    times = row.count(image) // max(1, prompt.count(image))
    whole = [token for told in prompt for token in [told] * (times if told == image else 1)]
    return next((i for i, (a, b) in enumerate(zip(row, whole, strict=False)) if a != b), min(len(row), len(whole)))


def read_data(config: PruningTraining) -> tuple[vqa_items.VqaData, vqa_items.VqaData]:
    """The training and the validation questions; a UserError names everything of both that is missing."""
    given, found, wrong = config.dataset_settings, [], []
    for split in ("train", "val"):
        files = getattr(given, split)
        try:
            data = vqa.load(
                given.name,
                questions=files.questions,
                annotations=files.annotations,
                images=files.images,
                split=files.split or split,
                limit=files.limit,
            )
            for remark in data.check(given.max_broken):
                print(remark, file=sys.stderr)
            found.append(data)
        except UserError as error:
            wrong.append(f"dataset_settings.{split}: {error}")
    if wrong:
        raise UserError("; ".join(wrong))
    return found[0], found[1]
