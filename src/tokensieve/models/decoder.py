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
from tokensieve.scoring import Attention, TextRows, gather_rows, gather_tokens

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
MASKS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")  # attention implementations whose masks can be made here


class Projected(NamedTuple):
    """What the projections of a layer's attention returned for its tokens, before norms and rotation."""

    q: Tensor  # (B, L, H d)
    k: Tensor


@dataclass
class Decoder:
    """A stack of decoder layers."""

    module: Any  # the module with the layers, called with inputs_embeds
    layers: list[Any]
    width: int  # D of its hidden states

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
        window = getattr(self.module.config, "sliding_window", None)
        if window is not None and getattr(self.module.config, "use_sliding_window", True) and length > window:
            raise UserError(
                f"{length} tokens are more than the decoder's sliding window of {window}, where a plan cannot follow; "
                "use shorter prompts, or set config.sliding_window to None"
            )

    def looks_between_layers(self, arguments: Mapping[str, Any]) -> bool:
        """Whether the states between layers are read with these arguments of the decoder: they are recorded or added to, or a
        layer has a hook. (transformers leaves hooks for recording on the layers, which act on request only.)
        """
        names = ("output_hidden_states", "deepstack_visual_embeds")
        if any(arguments.get(name) is not None and arguments.get(name) is not False for name in names):
            return True
        if getattr(self.module.config, "output_hidden_states", False):
            return True
        hooks = [hook for layer in self.layers for kind in _HOOKS for hook in getattr(layer, kind).values()]
        return any(getattr(hook, "__module__", None) != "transformers.utils.output_capturing" for hook in hooks)

    def mask(
        self, shape: tuple[int, int], queries: int, alive: Tensor | None, bias: Tensor | None, like: Tensor
    ) -> Tensor | None:
        """The attention mask for the last `queries` of T tokens, in the form that the layers expect.

        shape: B and T. Tokens where alive (B, T) is False are hidden; None: none is. bias (B, T) is added to the logits of each
        key. The mask is None where a causal one is enough and the kernel makes it itself. like: has its device and dtype.
        """
        total = shape[1]
        if not self.takes_bias:
            if bias is not None:
                self.check_bias()
            return alive
        if alive is None and bias is None and self.implementation == "sdpa" and queries in (1, total):
            return None
        if alive is None and bias is not None and queries == 1:  # the last token sees all
            return bias[:, None, None].to(like.dtype)
        order = torch.arange(total, device=like.device)
        visible = order <= order[total - queries :, None]  # (Q, T)
        if alive is not None:
            visible = visible & alive[:, None, None]  # (B, 1, Q, T)
        visible = visible.expand(shape[0], 1, queries, total)
        if bias is None and self.implementation == "sdpa":
            return visible
        values = like.new_zeros(()) if bias is None else bias[:, None, None].to(like.dtype)
        return torch.where(visible, values, torch.finfo(like.dtype).min)

    def attention(
        self,
        layer: int,
        source: Tensor | Projected,
        tables: tuple[Tensor, Tensor],
        alive: Tensor | None,
        last: Tensor,
        at: Tensor,
        bias: Tensor | None = None,
        question: Callable[[], tuple[Tensor, Tensor]] | None = None,
    ) -> Attention:
        """The attention of a layer: the row of one token, and the vision tokens. Queries are computed when they are asked for.

        source: the layer's input states (B, L, D), or what its projections returned; tables: rotary (cos, sin), (B, L, d) each;
        alive (B, L): False is hidden; last (B,): the token used like CLS, whose row covers all tokens that it can attend to;
        at (B, N): the vision tokens; bias (B, L): added to the logits of each key. Vision tokens attend to each other in both
        directions, because the order of patches is only that of the raster. question: returns (B, T), positions of the text,
        and (B, T), False where they are padding; it is called when a method asks for the text.
        """
        attn = self.layers[layer].self_attn
        normed = self.layers[layer].input_layernorm(source) if isinstance(source, Tensor) else None
        length, scale = tables[0].shape[1], float(attn.scaling)

        def project(name: str, index: Tensor | None) -> Tensor:
            """Rotated queries or keys (B, H, L, d) of all tokens, or of those at an index (B, K)."""
            known: Tensor = getattr(source, name) if normed is None else normed
            out = known if index is None else gather_rows(known, index)
            if normed is not None:
                out = getattr(attn, f"{name}_proj")(out)
            cos, sin = tables if index is None else tuple(gather_rows(table, index) for table in tables)
            return _rotate(self._heads(attn, name, out), cos, sin)

        k = project("k", None)
        own = project("q", last[:, None])  # (B, H, 1, d)
        if own.shape[1] != k.shape[1]:
            k = k.repeat_interleave(own.shape[1] // k.shape[1], dim=1)
        logits = (own.float() * scale) @ k.float().transpose(-1, -2)  # (B, H, 1, L)
        logits = logits if bias is None else logits + bias[:, None, None]
        hidden = torch.arange(length, device=last.device) > last[:, None]  # (B, L)
        hidden = hidden if alive is None else hidden | ~alive
        lse = logits.masked_fill(hidden[:, None, None], -torch.inf).logsumexp(-1)  # (B, H, 1)

        def read_text() -> TextRows:
            assert question is not None
            words, mask = question()
            q = project("q", words)  # (B, H, T, d)
            order = torch.arange(length, device=words.device)
            unseen = order > words[..., None]  # (B, T, L)
            unseen = unseen if alive is None else unseen | ~alive[:, None]
            logits = (q.float() * scale) @ k.float().transpose(-1, -2)  # (B, H, T, L)
            logits = logits if bias is None else logits + bias[:, None, None]
            lse = logits.masked_fill(unseen[:, None], -torch.inf).logsumexp(-1)
            return TextRows(q, gather_tokens(k, words), lse, mask, words > at.amax(1, keepdim=True))

        rows = torch.cat([last[:, None], at], dim=1)  # (B, 1+N)
        row = (logits - lse[..., None]).exp().mean(1)[:, 0].gather(1, at)  # (B, N)
        return Attention(
            lambda: project("q", rows),
            gather_tokens(k, rows),
            prefix=1,
            scale=scale,
            bias=None if bias is None else bias.gather(1, rows)[:, None, None],
            row=row,
            first_lse=lse,
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
    for layer in layers:
        attn = getattr(layer, "self_attn", None)
        if not all(hasattr(attn, attribute) for attribute in ("q_proj", "k_proj", "head_dim", "scaling")):
            raise Uncuttable(f"the decoder layers of {name} ({type(layer).__name__}) are not built like Llama's")
    return Decoder(module, list(layers), int(module.config.hidden_size))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, pairs half a head apart. x (B, H, L, d); cos, sin (B or 1, L, d)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
