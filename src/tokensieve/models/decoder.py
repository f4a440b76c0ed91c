"""The language decoder of a Hugging Face model, opened: its layers, its masks, the attention of one layer.

Any decoder of the Llama kind can be opened: layers in `layers`, each with `self_attn` (q_proj, k_proj, perhaps norms of both)
and `input_layernorm`, called with position_embeddings, a mask and a cache (Llama, Mistral, Qwen2, Qwen2-VL, Qwen3, ...).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.errors import Uncuttable, UserError
from tokensieve.scoring import Attention

MASKS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")  # attention implementations whose masks can be made here


@dataclass
class Decoder:
    """A stack of decoder layers."""

    module: Any  # what holds the layers, called with inputs_embeds
    layers: list[Any]
    width: int  # D of its hidden states

    @property
    def depth(self) -> int:
        return len(self.layers)

    @property
    def implementation(self) -> str:
        return str(self.module.config._attn_implementation)

    @property
    def takes_bias(self) -> bool:
        """Whether numbers can be added to the attention logits of single tokens."""
        return not self.implementation.startswith("flash")

    def check(self, length: int) -> None:
        """A UserError where the decoder is in a state in which it cannot be cut, or the sequence is too long for it."""
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

    def mask(self, alive: Tensor, queries: int, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The mask that the layers want for the last `queries` of the tokens `alive` (B, T), of which False ones are hidden.

        bias (B, T): added to the logits of each key. None where causality alone is meant and the kernel knows it.
        """
        total = alive.shape[1]
        plain = bias is None and bool(alive.all())
        if not self.takes_bias:
            if bias is not None:
                raise UserError('a soft mask needs attn_implementation="sdpa" or "eager"; flash attention takes none')
            return None if plain else alive
        if plain and self.implementation == "sdpa" and queries in (1, total):
            return None
        order = torch.arange(total, device=alive.device)
        causal = order <= order[total - queries :, None]  # (Q, T)
        visible = causal & alive[:, None, None]  # (B, 1, Q, T)
        if bias is None and self.implementation == "sdpa":
            return visible
        values = torch.zeros((), dtype=dtype, device=alive.device) if bias is None else bias[:, None, None].to(dtype)
        return torch.where(visible, values, torch.finfo(dtype).min)

    def attention(
        self,
        layer: int,
        x: Tensor,
        tables: tuple[Tensor, Tensor],
        alive: Tensor,
        last: Tensor,
        at: Tensor,
        bias: Tensor | None = None,
    ) -> Attention:
        """A layer's attention on the states x (B, L, D) that arrive at it: one token's row, and some tokens among each other.

        tables: (cos, sin), (B, L, d) each; alive (B, L); last (B,): the token that stands in the place of CLS, its row taken
        over all it may see; at (B, N): the vision tokens; bias (B, L): what is added to the logits of each key. Vision tokens
        see each other in both directions, since which of two patches comes first is an accident of the raster.
        """
        module = self.layers[layer]
        attn = module.self_attn
        normed = module.input_layernorm(x)
        q, k = (self._heads(attn, name, normed) for name in ("q", "k"))  # (B, H, L, d)
        q, k = (_rotate(part, *tables) for part in (q, k))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scale = float(attn.scaling)
        rows = torch.cat([last[:, None], at], dim=1)[:, None, :, None]  # (B, 1, 1+N, 1)
        biases = None if bias is None else torch.take_along_dim(bias[:, None, None], rows.transpose(2, 3), 3)  # (B, 1, 1, 1+N)
        chosen = Attention(torch.take_along_dim(q, rows, 2), torch.take_along_dim(k, rows, 2), 1, scale, biases)
        own = torch.take_along_dim(q, last[:, None, None, None], 2)  # (B, H, 1, d)
        logits = (own.float() * scale) @ k.float().transpose(-1, -2)  # (B, H, 1, L)
        logits = logits if bias is None else logits + bias[:, None, None]
        order = torch.arange(x.shape[1], device=x.device)
        hidden = ~alive | (order > last[:, None])  # (B, L)
        row = logits.masked_fill(hidden[:, None, None], -torch.inf).logsumexp(-1)  # (B, H, 1)
        chosen.lse = torch.cat([row, chosen.row_lse()[:, :, 1:]], dim=2)
        return chosen

    def _heads(self, attn: Any, name: str, x: Tensor) -> Tensor:
        made = getattr(attn, f"{name}_proj")(x).unflatten(-1, (-1, attn.head_dim))  # (B, L, H, d)
        norm = getattr(attn, f"{name}_norm", None)
        return (made if norm is None else norm(made)).transpose(1, 2)


def open_decoder(module: Any, name: str) -> Decoder:
    """The decoder inside a model; Uncuttable, with the reason, if its layers are of another kind."""
    layers = getattr(module, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise Uncuttable(f"the language model of {name}, a {type(module).__name__}, has no list of decoder layers")
    for layer in layers:
        attn = getattr(layer, "self_attn", None)
        if not all(hasattr(attn, wanted) for wanted in ("q_proj", "k_proj", "head_dim", "scaling")):
            raise Uncuttable(f"the decoder layers of {name} ({type(layer).__name__}) are not of the Llama kind")
    return Decoder(module, list(layers), int(module.config.hidden_size))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, pairs half a head apart. x (B, H, L, d); cos, sin (B or 1, L, d)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
