"""timm's VisionTransformer (ViT, DeiT, DINOv2, SigLIP) and Eva (EVA02, DINOv3, rotary ViTs), bare or in an open_clip model."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.errors import Uncuttable, UserError
from tokensieve.models.patching import Patch, call_attention, check_no_hooks, replace, set_attribute
from tokensieve.models.pooling import blank_after, log_sizes, query_row, split_heads, weighted_mean
from tokensieve.models.resizing import Resizing, resize_images
from tokensieve.models.tower import BlockInputs, Entry, Sizes, Tower, Undo, gather_rotary, watch_conv
from tokensieve.models.wrapped import own_class, unwrap_each
from tokensieve.scoring import Attention, attend

if TYPE_CHECKING:
    from tokensieve.core import View


@dataclass
class TimmBlock:
    """A Block or EvaBlock (norms before the branches), a ResPostBlock or EvaBlockPostNorm (after them)."""

    module: Any
    prefix: int
    has_cls: bool
    norm_after: bool

    @property
    def attention(self) -> Any:
        return self.module.attn

    def select_inputs(self, index: Tensor | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BlockInputs:
        if kwargs.get("attn_mask") is not None or kwargs.get("is_causal"):
            raise UserError("this model was called with an attention mask, which cannot follow a cut; call it without")
        rope = kwargs.get("rope")
        if index is not None and rope is not None:
            kwargs = dict(kwargs) | {"rope": gather_rotary(rope, index)}
        return args, kwargs

    def attend(self, x: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> tuple[Tensor, Attention]:
        attn = self.attention
        seen: list[Attention] = []

        def run(normed: Tensor, rope: Tensor | None = None, **_: Any) -> Tensor:
            q, k, v = self._heads(normed)
            q, k = attn.q_norm(q), attn.k_norm(k)
            if rope is not None:
                q, k = (self._rotate(part, rope).type_as(v) for part in (q, k))
            groups = getattr(attn, "num_kv_groups", 1)
            if groups > 1:
                k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
            if not attn.fused_attn:
                check_no_hooks(attn.attn_drop)  # the usual place to read attention maps
            out, lse = attend(q, k, v, bias, attn.scale)
            seen.append(Attention(q, k, self.prefix, attn.scale, bias, lse, self.has_cls, v=v))
            out = attn.norm(out.transpose(1, 2).flatten(2))  # (B, T, D)
            if getattr(attn, "gate", None) is not None:
                out = out * attn.gate(normed).sigmoid()
            return attn.proj_drop(attn.proj(out))

        normed = x if self.norm_after else self.module.norm1(x)
        out = call_attention(attn, run, normed, **{"attn_mask": None, "is_causal": False, **kwargs})
        return x + self._branch(out, 1), seen[0]

    def mlp(self, x: Tensor) -> Tensor:
        normed = x if self.norm_after else self.module.norm2(x)
        return x + self._branch(self.module.mlp(normed), 2)

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, T, D) -> q, k, v, each (B, H, T, d)."""
        attn = self.module.attn
        if attn.qkv is None:
            heads = attn.num_heads, getattr(attn, "num_kv_heads", attn.num_heads), getattr(attn, "num_kv_heads", attn.num_heads)
            return tuple(split_heads(p(x), h) for p, h in zip((attn.q_proj, attn.k_proj, attn.v_proj), heads, strict=True))
        if getattr(attn, "q_bias", None) is None:
            joint = attn.qkv(x)
        else:  # EVA keeps q's and v's biases apart and has none for k
            bias = torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
            joint = attn.qkv(x) + bias if getattr(attn, "qkv_bias_separate", False) else F.linear(x, attn.qkv.weight, bias)
        return joint.unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def _rotate(self, x: Tensor, rope: Tensor) -> Tensor:
        """Rotary embedding of the patches; prefix tokens have none. (B, H, P+N, d) -> same."""
        from timm.layers import apply_rot_embed_cat

        patches = apply_rot_embed_cat(x[:, :, self.prefix :], rope, half=getattr(self.module.attn, "rotate_half", False))
        return torch.cat([x[:, :, : self.prefix], patches], dim=2)

    def _branch(self, out: Tensor, number: int) -> Tensor:
        """What a block does to a branch before it is added: norm or layer scale, then stochastic depth in training."""
        module = self.module
        if self.norm_after:
            out = getattr(module, f"norm{number}")(out)
        elif hasattr(module, f"ls{number}"):
            out = getattr(module, f"ls{number}")(out)
        elif getattr(module, f"gamma_{number}") is not None:
            out = out * getattr(module, f"gamma_{number}")
        return getattr(module, f"drop_path{number}")(out)


def open_tower(model: nn.Module) -> Tower | None:
    """The tower that a timm model is; None if it is not timm's."""
    if "timm" not in sys.modules:  # then no model can be one of its
        return None
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    if isinstance(model, VisionTransformer | Eva):
        return _open(model, f"timm {'Eva' if isinstance(model, Eva) else 'VisionTransformer'}")
    if own_class(model).__module__.startswith("timm."):
        raise Uncuttable(f"timm's {type(model).__name__} is neither a VisionTransformer nor an Eva, the two that can be cut")
    return None


