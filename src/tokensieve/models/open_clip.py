"""open_clip's own VisionTransformer, with all its variants: pooling, q/k norm, layer scale, any grid."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.errors import Uncuttable, UserError
from tokensieve.models import timm
from tokensieve.models.patching import call_attention, replace
from tokensieve.models.pooling import bias_pooler, pool_single_token, weighted_mean, zero_empty_tokens
from tokensieve.models.resizing import Resizing, resize_images, resize_positions
from tokensieve.models.tower import BlockInputs, Entry, Sizes, Tower, Undo, watch_conv
from tokensieve.models.wrapped import attention_weights, own_class, unwrap_each, without_adapter
from tokensieve.scoring import Attention, attend


@dataclass
class OpenBlock:
    """A ResidualAttentionBlock, or the custom one with q/k norm and its relatives."""

    module: Any
    prefix: int

    @property
    def attention(self) -> Any:
        return self.module.attn

    def attention_at(self, x: Tensor, bias: Tensor | None = None) -> Attention:
        attn = self.module.attn
        weight, offset, width = attention_weights(attn)[0], attn.in_proj_bias, x.shape[-1]
        both = F.linear(self.module.ln_1(x), weight[: 2 * width], None if offset is None else offset[: 2 * width])
        q, k = self._normed(*self._heads(both, 2))
        return Attention(q, k, self.prefix, q.shape[-1] ** -0.5, bias)

    def select_inputs(self, index: Tensor | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BlockInputs:
        return args, kwargs  # its tower hands it nothing but tokens

    def attend(self, x: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> tuple[Tensor, Attention]:
        attn = self.attention
        is_plain = isinstance(without_adapter(attn), nn.MultiheadAttention)  # it uses the weights of out_proj only
        seen: list[Attention] = []

        def run(normed: Tensor, *_: Any, **__: Any) -> Any:
            joint, output = attention_weights(attn) if is_plain else (attn.in_proj_weight, None)
            q, k, v = self._heads(F.linear(normed, joint, attn.in_proj_bias), 3)
            q, k = self._normed(q, k)
            scale = q.shape[-1] ** -0.5
            out, lse = attend(q, k, v, bias, scale)  # (B, H, T, d)
            seen.append(Attention(q, k, self.prefix, scale, bias, lse, v=v))
            if getattr(attn, "head_scale", None) is not None:
                out = out * attn.head_scale
            out = out.transpose(1, 2).flatten(2)  # (B, T, D)
            if output is not None:
                return F.linear(out, output, attn.out_proj.bias), None
            return attn.out_proj(attn.ln_inner(out))

        normed = self.module.ln_1(x)
        if is_plain:
            out = call_attention(attn, run, normed, normed, normed, need_weights=False, attn_mask=None)[0]
        else:
            out = self.module.ln_attn(call_attention(attn, run, normed, attn_mask=None))
        return x + self.module.ls_1(out), seen[0]

    def mlp(self, x: Tensor) -> Tensor:
        return x + self.module.ls_2(self.module.mlp(self.module.ln_2(x)))

    def _heads(self, joint: Tensor, parts: int) -> tuple[Tensor, ...]:
        """(B, T, parts * D) -> parts times (B, H, T, d)."""
        heads = self.module.attn.num_heads
        return joint.unflatten(2, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        attn = self.module.attn
        return (attn.ln_q(q), attn.ln_k(k)) if hasattr(attn, "ln_q") else (q, k)


def open_tower(model: nn.Module) -> Tower | None:
    """The tower of a CLIP, CustomTextCLIP, CoCa or a bare VisionTransformer; None if it is not open_clip's."""
    if "open_clip" not in sys.modules:  # then no model can be one of its
        return None
    from open_clip.model import CLIP, CustomTextCLIP
    from open_clip.timm_model import TimmModel
    from open_clip.transformer import Attention as CustomAttention
    from open_clip.transformer import CustomResidualAttentionBlock, ResidualAttentionBlock, VisionTransformer

    visual: Any = getattr(model, "visual", model)
    if isinstance(visual, TimmModel):
        return timm.open_wrapped(visual)
    if not isinstance(visual, VisionTransformer):
        if not isinstance(model, CLIP | CustomTextCLIP) and not own_class(model).__module__.startswith("open_clip."):
            return None
        raise Uncuttable(f"its vision tower is a {type(visual).__name__}, which has no patch tokens that could be cut")
    transformer = visual.transformer
    if not transformer.batch_first:
        raise Uncuttable("its transformer is not batch-first; load the model with open_clip 2.26 or newer")
    blocks: list[Any] = unwrap_each(transformer.resblocks)
    for block in blocks:
        if not isinstance(block, ResidualAttentionBlock | CustomResidualAttentionBlock):
            raise Uncuttable(f"its blocks are {type(block).__name__}, not open_clip's")
        if not isinstance(without_adapter(block.attn), nn.MultiheadAttention | CustomAttention):
            raise Uncuttable(f"its attention is a {type(block.attn).__name__}, not open_clip's")
        if getattr(block.attn, "logit_scale", None) is not None:
            raise Uncuttable("its blocks use scaled cosine attention, which open_clip itself cannot run on images")

    def check() -> None:
        if transformer.grad_checkpointing:
            raise UserError(
                "gradient checkpointing runs blocks twice, so tokens would be cut twice; "
                "call model.set_grad_checkpointing(False) first"
            )

    return Tower(
        family="open_clip VisionTransformer",
        blocks=[OpenBlock(block, prefix=1) for block in blocks],
        prefix=1,
        has_cls=True,
        grid=tuple(visual.grid_size),
        image_size=tuple(visual.image_size),
        pools_cls=visual.pool_type == "tok" and visual.attn_pool is None,
        check=check,
        on_layout=lambda set_layout: watch_conv(visual.conv1, set_layout),
        patch_pooling=lambda sizes: _weigh_pooling(visual, sizes),
        entries=[
            Entry(visual, "forward", runs_all=True),
            *([Entry(visual, "forward_intermediates")] if hasattr(visual, "forward_intermediates") else []),
        ],
        project=lambda x: _project(visual, x),
        resize=partial(_resize, visual) if hasattr(visual, "_embeds") else None,
        no_resize_reason="this version of open_clip embeds images in another way; install open_clip 2.26 or newer",
    )


