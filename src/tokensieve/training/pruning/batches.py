"""Batches of questions with their answers for the training of two-stage VLM pruning."""

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
TRIES = 50  # images that are tried in the place of an unreadable one, before the data is given up


@dataclass
class Batch:
    """Questions with their answers as input of the model, padded on the left."""

    inputs: dict[str, Tensor]  # input_ids, attention_mask (B, L), pixel_values
    labels: Tensor  # (B, L), the next token where that is part of the answer, else NO_ANSWER
    question: Tensor  # (B, L), the prompt's words
    words: Tensor  # (B, L), the prompt's and the answer's
    numbers: Tensor  # (B,), the number of each question within the run

    def to(self, device: torch.device) -> Batch:
        inputs = {name: value.to(device) for name, value in self.inputs.items()}
        return Batch(inputs, *(x.to(device) for x in (self.labels, self.question, self.words, self.numbers)))


class Batches(Dataset[tuple[Batch | None, list[str]]]):
    """Item i is this process's share of batch `start + i`: the next questions of a shuffle that is new in every epoch.

    A question whose image cannot be read is replaced by the next of the shuffle, and the error is returned with the batch.
    None: no image can be read. (Nothing is raised, since an error of a worker has its traceback in the message.)
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
        epoch, batch = divmod(index, len(self.data) // whole)
        order = np.random.default_rng([self.seed, epoch, 8]).permutation(len(self.data))
        first = batch * whole + self.rank * self.size
        numbers = index * whole + self.rank * self.size + torch.arange(self.size)
        items: list[vqa_items.VqaItem] = []
        broken: list[str] = []
        for position in range(first, first + self.size):
            for tried, i in enumerate(np.roll(order, -position)[:TRIES]):
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
        texts = [f"{prompt} {item.answer}" for prompt, item in zip(prompts, items, strict=True)]
        images = [self.reduced(item).image for item in items]
        has_bos = bool(words.bos_token) and all(
            prompt.startswith(words.bos_token) for prompt in prompts
        )  # a template may have added it
        processed = self.processor(images=images, text=texts, padding=False, add_special_tokens=not has_bos)
        rows = [[*row, words.eos_token_id] for row in processed["input_ids"]]
        prompt_ids = words(prompts, add_special_tokens=not has_bos)["input_ids"]  # each image is one token here
        starts = [_prompt_length(row, prompt, self.image_token) for row, prompt in zip(rows, prompt_ids, strict=True)]
        length = max(map(len, rows))
        ids = torch.full((len(rows), length), words.pad_token_id if words.pad_token_id is not None else words.eos_token_id)
        real, answer = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
        for b, (row, start) in enumerate(zip(rows, starts, strict=True)):
            ids[b, length - len(row) :] = torch.tensor(row)
            real[b, length - len(row) :] = True
            answer[b, length - len(row) + start :] = True
        following = F.pad(ids.masked_fill(~answer, NO_ANSWER)[:, 1:], (0, 1), value=NO_ANSWER)
        text = real & (ids != self.image_token)
        inputs = {"input_ids": ids, "attention_mask": real.long()}
        for name, value in processed.items():  # pixels and, for images of different sizes, these
            if name == "mm_token_type_ids":
                inputs[name] = (ids == self.image_token).int()
            elif name not in inputs:
                inputs[name] = torch.as_tensor(np.stack([np.asarray(x) for x in value]))
        return Batch(inputs, following, text & ~answer, text, numbers)

    def reduced(self, item: vqa_items.VqaItem) -> vqa_items.VqaItem:
        """The question with its image scaled down to the largest allowed size."""
        if self.largest is None or max(item.image.size) <= self.largest:
            return item
        image = item.image.copy()
        image.thumbnail((self.largest, self.largest))
        return replace(item, image=image)


def _prompt_length(row: Sequence[int], prompt: Sequence[int], image: int) -> int:
    """How many tokens at the start of a row belong to the prompt, in which every image is one token only."""
    times = row.count(image) // max(1, prompt.count(image))
    whole = [copy for token in prompt for copy in [token] * (times if token == image else 1)]
    return next((i for i, (a, b) in enumerate(zip(row, whole, strict=False)) if a != b), min(len(row), len(whole)))


def read_data(config: PruningTraining) -> tuple[vqa_items.VqaData, vqa_items.VqaData]:
    """The training and the validation questions; a UserError with all problems of both."""
    settings, splits, problems = config.dataset_settings, [], []
    for split in ("train", "val"):
        files = getattr(settings, split)
        try:
            data = vqa.load(
                settings.name,
                questions=files.questions,
                annotations=files.annotations,
                images=files.images,
                split=files.split or split,
                limit=files.limit,
            )
            for remark in data.check(settings.max_broken):
                print(remark, file=sys.stderr)
            splits.append(data)
        except UserError as error:
            problems.append(f"dataset_settings.{split}: {error}")
    if problems:
        raise UserError("; ".join(problems))
    return splits[0], splits[1]
