"""Hugging Face transformers 5: CLIP, SigLIP, SigLIP2, ViT, DeiT, DINOv2 (with registers or without) and DINOv3."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.errors import Uncuttable, UserError
from tokensieve.models import siglip2
from tokensieve.models.patching import call_attention, replace
from tokensieve.models.pooling import bias_pooler, blank_after, log_sizes, pool_single_token, query_row, split_heads
from tokensieve.models.resizing import Resizing, resize_images
from tokensieve.models.tower import BlockInputs, Entry, Layout, Sizes, Tower, Undo, gather_rotary, watch_conv
from tokensieve.models.wrapped import attention_weights, own_class, unwrap_each
from tokensieve.scoring import Attention, attend

if TYPE_CHECKING:
    from tokensieve.core import View


@dataclass(frozen=True)
class Names:
    """What the parts of a layer are called."""

    attention: str
    norm1: str
    norm2: str
    out: str  # the attention's output projection


@dataclass(frozen=True)
class Kind:
    """Where a family keeps what all of them have."""

    family: str
    tower: str  # class of the vision tower
    layers: str
    names: Names
    patches: str  # the module whose output is (B, D, h, w)
    last: str  # the norm after the last layer
    tokens: tuple[str, ...] = ("embeddings.cls_token",)  # parameters that become prefix tokens, CLS first
    norms_all: bool = True  # the last norm is applied to every token, not only to the pooled one


ENCODER = Names("self_attn", "layer_norm1", "layer_norm2", "out_proj")
VIT = Names("attention", "layernorm_before", "layernorm_after", "o_proj")
DINO = Names("attention", "norm1", "norm2", "o_proj")

EMBEDDING, PROJECTION = "embeddings.patch_embedding", "embeddings.patch_embeddings.projection"
WITH_MASK = "this model was called with an attention mask, which cannot follow a cut; call it without"
REGISTERS = ("embeddings.cls_token", "embeddings.register_tokens")
DISTILLED = ("embeddings.cls_token", "embeddings.distillation_token")
CLASS = ("embeddings.class_embedding",)

KINDS = {  # by the name of the folder in transformers.models
    "clip": Kind("CLIP", "CLIPVisionModel", "encoder.layers", ENCODER, EMBEDDING, "post_layernorm", CLASS, norms_all=False),
    "siglip": Kind("SigLIP", "SiglipVisionModel", "encoder.layers", ENCODER, EMBEDDING, "post_layernorm", ()),
    "siglip2": Kind("SigLIP2", "Siglip2VisionModel", "encoder.layers", ENCODER, EMBEDDING, "post_layernorm", ()),
    "vit": Kind("ViT", "ViTModel", "layers", VIT, PROJECTION, "layernorm"),
    "deit": Kind("DeiT", "DeiTModel", "layers", VIT, PROJECTION, "layernorm", DISTILLED),
    "dinov2": Kind("DINOv2", "Dinov2Model", "encoder.layer", DINO, PROJECTION, "layernorm"),
    "dinov2_with_registers": Kind(
        "DINOv2 with registers", "Dinov2WithRegistersModel", "encoder.layer", DINO, PROJECTION, "layernorm", REGISTERS
    ),
    "dinov3_vit": Kind("DINOv3", "DINOv3ViTModel", "model.layer", DINO, "embeddings.patch_embeddings", "norm", REGISTERS),
}


@dataclass
class HFBlock:
    """A layer of any of these families: they differ in names, layer scale and rotary embedding."""

    module: Any
    names: Names
    prefix: int
    has_cls: bool
    pads: bool  # the mask it is handed marks which patches are padding, and padding is gone before the first block

    @property
    def attention(self) -> Any:
        return getattr(self.module, self.names.attention)

    def select_inputs(self, index: Tensor | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BlockInputs:
        kwargs = dict(kwargs)
        mask = args[0] if args else kwargs.get("attention_mask")
        if mask is not None and not self.pads and not torch.compiler.is_exporting():
            raise UserError(WITH_MASK)
        if args:
            args = (None, *args[1:])
        else:
            kwargs["attention_mask"] = None
        if index is not None and kwargs.get("position_embeddings") is not None:
            kwargs["position_embeddings"] = tuple(gather_rotary(table, index) for table in kwargs["position_embeddings"])
        return args, kwargs

    def attend(self, x: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> tuple[Tensor, Attention]:
        attn = self.attention
        seen: list[Attention] = []

        def run(hidden_states: Tensor, *_: Any, position_embeddings: Any = None, **__: Any) -> tuple[Tensor, Tensor | None]:
            q, k, v = (
                linear(hidden_states).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)  # (B, H, T, d)
                for linear in (attn.q_proj, attn.k_proj, attn.v_proj)
            )
            if position_embeddings is not None:
                q, k = (self._rotate(part, *position_embeddings).type_as(v) for part in (q, k))
            scale = attn.head_dim**-0.5
            out, lse = attend(q, k, v, bias, scale)  # (B, H, T, d)
            seen.append(Attention(q, k, self.prefix, scale, bias, lse, self.has_cls, v=v))
            eager = attn.config._attn_implementation == "eager"  # which returns its weights, for output_attentions
            weights = seen[0].weights().to(q.dtype) if eager else None
            return getattr(attn, self.names.out)(out.transpose(1, 2).flatten(2)), weights

        normed = getattr(self.module, self.names.norm1)(x)
        if self.names is ENCODER:
            out = call_attention(attn, run, hidden_states=normed, **kwargs)[0]
        else:
            out = call_attention(attn, run, normed, *args, **kwargs)[0]
        return x + self._branch(out, 1), seen[0]

    def mlp(self, x: Tensor) -> Tensor:
        return x + self._branch(self.module.mlp(getattr(self.module, self.names.norm2)(x)), 2)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of the patches, pairs half a head apart; prefix tokens have none. (B, H, P+N, d) -> same."""
        first, second = x[:, :, self.prefix :].chunk(2, dim=-1)
        patches = x[:, :, self.prefix :] * cos + torch.cat([-second, first], dim=-1) * sin
        return torch.cat([x[:, :, : self.prefix], patches], dim=2)

    def _branch(self, out: Tensor, number: int) -> Tensor:
        """What a layer does to a branch before it is added: layer scale; in training stochastic depth or dropout."""
        for name in (f"layer_scale{number}", "drop_path", "dropout"):
            if hasattr(self.module, name):
                out = getattr(self.module, name)(out)
        return out


