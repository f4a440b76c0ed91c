"""Images and texts to features by the model's own code, whatever library it comes from.

The image feature is open_clip's encode_image, a Hugging Face CLIP's get_image_features, the pooled output of a bare vision
model (of ViT, whose pooler most checkpoints leave untrained, the normed CLS token), or what a timm model hands its classifier.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.errors import Uncuttable, UserError
from tokensieve.models.patching import capture_output


def encode_image(model: nn.Module, images: Tensor, unscaled: bool = False) -> Tensor:
    """(B, 3, h, w) -> (B, E), as the stock model does it. unscaled: before a normalisation that is part of that (CoCa's)."""
    return _encoder(model, unscaled)(images)


def encode_text(model: nn.Module, tokens: Any) -> Tensor:
    """What the model's own tokenizer gave, a tensor or a mapping with input_ids -> (T, E)."""
    net: Any = model
    if hasattr(net, "encode_text"):
        features: Tensor = net.encode_text(tokens)
        return features
    if not hasattr(net, "get_text_features"):
        raise UserError(
            f"{type(model).__name__} has no text tower, so it cannot compare images with texts; use --task linear_probe"
        )
    known = tokens if isinstance(tokens, Mapping) or hasattr(tokens, "keys") else {"input_ids": tokens}
    return _pooled(net.get_text_features(**{name: known[name] for name in known if name in ("input_ids", "attention_mask")}))


def get_image_features_with_tokens(model: nn.Module, images: Tensor, unscaled: bool = False) -> tuple[Tensor, Tensor | None]:
    """The model's image feature (B, E), and the patch tokens that leave the last block of its tower (B, N, D).

    The feature is encode_image's bit for bit. With a plan on the model the tokens are those the plan kept (with rest=zero
    all of them, 0 where nothing was selected). They are None where the tower cannot be opened, as a ResNet's.
    """
    from tokensieve.models.registry import open_tower

    try:
        tower = open_tower(model)
    except Uncuttable:
        return encode_image(model, images, unscaled), None
    with capture_output(tower.blocks[-1].module) as outputs:
        feature = encode_image(model, images, unscaled)
    last = outputs[-1][0] if isinstance(outputs[-1], tuple) else outputs[-1]
    return feature, last[:, tower.prefix :]


def _encoder(model: nn.Module, unscaled: bool) -> Callable[[Tensor], Tensor]:
    """How this model encodes images; a UserError if it is of no known kind."""
    net: Any = model
    if hasattr(net, "encode_image"):
        scales = unscaled and "normalize" in inspect.signature(net.encode_image).parameters
        return partial(net.encode_image, normalize=False) if scales else net.encode_image
    if type(net).__module__.startswith("open_clip.") and hasattr(net, "image_size"):  # a bare image tower
        return lambda images: out[0] if isinstance(out := net(images), tuple) else out
    if hasattr(net, "forward_features") and hasattr(net, "forward_head"):
        return lambda images: net.forward_head(net.forward_features(images), pre_logits=True)
    kind = getattr(getattr(net, "config", None), "model_type", "")
    if "ForImageClassification" in type(net).__name__:
        net = getattr(net, net.base_model_prefix, None) or net.vision_model
    if hasattr(net, "get_image_features"):
        run = net.get_image_features
    elif getattr(net, "main_input_name", "") == "pixel_values":
        run = net
    else:
        raise UserError(
            f"{type(model).__name__} is no model that makes features of images; known are open_clip models, "
            "Hugging Face CLIP, SigLIP, DINOv2, DINOv3 and ViT, and timm models"
        )
    configured = getattr(getattr(net.config, "vision_config", None) or net.config, "image_size", None)
    flexible = "interpolate_pos_encoding" in inspect.signature(net.forward).parameters

    def resized(images: Tensor) -> dict[str, bool]:
        """Images of another size than the configured one have their position embeddings interpolated."""
        h, w = configured if isinstance(configured, (tuple, list)) else (configured, configured)
        return {"interpolate_pos_encoding": True} if flexible and tuple(images.shape[-2:]) != (h, w) else {}

    if kind in ("vit", "deit"):
        return lambda images: run(pixel_values=images, **resized(images)).last_hidden_state[:, 0]
    if kind.startswith("siglip2"):
        size = (getattr(net.config, "vision_config", None) or net.config).patch_size
        return lambda images: _pooled(run(**_patches(images, size)))
    return lambda images: _pooled(run(pixel_values=images, **resized(images)))


def _patches(images: Tensor, size: int) -> dict[str, Tensor | None]:
    """Whole images as SigLIP2's flexible tower takes them: (B, 3, h, w) -> (B, N, size * size * 3) and each grid's shape."""
    batch, _, height, width = images.shape
    h, w = height // size, width // size
    cells = images.reshape(batch, 3, h, size, w, size).permute(0, 2, 4, 3, 5, 1)  # (B, h, w, size, size, 3)
    shapes = torch.tensor([[h, w]], device=images.device).expand(batch, -1)
    return {"pixel_values": cells.reshape(batch, h * w, -1), "pixel_attention_mask": None, "spatial_shapes": shapes}


def _pooled(output: Any) -> Tensor:
    """transformers 5 answers with an object that holds the feature, older ones with the feature."""
    if isinstance(output, Tensor):
        return output
    for name in ("image_embeds", "pooler_output"):
        feature = getattr(output, name, None)
        if feature is not None:
            return feature
    raise UserError(f"{type(output).__name__} holds no pooled feature; load the model with its pooling head")
