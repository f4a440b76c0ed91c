"""Tiny vision models with random weights: what `tokensieve families` tries every cut on."""

from __future__ import annotations

from typing import Any

from torch import nn


def open_clip_model(**vision: Any) -> nn.Module:
    from open_clip.model import CLIP

    tower = {"image_size": 32, "patch_size": 8, "layers": 3, "width": 32, "head_width": 16} | vision
    return CLIP(embed_dim=16, vision_cfg=tower, text_cfg=_text())


def _text() -> dict[str, int]:
    return {"context_length": 8, "vocab_size": 64, "width": 16, "heads": 2, "layers": 1}


def open_clip_timm_model(**trunk: Any) -> nn.Module:
    return _on_trunk(timm_model(**trunk))


def open_clip_eva_model(**trunk: Any) -> nn.Module:
    return _on_trunk(eva_model(**trunk))


def _on_trunk(trunk: nn.Module) -> nn.Module:
    """An open_clip model whose vision tower is this timm model."""
    from open_clip.model import CustomTextCLIP

    vision = {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": "linear", "image_size": 32}
    clip: Any = CustomTextCLIP(embed_dim=16, vision_cfg=vision, text_cfg=_text())
    clip.visual.trunk = trunk
    clip.visual.head = nn.Linear(32, 16)
    return clip


def timm_model(**changes: Any) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(**(_timm_settings() | changes))


def distilled_model() -> nn.Module:
    from timm.models.deit import VisionTransformerDistilled

    return VisionTransformerDistilled(**_timm_settings())


def eva_model(**changes: Any) -> nn.Module:
    from timm.models.eva import Eva

    return Eva(**(_timm_settings() | {"use_rot_pos_emb": True} | changes))


def _timm_settings() -> dict[str, Any]:
    return {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 0}


def hf_model(kind: str, **changes: Any) -> nn.Module:
    import transformers

    settings = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 8, "image_size": 32}
    settings |= {"intermediate_size": 32} | changes
    if kind == "Siglip2Vision":
        settings = {key: value for key, value in settings.items() if key != "image_size"} | {"num_patches": 16}
    config = getattr(transformers, f"{kind}Config")(**settings)
    return getattr(transformers, f"{kind}Model")(config)
