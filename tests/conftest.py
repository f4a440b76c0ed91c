"""What tests share: a tiny open_clip model with its weights in a file, and small data sets on disk."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.pictures import many_hot, picture, png, write_shards

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background would have children that ignore Ctrl-C

TINY = "tiny-clip"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every test draws the same numbers, whatever ran before it in its process."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(scope="session")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """An open_clip ViT of 4 blocks, width 32, patch 8, on 48 x 32 pixels (6 x 4 = 24 patches), random weights.

    .name (known to open_clip), .weights (a safetensors file), .make() -> (model in eval mode, transform, tokenizer)
    """
    import open_clip
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("tiny_clip")
    vision = {"image_size": [48, 32], "patch_size": 8, "layers": 4, "width": 32, "head_width": 8}
    text = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    (folder / f"{TINY}.json").write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(folder / f"{TINY}.json")
    torch.manual_seed(0)
    model = open_clip.create_model(TINY)
    with torch.no_grad():  # as initialised, it would see all images alike
        for parameter in model.visual.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    weights = folder / "tiny.safetensors"
    save_file(model.state_dict(), weights)

    def make() -> tuple[torch.nn.Module, object, object]:
        model, _, transform = open_clip.create_model_and_transforms(TINY, pretrained=str(weights))
        return model.eval(), transform, open_clip.get_tokenizer(TINY)

    return SimpleNamespace(name=TINY, weights=str(weights), make=make)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """wds/...: 30 images of 6 classes in two shards."""
    samples = [{"png": png(picture(i % 6, i)), "cls": str(i % 6).encode()} for i in range(30)]
    return write_shards(tmp_path_factory.mktemp("wds") / "colours", samples)


@pytest.fixture(scope="session")
def multilabel_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """wds/...: 30 images with one to three of 6 labels each."""
    samples = [{"png": png(picture(i % 6, i)), "npy": many_hot([i % 6, (i * 5) % 6, (i // 6) % 6])} for i in range(30)]
    return write_shards(tmp_path_factory.mktemp("wds") / "many", samples, kind="multilabel")


@pytest.fixture(scope="session")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fer2013's layout: an image folder with 7 classes, 4 images each."""
    folder = tmp_path_factory.mktemp("fer2013")
    for label in range(7):
        (folder / "test" / str(label)).mkdir(parents=True)
        for number in range(4):
            picture(label % 6, label * 10 + number).save(folder / "test" / str(label) / f"{number}.png")
    return folder