def open_wrapped(visual: Any) -> Tower:
    """The timm tower of an open_clip model, with the projection that open_clip puts on it."""
    from timm.models.eva import Eva
    from timm.models.vision_transformer import VisionTransformer

    trunk = visual.trunk
    if not isinstance(trunk, VisionTransformer | Eva):
        raise Uncuttable(
            f"its vision tower is timm's {type(trunk).__name__}, which is neither a VisionTransformer nor an Eva, "
            "the two that can be cut"
        )
    tower = _open(trunk, f"open_clip with timm {'Eva' if isinstance(trunk, Eva) else 'VisionTransformer'}")
    pre_logits = tower.project

    def project(x: Tensor) -> Tensor:
        x = pre_logits(x)
        distilled = getattr(trunk, "head_dist", None)
        x = trunk.head(x) if distilled is None else (trunk.head(x) + distilled(x)) / 2
        return visual.head(x)

    tower.project = project
    return tower


def _open(trunk: Any, family: str) -> Tower:
    has_cls = trunk.cls_token is not None
    blocks = [_open_block(block, trunk.num_prefix_tokens, has_cls) for block in unwrap_each(trunk.blocks)]
    embed = trunk.patch_embed
    if getattr(embed, "grid_size", None) is None or getattr(embed, "proj", None) is None:
        raise Uncuttable("its patch embedding has no image size; create it with img_size=..., or call set_input_size(...)")
    pool = trunk.attn_pool
    latent = pool is not None and hasattr(pool, "latent")
    if latent and pool.pos_embed is not None:
        raise Uncuttable("its pooling head adds position embeddings of its own, which could not follow a cut")

    def check() -> None:
        if trunk.grad_checkpointing:
            raise UserError(
                "gradient checkpointing runs blocks twice, so tokens would be cut twice; "
                "call model.set_grad_checkpointing(False) first"
            )
        for block in blocks:
            if block.module.training and block.module.attn.attn_drop.p > 0:
                raise UserError("attention dropout cannot be trained with a plan on; create the model with attn_drop_rate=0")

    return Tower(
        family=family,
        blocks=list(blocks),
        prefix=trunk.num_prefix_tokens,
        has_cls=has_cls,
        grid=tuple(embed.grid_size),
        image_size=tuple(embed.img_size),
        pools_cls=trunk.global_pool == "token" and pool is None,
        check=check,
        on_layout=lambda set_layout: watch_conv(embed.proj, set_layout),
        patch_pooling=lambda sizes: _weigh_pooling(trunk, sizes),
        entries=[
            Entry(trunk, "forward", runs_all=True),
            Entry(trunk, "forward_intermediates"),
            Entry(trunk, "forward_features", "part", runs_all=True),
            Entry(trunk, "forward_head", "head", follows="forward_features"),
        ],
        project=lambda x: _project(trunk, x),
        pooling=(lambda view: _query_row(trunk, view)) if latent else None,
        per_token=getattr(trunk, "rope", None) is not None,
        resize=partial(_resize, trunk),
    )


