"""Images and texts to features by the model's own code, whatever family it is of (`Family.encoder`).

The image feature is open_clip's encode_image, a Hugging Face CLIP's get_image_features, the pooled output of a bare vision
model (of ViT, whose pooler most checkpoints leave untrained, the normed CLS token), or what a timm model hands its classifier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

from torch import Tensor, nn

from tokensieve.errors import Uncuttable, UserError
from tokensieve.models.hf import pooled_output
from tokensieve.models.patching import capture_calls, is_patched
from tokensieve.models.registry import families, open_tower
from tokensieve.registry import resolve
from tokensieve.scoring import Attention


def encode_image(model: nn.Module, images: Tensor, unscaled: bool = False) -> Tensor:
    """(B, 3, h, w) -> (B, E), as the stock model does it. unscaled: before a normalisation that is part of that (CoCa's)."""
    return _encoder(model, unscaled)(images)


def encode_text(model: nn.Module, tokens: Any) -> Tensor:
    """The output of the model's own tokenizer, a tensor or a mapping with input_ids -> (T, E)."""
    net: Any = model
    if hasattr(net, "encode_text"):
        features: Tensor = net.encode_text(tokens)
        return features
    if not hasattr(net, "get_text_features"):
        raise UserError(
            f"{type(model).__name__} has no text tower, so it cannot compare images with texts; use --task linear_probe"
        )
    inputs = tokens if isinstance(tokens, Mapping) or hasattr(tokens, "keys") else {"input_ids": tokens}
    taken = {name: inputs[name] for name in inputs if name in ("input_ids", "attention_mask")}
    return pooled_output(net.get_text_features(**taken))


@overload
def get_image_features_with_tokens(
    model: nn.Module, images: Tensor, unscaled: bool = False, *, return_attention: Literal[False] = False
) -> tuple[Tensor, Tensor | None]: ...


@overload
def get_image_features_with_tokens(
    model: nn.Module, images: Tensor, unscaled: bool = False, *, return_attention: Literal[True]
) -> tuple[Tensor, Tensor | None, Attention | None]: ...


def get_image_features_with_tokens(
    model: nn.Module, images: Tensor, unscaled: bool = False, *, return_attention: bool = False
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Attention | None]:
    """The model's image feature (B, E), and the patch tokens that leave the last block of its tower (B, N, D).

    The feature is encode_image's bit for bit. With a plan on the model the tokens are those the plan kept (with rest=zero
    all of them, 0 where nothing was selected). They are None where the tower cannot be opened, as a ResNet's.

    return_attention: also the attention of that block, by which `anchor@out` and apply_token_selection(attention=...) choose.
    It is that of the stock model, so no plan may be attached.
    """
    try:
        tower = open_tower(model)
    except Uncuttable:
        feature = encode_image(model, images, unscaled)
        return (feature, None, None) if return_attention else (feature, None)
    if return_attention and any(is_patched(block.module, "forward") for block in tower.blocks[:-1]):
        raise UserError("return_attention=True: a plan is attached to this model; remove() its handle first")
    block = tower.blocks[-1]
    with capture_calls(block.module) as calls:
        feature = encode_image(model, images, unscaled)
    last = calls[-1]
    output = last.output[0] if isinstance(last.output, tuple) else last.output
    tokens = output[:, tower.prefix :]
    if not return_attention:
        return feature, tokens
    args, kwargs = block.select_inputs(None, last.args[1:], last.kwargs)
    return feature, tokens, block.attend(last.args[0], None, *args, **kwargs)[1]


def _encoder(model: nn.Module, unscaled: bool) -> Callable[[Tensor], Tensor]:
    """How this model encodes images, by the first family that knows it; a UserError if none does."""
    known = families()
    for family in known:
        encoder = resolve(family.encoder)(model, unscaled) if family.encoder else None
        if encoder is not None:
            return encoder
    names = "; ".join(family.description for family in known if family.encoder and family.description)
    raise UserError(f"{type(model).__name__} does not encode images to features; known are {names}")