def open_tower(model: nn.Module) -> Tower | None:
    """The vision tower of a transformers model; None if it is of none of these families."""
    found = [folder for base in type(model).__mro__ if (folder := _folder(base)) in KINDS]
    if not found:
        if own_class(model).__module__.startswith("transformers."):
            families = ", ".join(kind.family for kind in KINDS.values())
            raise Uncuttable(f"{type(model).__name__} is of no Hugging Face family that can be cut; known are {families}")
        return None
    folder, name = found[0], type(model).__name__
    kind = KINDS[folder]
    towers = getattr(sys.modules[f"transformers.models.{folder}.modeling_{folder}"], kind.tower)
    net: Any = next((module for module in model.modules() if isinstance(module, towers)), None)
    if net is None:
        raise Uncuttable(f"{name} holds no {kind.tower}, the vision tower that can be cut")
    if "MaskedImageModeling" in name:
        raise Uncuttable(f"{name} rebuilds the image from every patch, so none can be missing")
    if folder == "siglip2" and "ForImageClassification" in name:
        raise Uncuttable(f"{name} averages with the mask of all patches, so none can be missing; use Siglip2VisionModel")
    layers = unwrap_each(attrgetter(kind.layers)(net))
    if not all(hasattr(getattr(layer, kind.names.attention, None), "q_proj") for layer in layers):
        raise Uncuttable(f"the layers of this {name} are not laid out as in transformers 5; install transformers>=5")
    return _open(model, net, kind, layers)