def _resize(trunk: Any, resizing: Resizing) -> list[Undo]:
    """Has the tower see smaller images. timm's dynamic image size interpolates position embeddings and rotary angles."""
    from timm.layers import Format

    embed, to = trunk.patch_embed, resizing.to
    undo = (
        []
        if trunk.dynamic_img_size
        else [
            set_attribute(trunk, "dynamic_img_size", True),
            set_attribute(embed, "strict_img_size", False),
            set_attribute(embed, "flatten", False),
            set_attribute(embed, "output_fmt", Format.NHWC),
            replace(trunk, "_pos_embed", _embed_positions),
        ]
    )
    rope: Any = getattr(trunk, "rope", None)
    if getattr(rope, "feat_shape", None) is not None:  # it keeps the angles of one grid
        smaller = copy.deepcopy(rope)
        smaller.update_feat_shape([side // patch for side, patch in zip(to.size, embed.patch_size, strict=True)])
        undo.append(replace(rope, "get_embed", lambda *_, **__: smaller.get_embed().to(embed.proj.weight.device)))
    return [*undo, replace(embed, "forward", lambda stock, x: stock(resize_images(x, to)))]


def _embed_positions(stock: Callable[[Tensor], Any], x: Tensor) -> Any:
    """The tokens with their positions, and rotary angles; timm's own code cannot do it for an empty batch of any image size."""
    if len(x):
        return stock(x)
    out = stock(x.new_zeros((1, *x.shape[1:])))
    return (out[0][:0], *out[1:]) if isinstance(out, tuple) else out[:0]


def _open_block(block: Any, prefix: int, has_cls: bool) -> TimmBlock:
    from timm.layers import Attention as Plain
    from timm.layers import AttentionRope
    from timm.models.eva import EvaAttention, EvaBlock, EvaBlockPostNorm
    from timm.models.vision_transformer import Block, ResPostBlock

    if own_class(block) not in (Block, ResPostBlock, EvaBlock, EvaBlockPostNorm):
        raise Uncuttable(f"its blocks are timm's {type(block).__name__}, not an attention and then an MLP")
    if own_class(block.attn) not in (Plain, AttentionRope, EvaAttention):
        raise Uncuttable(f"its attention is timm's {type(block.attn).__name__}, which is no softmax of q k^T alone")
    return TimmBlock(block, prefix, has_cls, norm_after=isinstance(block, ResPostBlock | EvaBlockPostNorm))


def _project(trunk: Any, x: Tensor) -> Tensor:
    """What the model hands its classifier, for each token as if it were alone: (B, N, D) -> (B, N, D)."""
    x, pool = trunk.norm.forward(x), trunk.attn_pool  # forward: hooks of a plan that is on are not for these tokens
    if pool is not None and hasattr(pool, "latent"):
        width = pool.kv.weight.shape[0] // 2
        offset = None if pool.kv.bias is None else pool.kv.bias[width:]
        x = pool.proj_drop(pool.proj(F.linear(x, pool.kv.weight[width:], offset)))
        if pool.mlp is not None:
            x = x + pool.mlp(pool.norm(x))
    elif pool is not None:
        x = pool.post_norm(pool.pre_norm(x))
    return trunk.head_drop(trunk.fc_norm(x))


def _query_row(trunk: Any, view: View) -> Tensor:
    """How much the pooling head's latent query attends to each patch: (B, N)."""
    pool = trunk.attn_pool
    x = torch.cat([view.prefix, view.tokens], dim=1) if _pools_prefix(trunk) else view.tokens
    x = trunk.norm.forward(x.to(pool.kv.weight.dtype))
    width = pool.kv.weight.shape[0] // 2
    offset = None if pool.kv.bias is None else pool.kv.bias[:width]
    k = pool.k_norm(split_heads(F.linear(x, pool.kv.weight[:width], offset), pool.num_heads))
    q = pool.q_norm(split_heads(pool.q(pool.latent), pool.num_heads))
    bias = None if view.sizes is None else log_sizes(view.sizes, x.shape[1])
    return query_row(q, k, bias)[:, -view.n :]


def _pools_prefix(trunk: Any) -> bool:
    """Whether the pooling head sees the prefix tokens too: Eva's does always."""
    return getattr(trunk, "pool_include_prefix", True) and trunk.num_prefix_tokens > 0


def _weigh_pooling(trunk: Any, sizes: Sizes) -> list[Undo]:
    pool = trunk.attn_pool
    if pool is not None and not hasattr(pool, "latent"):
        raise Uncuttable(
            f"its pooling head ({type(pool).__name__}) takes no sizes, which merged tokens have, and those of a selector in "
            "training; use rest=drop, with a selector that is trained"
        )
    if pool is None:
        pooling = replace(trunk, "pool", _sized_pool(trunk, sizes), reimplements=True)
        return [pooling, blank_after(trunk.norm, trunk.num_prefix_tokens, sizes)]

    def add_bias(module: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        size = sizes()
        if size is not None:
            kwargs = kwargs | {"attn_mask": log_sizes(size, args[0].shape[1]).to(args[0].dtype)}
        return args, kwargs

    bias = pool.register_forward_pre_hook(Patch(add_bias), with_kwargs=True).remove
    return [blank_after(trunk.norm, trunk.num_prefix_tokens, sizes), bias]


def _sized_pool(trunk: Any, sizes: Sizes) -> Callable[..., Tensor]:
    """Average pooling weighs by size; the maximum is over tokens that stand for something."""

    def pool(stock: Callable[..., Tensor], x: Tensor, pool_type: str | None = None) -> Tensor:
        size, kind = sizes(), trunk.global_pool if pool_type is None else pool_type
        if size is None or kind not in ("avg", "max", "avgmax"):
            return stock(x, pool_type)
        if getattr(trunk, "pool_include_prefix", False):
            size = F.pad(size, (trunk.num_prefix_tokens, 0), value=1.0)
        else:
            x = x[:, trunk.num_prefix_tokens :]
        mean = weighted_mean(x, size)
        if kind == "avg":
            return mean
        most = x.masked_fill((size == 0)[..., None], -torch.inf).amax(dim=1)
        return most if kind == "max" else 0.5 * (most + mean)

    return pool


def image_encoder(model: nn.Module, unscaled: bool) -> Callable[[Tensor], Tensor] | None:
    """What the model hands its classifier; None for other models."""
    net: Any = model
    if not hasattr(net, "forward_features") or not hasattr(net, "forward_head"):
        return None
    return lambda images: net.forward_head(net.forward_features(images), pre_logits=True)
