"""Fine-tune an image tower of open_clip with a plan on, beside one with all tokens: time, memory and accuracy of both.

    python examples/finetune_clip.py --plan cover@2:56

The embedded CLIP learns to count the objects of a picture (one to four), with a linear layer on its image feature. All is
trained. To train on your own pictures, replace `draw`; to train another model, replace `load`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tokensieve
from tokensieve import embedded
from tokensieve.embedded import scenes
from tokensieve.embedded.datasets import as_batch, split_seed
from tokensieve.measuring.memory import peak_memory

MOST = 4  # objects of a picture
FIRST = 600_000_000  # number of the first scene: no other training has seen them


class Counter(nn.Module):
    """An image tower of open_clip with a classifier on its feature."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower, self.head = tower, nn.Linear(tower.output_dim, MOST)
        mean, std = (torch.tensor(tower.preprocess_cfg[name]).view(3, 1, 1) * 255 for name in ("mean", "std"))
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, pictures: Tensor) -> Tensor:
        """(B, 3, h, w), bytes -> (B, MOST)"""
        logits: Tensor = self.head(self.tower((pictures - self.mean) / self.std))
        return logits


def load() -> Counter:
    """The embedded CLIP's image tower."""
    embedded.register()
    clip = open_clip.create_model(embedded.MODEL, pretrained=str(embedded.weights_path()))
    torch.manual_seed(0)
    return Counter(clip.visual)


def draw(split: str, first: int, number: int) -> tuple[Tensor, Tensor]:
    """Pictures (B, 3, h, w) in bytes, and the number of objects in each, from 0 (B,)."""
    seed = split_seed(split)
    counts = [index % MOST for index in range(first, first + number)]
    drawn = [scenes.several(seed, FIRST + first + i, scenes.SEEN, count + 1) for i, count in enumerate(counts)]
    return torch.from_numpy(as_batch([scenes.render(scene) for scene in drawn])), torch.tensor(counts)


class Training:
    """One training: a model, its plan, and what its steps cost."""

    def __init__(self, plan: str | None, rate: float, device: str) -> None:
        self.plan, self.model, self.device = plan, load().to(device), torch.device(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.01)
        self.seconds: list[float] = []
        if plan is not None:
            tokensieve.apply(self.model.tower, plan)  # it stays on: training and evaluation see the same tokens

    def step(self, pictures: Tensor, labels: Tensor) -> float:
        began = time.process_time()
        loss = F.cross_entropy(self.model(pictures.to(self.device)), labels.to(self.device))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.process_time() - began)
        return float(loss.detach())

    @torch.no_grad()
    def accuracy(self, number: int, plan: str | None = None) -> float:
        """The share of test pictures that are counted right. plan: one for the evaluation only."""
        self.model.eval()
        on: AbstractContextManager[Any] = nullcontext() if plan is None else tokensieve.apply(self.model.tower, plan)
        right = 0
        with on:
            for first in range(0, number, 50):
                pictures, labels = draw("test", first, min(50, number - first))
                right += int((self.model(pictures.to(self.device)).argmax(1).cpu() == labels).sum())
        self.model.train()
        return right / number

    def memory(self, batch: int) -> float | None:
        """MiB of a step, without weights."""
        pictures, labels = draw("train", 0, batch)
        return peak_memory(
            lambda: F.cross_entropy(self.model(pictures.to(self.device)), labels.to(self.device)).backward(), self.device
        )


def main(words: Sequence[str] | None = None) -> dict[str, float]:
    """Trains both, step by step in turn, prints a table, and returns its accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="cover@2:56", help="the plan of the second training")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-4, help="the learning rate")
    parser.add_argument("--test", type=int, default=500, help="test pictures")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(words)

    full, planned = Training(None, args.rate, args.device), Training(args.plan, args.rate, args.device)
    memory = [training.memory(args.batch) for training in (full, planned)]
    for step in range(args.steps):
        pictures, labels = draw("train", step * args.batch, args.batch)
        losses = [training.step(pictures, labels) for training in (full, planned)]
        if step % 10 == 9 or step == args.steps - 1:
            print(
                f"step {step + 1} of {args.steps}: loss {losses[0]:.3f} with all tokens, {losses[1]:.3f} with {args.plan}",
                flush=True,
            )
    results = {
        "full": full.accuracy(args.test),
        "full, plan on afterwards": full.accuracy(args.test, args.plan),
        "plan": planned.accuracy(args.test),
    }
    seconds = [median(training.seconds) for training in (full, planned)]
    print(f"\n{'trained with':24}{'CPU s/step':>12}{'MiB':>8}{'accuracy, %':>14}{'with the plan, %':>18}")
    left, right = results["full"], results["full, plan on afterwards"]
    print(f"{'all tokens':24}{seconds[0]:12.2f}{memory[0] or 0:8.0f}{100 * left:14.1f}{100 * right:18.1f}")
    print(f"{args.plan:24}{seconds[1]:12.2f}{memory[1] or 0:8.0f}{'':14}{100 * results['plan']:18.1f}")
    print(f"a step with the plan takes {seconds[1] / seconds[0]:.2f} of the time of a step with all tokens")
    return results


if __name__ == "__main__":
    main()
