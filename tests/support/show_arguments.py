"""Arguments of `tokensieve show` for tests."""

from __future__ import annotations

import argparse
from typing import Any


def arguments(images: list[str], **flags: Any) -> argparse.Namespace:
    defaults: dict[str, Any] = {
        "plan": None,
        "compare": [],
        "model": None,
        "question": None,
        "frames": None,
        "gallery": False,
        "ranks": 10,
        "modalities": None,
        "dataset_root": "root",
        "pretrained": None,
        "model_type": "open_clip",
        "weights": None,
        "output": None,
        "device": "cpu",
        "seed": 0,
        "quiet": False,
    }
    return argparse.Namespace(images=images, **(defaults | flags))
