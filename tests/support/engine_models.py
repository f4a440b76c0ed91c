"""Tiny models of every kind that a plan can be applied to, with random weights, and images for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support import hf_models
from tokensieve.reid import build
from tokensieve.reid.model import ReidModel, Settings

TOWERS = ("open_clip", "timm", "timm_map", "eva", "hf")  # families of vision towers


def make_tower(family: str) -> nn.Module:
    import timm
    from open_clip.transformer import VisionTransformer

    torch.manual_seed(0)
    if family == "open_clip":
        return VisionTransformer(
            image_size=48, patch_size=8, width=32, layers=4, heads=2, mlp_ratio=2, output_dim=16, pool_type="avg"
        ).eval()
    if family == "hf":
        return hf_models.build("clip").eval()
    sizes: dict[str, Any] = {"img_size": 48, "patch_size": 8, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 0}
    if family == "eva":
        return timm.models.Eva(**sizes, use_rot_pos_emb=True).eval()
    more: dict[str, dict[str, Any]] = {
        "timm_map": {"global_pool": "map", "class_token": False},
        "timm_dynamic": {"global_pool": "avg", "dynamic_img_size": True, "dynamic_img_pad": True},
    }
    return timm.models.VisionTransformer(**sizes, **more.get(family, {"global_pool": "avg"})).eval()


def make_reid_model() -> ReidModel:
    torch.manual_seed(0)
    sizes = {"patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}
    settings = Settings("timm", "vit_tiny_patch16_224", (32, 16), arguments=sizes, cameras=4)
    return build.build(settings).eval()


def images(batch: int, seed: int, size: tuple[int, int] = (48, 48)) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed))
