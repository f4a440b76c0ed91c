"""A user's plug-in as source text: a method, a data set, a task and a command that tokensieve does not have.

A test writes it to a file (or into a package) and loads it from there; `loaded_plugins_are_forgotten` undoes that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokensieve import plugins
from tokensieve.cli.registry import COMMANDS
from tokensieve.data.registry import DATASETS
from tokensieve.methods.registry import REGISTRY
from tokensieve.models.loading.registry import MODEL_TYPES
from tokensieve.tasks.registry import TASKS

METHOD = """
import torch
from tokensieve import Reduction, View, method


@method(summary="the first tokens in raster order")
def toy_first(view: View, keep: int) -> Reduction:
    index = torch.arange(keep, device=view.tokens.device).expand(view.tokens.shape[0], -1)
    return Reduction.keep(index, view.n)
"""

DATASET = """
from PIL import Image
from torch.utils.data import Dataset
from tokensieve.data.registry import DATASETS, DatasetSpec
from tokensieve.data.source import Source


class ToyImages(Dataset):
    names = ["red", "blue"]

    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return self.transform(Image.new("RGB", (32, 48), self.names[index % 2])), index % 2


def build_toy_images(name, transform, options):
    return Source(ToyImages(transform), ToyImages.names, ["a {c} image"], fingerprint="toy images 1")


DATASETS.add(DatasetSpec("toy_images", "red and blue", f"{__name__}:build_toy_images", "labels", "toy_task"), origin=__name__)
"""

TASK = '''
from tokensieve.flags import Flag, fraction
from tokensieve.tasks.base import Task
from tokensieve.tasks.registry import TASKS, TaskSpec


class ToyTask(Task):
    """The share of images whose first feature is above the threshold."""

    name = "toy_task"
    metric = "toy_share"

    def __init__(self, context):
        self.context = context
        self.source = context.source(context.args.split)

    def sources(self):
        return {"test": self.source}

    def batch(self, split, images, targets, encoders):
        return [encode(images)[:, 0].sigmoid().cpu() for encode in encoders]

    def metrics(self, records):
        values = torch.cat(records["test"])
        return {"toy_share": float((values > self.context.args.toy_threshold).double().mean()), "toy_count": len(values)}


TASKS.add(
    TaskSpec(
        "toy_task",
        "images above a threshold",
        implementation=f"{__name__}:ToyTask",
        contents="labels",
        dataset="toy_images",
        metrics=("toy_share", "toy_count"),
        main_metrics=("toy_share",),
        percent=("toy_share",),
        flags=(
            Flag(
                "toy_threshold",
                "of the toy task (default: 0.5)",
                default=0.5,
                options={"type": fraction, "metavar": "T"},
                separates_results=True,
            ),
        ),
    ),
    origin=__name__,
)
'''

COMMAND = """
from tokensieve.cli.registry import COMMANDS, Command


def add_greet_flags(parser):
    parser.add_argument("--name", default="world")


def greet(args):
    print(f"hello {args.name}")


COMMANDS.add(Command("greet", "print a greeting", "Print a greeting.", add_greet_flags, greet), origin=__name__)
"""

SOURCE = METHOD + DATASET + TASK + COMMAND


@contextmanager
def loaded_plugins_are_forgotten() -> Iterator[None]:
    """What plug-ins add inside this context is gone after it: declarations, modules, hashes."""
    plugins.load_plugins()
    tables: list[dict[str, Any]] = [plugins._loaded, plugins._hashes, sys.modules]
    for registry in (TASKS, COMMANDS, DATASETS, MODEL_TYPES, REGISTRY):
        tables += [registry] if isinstance(registry, dict) else [registry._declared, registry._origins]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, content in zip(tables, before, strict=True):
            for name in set(table) - set(content):
                if table is not sys.modules or name.startswith("tokensieve_plugin_"):
                    del table[name]
