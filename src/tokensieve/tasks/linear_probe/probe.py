"""The linear layer of a probe: its training, the search for its weight decay, and its scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.errors import UserError
from tokensieve.tasks.statistics import accuracies
from tokensieve.terminal import progress

WEIGHT_DECAYS = np.logspace(-6, 2, num=97).tolist()  # what the search may choose
COARSE, FINE = 16, (8, 4, 2, 1)  # its steps: first every 16th of them, then to both sides of the best, ever nearer


class Features(NamedTuple):
    """What is kept of a batch."""

    features: Tensor  # (B, E)
    labels: Tensor  # (B,)


def join_features(records: Sequence[Features]) -> Features:
    """The records of a pass as one."""
    return Features(torch.cat([record.features for record in records]), torch.cat([record.labels for record in records]))


def select_features(data: Features, indices: Tensor) -> Features:
    return Features(data.features[indices], data.labels[indices])


def random_int63(generator: torch.Generator) -> int:
    """One number of 63 bits, as a DataLoader or its sampler draws one."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def first_k_per_class(labels: Tensor, order: Tensor, k: int) -> Tensor:
    """The first k of every class in that order, or all if k is negative; a UserError if a class has fewer.  (n,)"""
    if int(labels.min()) < 0:
        raise UserError(f"a label is {int(labels.min())}: labels are numbers from 0.")
    if k < 0:
        return order
    counts = torch.bincount(labels)
    short = ((counts > 0) & (counts < k)).nonzero().flatten().tolist()
    if short:
        least = int(counts[counts > 0].min())
        raise UserError(
            f"--fewshot_k {k}: {len(short)} classes have fewer training images, class {short[0]} has {int(counts[short[0]])}. "
            f"Give --fewshot_k {least} or less, or -1 for all images."
        )
    permuted = labels[order]
    by_class = permuted.argsort(stable=True)  # places in the order, class after class
    rank = torch.empty_like(by_class)
    rank[by_class] = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[permuted[by_class]]  # the how-manieth of its class
    return order[rank < k]


@dataclass
class Probe:
    """How a layer is trained."""

    classes: int
    lr: float
    epochs: int
    batch_size: int
    seed: int
    device: torch.device
    precision: Callable[[], AbstractContextManager[Any]]
    show: bool = False

    def train(self, data: Features, weight_decay: float, title: str = "linear probe") -> nn.Linear:
        """A layer that has learnt these labels; the same for the same seed, whatever was drawn before."""
        draws = torch.Generator().manual_seed(self.seed)
        layer = _new_layer(data.features.shape[1], self.classes, draws).to(self.device)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=self.lr, weight_decay=weight_decay)
        steps = self.epochs * -(-len(data.labels) // self.batch_size)
        step = 0
        with progress.bar(total=steps, desc=title, unit="step", leave=False, quiet=not self.show) as bar:
            for _ in range(self.epochs):
                random_int63(draws)
                order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(random_int63(draws)))
                for chosen in order.split(self.batch_size):
                    for group in optimizer.param_groups:
                        group["lr"] = 0.5 * (1 + np.cos(np.pi * step / steps)) * self.lr
                    features, labels = (part.to(self.device, non_blocking=True) for part in select_features(data, chosen))
                    optimizer.zero_grad()
                    with self.precision():
                        loss = F.cross_entropy(layer(features), labels)
                    loss.backward()
                    optimizer.step()
                    step += 1
                    bar.update()
        return layer

    def logits(self, layer: nn.Linear, features: Tensor) -> Tensor:
        """The layer's outputs, on the CPU.  (n, C)"""
        with torch.no_grad(), self.precision():
            return torch.cat([layer(part.to(self.device)).cpu() for part in features.split(self.batch_size)]).float()

    def best_weight_decay(self, train: Features, val: Features) -> float:
        """The weight decay of the best accuracy on `val`, by a coarse search and finer ones around its best."""

        @cache  # the same training would give the same number
        def accuracy(place: int) -> float:
            layer = self.train(train, WEIGHT_DECAYS[place], f"weight decay {WEIGHT_DECAYS[place]:.2g}")
            return int((self.logits(layer, val.features).argmax(1) == val.labels).sum()) / len(val.labels)

        def best(places: Sequence[int]) -> int:
            """The first of the best; the least weight decay of all if none is ever right."""
            chosen = max(places, key=accuracy)
            return chosen if accuracy(chosen) > 0 else 0

        peak = best(range(0, len(WEIGHT_DECAYS), COARSE))
        for span in FINE:
            peak = best([max(peak - span, 0), peak, min(peak + span, len(WEIGHT_DECAYS) - 1)])
        return float(WEIGHT_DECAYS[peak])


def _new_layer(width: int, classes: int, draws: torch.Generator) -> nn.Linear:
    """A layer initialised as torch does it, by this generator."""
    layer = nn.utils.skip_init(nn.Linear, width, classes)
    assert isinstance(layer, nn.Linear)
    nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5), generator=draws)
    nn.init.uniform_(layer.bias, -1 / math.sqrt(width), 1 / math.sqrt(width), generator=draws)
    return layer


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Is the j-th best class the right one, up to the fifth; logits (n,C), labels (n,) -> (n, 5)."""
    return logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]


def scores(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """The numbers by clip_benchmark's names, each with its standard error; logits (n,C), labels (n,)."""
    five = int(labels.max()) >= 5  # with up to 5 classes it is always 1
    found = accuracies(logits.argmax(1), hits(logits, labels), labels, five=five)
    return {f"lp_{name}": value for name, value in found.items()}