def _folder(base: type) -> str:
    """The model folder that a class of transformers comes from, or nothing."""
    parts = base.__module__.split(".")
    return parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else ""


def _open(model: Any, net: Any, kind: Kind, layers: Any) -> Tower:
    prefix = sum(1 if token.dim() == 1 else token.shape[1] for token in (attrgetter(name)(net) for name in kind.tokens))
    has_cls, flexible = bool(kind.tokens), kind.family == "SigLIP2"
    blocks = [HFBlock(layer, kind.names, prefix, has_cls, pads=flexible) for layer in layers]
    head = getattr(net, "head", None)
    averages = type(model).__name__.endswith("ForImageClassification") and kind.family not in ("ViT", "DeiT")

    def check() -> None:
        for block in blocks:
            if block.module.training and block.module.gradient_checkpointing:
                raise UserError(
                    "gradient checkpointing runs blocks twice, so tokens would be cut twice; "
                    "call model.gradient_checkpointing_disable() first"
                )
            dropout = getattr(block.attention, "dropout", getattr(block.attention, "attention_dropout", 0.0))
            if block.module.training and dropout > 0:
                raise UserError("attention dropout cannot be trained with a plan on; set the config's attention dropout to 0")

    def check_mask(*args: Any, **kwargs: Any) -> dict[str, Any]:
        """While exporting, transformers makes a mask of its own if it is given none, so this looks at what it is given."""
        if kwargs.get("attention_mask") is not None and torch.compiler.is_exporting() and not flexible:
            raise UserError(WITH_MASK)
        return {}

    def on_layout(set_layout: Callable[[Layout], None]) -> list[Undo]:
        return siglip2.watch_shapes(net, set_layout) if flexible else watch_conv(attrgetter(kind.patches)(net), set_layout)

    def patch_pooling(sizes: Sizes) -> list[Undo]:
        undo = [blank_after(attrgetter(kind.last)(net), prefix, sizes)] if kind.norms_all else []
        if averages:
            undo.append(_weigh_mean(net, prefix, sizes))
        return undo if head is None else [*undo, bias_pooler(head.attention, sizes)]

    def project(x: Tensor) -> Tensor:
        x = attrgetter(kind.last)(net).forward(x)  # forward: hooks of a plan that is on are not for these tokens
        if head is not None:
            x = pool_single_token(head.attention, x)
            x = x + head.mlp(head.layernorm(x))
        return model.visual_projection(x) if hasattr(model, "visual_projection") else x

    grid, image_size = _sizes(net)
    has_any_grid = flexible or hasattr(net, "rope_embeddings")
    return Tower(
        family=f"Hugging Face {kind.family}",
        blocks=list(blocks),
        prefix=prefix,
        has_cls=has_cls,
        grid=grid,
        image_size=image_size,
        pools_cls=has_cls and not averages,
        check=check,
        on_layout=on_layout,
        patch_pooling=patch_pooling,
        entries=[Entry(net, "forward", context=check_mask, runs_all=True)],
        project=project,
        pooling=None if head is None else lambda view: _query_row(net, view),
        per_token=has_any_grid,
        pads=flexible,
        resize=partial(siglip2.resize if flexible else _resize, net) if has_any_grid or grid[0] == grid[1] else None,
        no_resize_reason=f"transformers interpolates position embeddings of square grids only, not of {grid[0]} x {grid[1]}",
    )


def _resize(net: Any, resizing: Resizing) -> list[Undo]:
    """Has the tower see images of another size, with its position embeddings interpolated by its own code."""
    to, parameters = resizing.to, inspect.signature(net.embeddings.forward).parameters
    named = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in parameters else {}

    def embed(stock: Callable[..., Any], pixel_values: Tensor, *args: Any, **kwargs: Any) -> Any:
        return stock(resize_images(pixel_values, to), *args, **kwargs | named)

    undo = [replace(net.embeddings, "forward", embed)]
    if hasattr(net, "rope_embeddings"):
        undo.append(replace(net.rope_embeddings, "forward", lambda stock, images: stock(resize_images(images, to))))
    return undo


