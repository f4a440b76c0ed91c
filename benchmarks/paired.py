"""Paired difference in acc1 of two plans on the same test images, with its standard error.

    python benchmarks/paired.py "learned:32(rest=merge)" "anchor:32(k=32,rest=merge)" --output benchmarks/results/paired.json

Two plans often fail on the same images. The standard error of the paired difference takes this into account.
"""

from __future__ import annotations

import argparse
import math
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

import tokensieve
from tokensieve import embedded, files, provenance
from tokensieve.data import registry as data_registry
from tokensieve.models import loading
from tokensieve.tasks.zeroshot_classification.classifier import zero_shot_classifier


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", nargs=2)
    parser.add_argument("--dataset", default="embedded")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    loaded = loading.load(embedded.MODEL, embedded.PRETRAINED)
    source = data_registry.build_source(args.dataset, loaded.transform)
    cpu = torch.device("cpu")
    classifier = zero_shot_classifier(loaded.model, loaded.tokenizer, source.classes, source.templates, cpu, nullcontext)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        right: list[list[torch.Tensor]] = [[], []]
        for batch in tqdm(source.loader(64, 2), total=math.ceil(len(source) / 64)):
            for which, plan in enumerate(args.plans):
                with tokensieve.apply(loaded.model, plan) as handle, handle.call(samples=batch.samples):
                    features = F.normalize(loaded.model.encode_image(batch.images), dim=-1)
                right[which].append((features @ classifier).argmax(1) == batch.targets)
    one, two = (torch.cat(hits).double() for hits in right)
    difference = one - two
    row = {
        "plans": args.plans,
        "dataset": args.dataset,
        "n": len(one),
        "acc1": [one.mean().item(), two.mean().item()],
        "difference": difference.mean().item(),
        "stderr": difference.std().item() / math.sqrt(len(one)),
        "versions": provenance.versions(),
    }
    print(
        f"{100 * row['difference']:.2f} ± {100 * row['stderr']:.2f} points ({args.plans[0]} over {args.plans[1]}, n={len(one)})"
    )
    if args.output is not None:
        files.write_json(args.output, row)


if __name__ == "__main__":
    main()