def _resize(visual: Any, resizing: Resizing) -> list[Undo]:
    """Has the tower see images of another size, with its position embeddings interpolated."""

    def embed(stock: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        x = visual.conv1(resize_images(x, resizing.to))  # (B, D, h, w)
        grid, table = (x.shape[2], x.shape[3]), visual.positional_embedding
        patches = resize_positions(table[1:], tuple(visual.grid_size), grid)
        x = x.flatten(2).transpose(1, 2)  # (B, N, D)
        x = torch.cat([visual.class_embedding.to(x.dtype).expand(x.shape[0], 1, -1), x], dim=1)
        x = x + torch.cat([table[:1], patches]).to(x.dtype)
        out: Tensor = visual.ln_pre(visual.patch_dropout(x))
        return out

    return [replace(visual, "_embeds", embed, reimplements=True)]


def _project(visual: Any, x: Tensor) -> Tensor:
    """ln_post and proj as the tower orders them; an attentional pooler sees each token alone. (B, N, D) -> (B, N, E)."""
    if visual.attn_pool is None:
        x = visual.ln_post(x)
    elif visual.attn_pool_contrastive is None:
        x = visual.ln_post(_pooled_alone(visual.attn_pool, x))
    else:
        x = visual.ln_post(x)
        if visual.attn_pool_type == "cascade":
            x = _pooled_alone(visual.attn_pool, x)
        x = _pooled_alone(visual.attn_pool_contrastive, x)
    return x if visual.proj is None else x @ visual.proj


def _pooled_alone(pooler: Any, x: Tensor) -> Tensor:
    return pool_single_token(pooler.attn, pooler.ln_k(x))


def _weigh_pooling(visual: Any, sizes: Sizes) -> list[Undo]:
    if visual.attn_pool is not None:
        pools = [visual.attn_pool]
        if visual.attn_pool_type == "parallel":
            pools.append(visual.attn_pool_contrastive)
        return [bias_pooler(pool.attn, sizes) for pool in pools]
    return [replace(visual, "_global_pool", _sized_pool(visual, sizes), reimplements=True)]


def _sized_pool(visual: Any, sizes: Sizes) -> Callable[..., Any]:
    """Average pooling weighs by size, and tokens of size 0 (rest=zero) are 0 again after the norm."""

    def pool(stock: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor) -> tuple[Tensor, Tensor]:
        size = sizes()
        if size is None:
            return stock(x)
        tokens = zero_empty_tokens(x[:, 1:], size)  # (B, K, D)
        if visual.pool_type == "avg":
            return weighted_mean(tokens, size), tokens
        return stock(torch.cat([x[:, :1], tokens], dim=1))

    return pool


def image_encoder(model: nn.Module, unscaled: bool) -> Callable[[Tensor], Tensor] | None:
    """encode_image of a CLIP, unscaled without its normalisation; the output of a bare image tower; None for other models."""
    net: Any = model
    if hasattr(net, "encode_image"):
        scales = unscaled and "normalize" in inspect.signature(net.encode_image).parameters
        return partial(net.encode_image, normalize=False) if scales else net.encode_image
    if own_class(net).__module__.startswith("open_clip.") and hasattr(net, "image_size"):
        return lambda images: out[0] if isinstance(out := net(images), tuple) else out
    return None
