"""Adapter for the language decoder of a Hugging Face model: its layers, its masks, and the attention of one layer.

Every decoder built like Llama is supported: layers in `layers`, each with `self_attn` (q_proj, k_proj, optional q/k norms) and
`input_layernorm`, called with position_embeddings, a mask and a cache (Llama, Mistral, Qwen2, Qwen2-VL, Qwen3, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokensieve.errors import Uncuttable, UserError
from tokensieve.models.sight import LayerKind, Sight
from tokensieve.models.wrapped import unwrap_each
from tokensieve.scoring import Attention, TextRows, cap_logits, gather_rows, gather_tokens

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
PASSING_HOOKS = ("transformers.utils.output_capturing", "torch.distributed.fsdp.")  # modules of hooks that read no states
MASKS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")  # attention implementations whose masks can be made here


class Projected(NamedTuple):
    """What the projections of a layer's attention returned for its tokens, before norms and rotation."""

    q: Tensor  # (B, L, H d)
    k: Tensor
    cos: Tensor  # (1 or B, L, d), the rotary tables of the layer
    sin: Tensor


@dataclass
class Decoder:
    """A stack of decoder layers."""

    module: Any  # the module with the layers, called with inputs_embeds
    layers: list[Any]
    width: int  # D of its hidden states
    kinds: list[LayerKind]  # of each layer

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def implementation(self) -> str:
        """The attention implementation of transformers, for example "sdpa"."""
        return str(self.module.config._attn_implementation)

    @property
    def takes_bias(self) -> bool:
        """Whether the attention implementation supports a bias on the logits of each key."""
        return not self.implementation.startswith("flash")

    def check_bias(self) -> None:
        """Raises a UserError if the attention implementation supports no bias."""
        if not self.takes_bias:
            raise UserError('a soft mask needs attn_implementation="sdpa" or "eager"; flash attention does not support one')

    def check(self, length: int) -> None:
        """Raises a UserError if the decoder cannot be cut in its current state, or the sequence is too long for it."""
        if self.implementation not in MASKS:
            allowed = ", ".join(MASKS)
            raise UserError(
                f"attention implementation {self.implementation!r} takes masks that cannot follow a cut; load the model with "
                f'attn_implementation="sdpa" (can be cut: {allowed})'
            )
        if any(layer.training and getattr(layer, "gradient_checkpointing", False) for layer in self.layers):
            raise UserError(
                "gradient checkpointing runs layers twice, so tokens would be cut twice; "
                "call model.gradient_checkpointing_disable() first"
            )
        window = min((kind.window for kind in self.kinds if kind.window is not None), default=length)
        if length > window and not self.takes_bias:
            raise UserError(
                f"{length} tokens are more than the decoder's sliding window of {window}, which flash attention would count by "
                'the tokens that are left; load the model with attn_implementation="sdpa", or use shorter prompts'
            )

    @property
    def has_windows(self) -> bool:
        """Whether some layers see a window of the tokens before each token only."""
        return any(kind.window is not None for kind in self.kinds)

    def layers_read(self, arguments: Mapping[str, Any]) -> int:
        """The number of first layers whose states are read with these arguments of the decoder: all if states are recorded or a
        layer has a hook, those to which deep features are added. (transformers leaves hooks for recording, which act on request
        only; those of FSDP gather weights.)
        """
        is_recorded = arguments.get("output_hidden_states") or getattr(self.module.config, "output_hidden_states", False)
        hooks = [hook for layer in self.layers for kind in _HOOKS for hook in getattr(layer, kind).values()]
        if is_recorded or not all((getattr(hook, "__module__", None) or "").startswith(PASSING_HOOKS) for hook in hooks):
            return self.depth
        return len(arguments.get("deepstack_visual_embeds") or ())

    def mask(self, sight: Sight, queries: int, bias: Tensor | None, like: Tensor) -> Tensor | None:
        """The attention mask for the last `queries` of T tokens, in the form that the layers expect.

        bias (B, T) is added to the logits of each key. The mask is None where a causal one is enough and the kernel makes it
        itself. like: has its device and dtype.
        """
        batch, total = sight.shape
        if not self.takes_bias:
            if bias is not None:
                self.check_bias()
            if sight.block is not None:
                raise UserError(
                    "in this model, image tokens see those behind them, and flash attention takes no mask for it; "
                    'load the model with attn_implementation="sdpa"'
                )
            return sight.alive
        kernel_is_causal = getattr(self.layers[0].self_attn, "is_causal", True)  # False: PaliGemma's, which needs a mask
        needs_none = queries == 1 or (queries == total and kernel_is_causal)
        if sight.is_causal and bias is None and self.implementation == "sdpa" and needs_none:
            return None
        if sight.is_causal and bias is not None and queries == 1:  # the last token sees all
            return bias[:, None, None].to(like.dtype)
        visible = sight.of(torch.arange(total - queries, total, device=like.device)[None])[:, None]  # (B or 1, 1, Q, T)
        visible = visible.expand(batch, 1, queries, total)
        if bias is None and self.implementation == "sdpa":
            return visible
        values = like.new_zeros(()) if bias is None else bias[:, None, None].to(like.dtype)
        return torch.where(visible, values, torch.finfo(like.dtype).min)

    def attention(
        self,
        layer: int,
        source: Tensor | Projected,
        tables: tuple[Tensor, Tensor],
        sight: Sight,
        last: Tensor,
        at: Tensor,
        bias: Tensor | None = None,
        question: Callable[[], tuple[Tensor, Tensor]] | None = None,
    ) -> Attention:
        """The attention of a layer: the row of one token, and the vision tokens. Queries are computed when they are asked for.

        source: the layer's input states (B, L, D), or what its projections returned; tables: rotary (cos, sin), (B, L, d) each;
        sight: what each of the L tokens sees; last (B,): the token used like CLS, whose row covers all tokens that it sees;
        at (B, N): the vision tokens; bias (B, L): added to the logits of each key. Vision tokens attend to each other in both
        directions, because the order of patches is only that of the raster. question: returns (B, T), positions of the text,
        and (B, T), False where they are padding; it is called when a method asks for the text.
        """
        attn = self.layers[layer].self_attn
        normed = self.layers[layer].input_layernorm(source) if isinstance(source, Tensor) else None
        scale, cap = float(attn.scaling), getattr(attn, "attn_logit_softcapping", None)

        def project(name: str, index: Tensor | None) -> Tensor:
            """Rotated queries or keys (B, H, L, d) of all tokens, or of those at an index (B, K)."""
            known: Tensor = getattr(source, name) if normed is None else normed
            out = known if index is None else gather_rows(known, index)
            if normed is not None:
                out = getattr(attn, f"{name}_proj")(out)
            cos, sin = tables if index is None else tuple(gather_rows(table, index) for table in tables)
            return _rotate(self._heads(attn, name, out), cos, sin)

        def logits_of(q: Tensor) -> Tensor:
            """(B, H, Q, d) -> (B, H, Q, L)"""
            logits = cap_logits((q.float() * scale) @ k.float().transpose(-1, -2), cap)
            return logits if bias is None else logits + bias[:, None, None]

        k = project("k", None)
        own = project("q", last[:, None])  # (B, H, 1, d)
        if own.shape[1] != k.shape[1]:
            k = k.repeat_interleave(own.shape[1] // k.shape[1], dim=1)
        logits = logits_of(own).masked_fill(~sight.of(last[:, None])[:, None], -torch.inf)  # (B, H, 1, L)
        lse = logits.logsumexp(-1)  # (B, H, 1)
        rows = torch.cat([last[:, None], at], dim=1)  # (B, 1+N)

        def read_text() -> TextRows:
            assert question is not None
            words, mask = question()
            q = project("q", words)  # (B, H, T, d)
            seen = sight.of(words)  # (B, T, L)
            lse = logits_of(q).masked_fill(~seen[:, None], -torch.inf).logsumexp(-1)
            follows = seen.gather(2, at.amax(1)[:, None, None].expand(-1, words.shape[1], 1))[..., 0]  # (B, T)
            sees = None if sight.window is None else seen.gather(2, at[:, None].expand(-1, words.shape[1], -1))  # (B, T, N)
            return TextRows(q, gather_tokens(k, words), lse, mask, follows, sees)

        row = (logits - lse[..., None]).exp().mean(1)[:, 0].gather(1, at)  # (B, N)
        return Attention(
            lambda: project("q", rows),
            gather_tokens(k, rows),
            prefix=1,
            scale=scale,
            cap=cap,
            bias=None if bias is None else bias.gather(1, rows)[:, None, None],
            row=row,
            first_lse=lse,
            first_sees=None if sight.window is None else sight.of(last[:, None])[:, 0].gather(1, rows),
            text=None if question is None else read_text,
        )

    def _heads(self, attn: Any, name: str, projected: Tensor) -> Tensor:
        heads: Tensor = projected.unflatten(-1, (-1, attn.head_dim))  # (B, L, H, d)
        norm = getattr(attn, f"{name}_norm", None)
        return (heads if norm is None else norm(heads)).transpose(1, 2)


def open_decoder(module: Any, name: str) -> Decoder:
    """The decoder of a model; raises Uncuttable, with the reason, if its layers are not built like Llama's."""
    layers = getattr(module, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise Uncuttable(f"the language model of {name}, a {type(module).__name__}, has no list of decoder layers")
    inner = unwrap_each(layers)
    for layer in inner:
        attn = getattr(layer, "self_attn", None)
        if not all(hasattr(attn, attribute) for attribute in ("q_proj", "k_proj", "head_dim", "scaling")):
            raise Uncuttable(f"the decoder layers of {name} ({type(layer).__name__}) are not built like Llama's")
    return Decoder(module, inner, int(module.config.hidden_size), [_kind(module.config, layer) for layer in inner])


def _kind(config: Any, layer: Any) -> LayerKind:
    """The kind of a layer: its name where the config lists the layers, and its window."""
    attn = layer.self_attn
    name = getattr(attn, "layer_type", None) or "full_attention"
    default = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return LayerKind(name, getattr(attn, "sliding_window", default))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, pairs half a head apart. x (B, H, L, d); cos, sin (B or 1, L, d)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