def _sizes(net: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid and the image size in the config, each (h, w)."""

    def pair(size: Any) -> tuple[int, int]:
        return (size, size) if isinstance(size, int) else (size[0], size[1])

    ph, pw = pair(net.config.patch_size)
    if not hasattr(net.config, "image_size"):  # SigLIP2: any grid, with position embeddings made for a square one
        side = math.isqrt(net.config.num_patches)
        return (side, side), (side * ph, side * pw)
    height, width = pair(net.config.image_size)
    return (height // ph, width // pw), (height, width)


def _query_row(net: Any, view: View) -> Tensor:
    """How much the pooling head's probe attends to each patch: (B, N)."""
    attention = net.head.attention
    weight, offset, width = attention_weights(attention)[0], attention.in_proj_bias, attention.embed_dim
    x = net.post_layernorm.forward(view.tokens.to(weight.dtype))
    q = split_heads(F.linear(net.head.probe, weight[:width], offset[:width]), attention.num_heads)
    k = split_heads(F.linear(x, weight[width : 2 * width], offset[width : 2 * width]), attention.num_heads)
    return query_row(q, k, None if view.sizes is None else log_sizes(view.sizes, view.n))


def _weigh_mean(net: Any, prefix: int, sizes: Sizes) -> Undo:
    """Classifiers that average the patches themselves: each token is scaled so that their mean is the weighted one."""

    def forward(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output, size = stock(*args, **kwargs), sizes()
        if size is not None:
            x = output.last_hidden_state
            share = size * (size.shape[1] / size.sum(-1, keepdim=True))  # (B, K), 1 on average
            output.last_hidden_state = torch.cat([x[:, :prefix], (x[:, prefix:] * share[..., None]).to(x.dtype)], dim=1)
        return output

    return replace(net, "forward", forward)


def image_encoder(model: nn.Module, unscaled: bool) -> Callable[[Tensor], Tensor] | None:
    """The pooled feature (of ViT and DeiT the normed CLS token); None for models that take no pixels."""
    net: Any = model
    kind = getattr(getattr(net, "config", None), "model_type", "")
    if "ForImageClassification" in type(net).__name__:
        net = getattr(net, net.base_model_prefix, None) or net.vision_model
    if hasattr(net, "get_image_features"):
        run = net.get_image_features
    elif getattr(net, "main_input_name", "") == "pixel_values":
        run = net
    else:
        return None
    config = getattr(net.config, "vision_config", None) or net.config
    flexible = "interpolate_pos_encoding" in inspect.signature(net.forward).parameters

    def resized(images: Tensor) -> dict[str, bool]:
        """Images of another size than the configured one have their position embeddings interpolated."""
        size = getattr(config, "image_size", None)
        h, w = size if isinstance(size, (tuple, list)) else (size, size)
        return {"interpolate_pos_encoding": True} if flexible and tuple(images.shape[-2:]) != (h, w) else {}

    if kind in ("vit", "deit"):
        return lambda images: run(pixel_values=images, **resized(images)).last_hidden_state[:, 0]
    if kind.startswith("siglip2"):
        return lambda images: pooled_output(run(**siglip2.batch_of(images, config.patch_size)))
    return lambda images: pooled_output(run(pixel_values=images, **resized(images)))


def pooled_output(output: Any) -> Tensor:
    """The feature in what a model returns: transformers 5 returns an object that holds it, older ones the feature itself."""
    if isinstance(output, Tensor):
        return output
    for name in ("image_embeds", "pooler_output"):
        feature = getattr(output, name, None)
        if feature is not None:
            return feature
    raise UserError(f"{type(output).__name__} holds no pooled feature; load the model with its pooling head")
