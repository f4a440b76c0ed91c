"""A model, labelled images and a classifier, for programs that compare plans by accuracy and distance to the full feature."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokensieve import embedded
from tokensieve.data import registry as data_registry
from tokensieve.data.source import Batch
from tokensieve.models import loading
from tokensieve.models.features import encode_image
from tokensieve.tasks.zeroshot_classification.classifier import load_classifiers, zero_shot_classifier


@dataclass
class Problem:
    """What the plans are compared on."""

    name: str  # of the model
    model: Any
    batches: list[Batch]  # images (B, 3, h, w), and the number of each within the data, by which `random` chooses
    targets: Tensor  # (N,)
    classifier: Tensor  # (E, C)

    def encode(self, images: Tensor) -> Tensor:
        """Unit features, (B, E)."""
        return F.normalize(encode_image(self.model, images).float(), dim=-1)

    def right(self, features: Tensor) -> Tensor:
        """1 where the nearest class is the right one, (N,)."""
        return ((features @ self.classifier.float()).argmax(1) == self.targets).double()


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=embedded.MODEL)
    parser.add_argument("--model_type", default="open_clip")
    parser.add_argument("--dataset", default="embedded")
    parser.add_argument("--dataset_root", default="root")
    parser.add_argument("--split", default="test")
    parser.add_argument("--load_clfs", help="classifier, for models without a text tower")
    parser.add_argument("--limit", type=int, help="only the first N images")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every n-th batch")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--output", type=Path, required=True)


def load_problem(args: argparse.Namespace) -> Problem:
    pretrained = embedded.PRETRAINED if args.model == embedded.MODEL else ""
    loaded = loading.load(args.model, pretrained, model_type=args.model_type)
    model, cpu = loaded.model.eval(), torch.device("cpu")
    source = data_registry.build_source(
        args.dataset, loaded.transform, root=args.dataset_root, split=args.split, limit=args.limit
    )
    classifier = (
        load_classifiers([args.load_clfs], cpu)
        if args.load_clfs
        else zero_shot_classifier(model, loaded.tokenizer, source.classes, source.templates, cpu, nullcontext)
    )
    batches = [batch for number, batch in enumerate(source.loader(args.batch_size, 0)) if number % args.every == 0]
    targets = torch.cat([batch.targets for batch in batches])
    return Problem(Path(args.model).name, model, batches, targets, classifier)
