"""What tests of `tokensieve eval` share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import open_clip

from tests.support.pictures import picture, png, write_shards

Run = Callable[..., SimpleNamespace]
NAME = "colours_tiny.safetensors_tiny-clip_en_zeroshot_classification"  # of results of the `run` fixture


def only(done: SimpleNamespace) -> dict:
    """The result of a run that made one."""
    (result,) = done.results.values()
    return result


def small_resnet(folder: Path) -> str:
    """The name of an open_clip model whose tower cannot be cut."""
    vision = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
    text = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    (folder / "tiny-resnet.json").write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(folder / "tiny-resnet.json")
    (folder / "tiny-resnet.json").unlink()
    return "tiny-resnet"


def damaged(folder: Path, total: int, broken: int) -> Path:
    """Shards of which some images cannot be read."""
    samples = [{"png": png(picture(i % 6, i)), "cls": str(i % 6).encode()} for i in range(total)]
    for i in range(broken):
        samples[i * 7]["png"] = [b"", b"no image", samples[i * 7]["png"][:60]][i % 3]
    return write_shards(folder, samples)
