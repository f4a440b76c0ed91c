"""The modules of SDTPS: TokenSparse, TokenAggregation, and both of them for three modalities, MultiModalSDTPS.

Each can be called as its authors call it, and as the method `sdtps` (sdtps.py, which has the formulas) does:

    TokenSparse        (tokens, self_attention, cross_attention_m2, cross_attention_m3, beta) -> SparseTokens
                       (tokens, own, others, noise) -> Sparse, from the global features
    TokenAggregation   (x, keep_policy) -> tokens; keep_policy of the selected tokens, or of all of them
    MultiModalSDTPS    three tensors of tokens, three global features -> three of tokens, three masks

Weight names are the authors', so their state dicts load. Selected tokens are in raster order everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from tokensieve.errors import UserError, describe_value, did_you_mean
from tokensieve.methods.settings import check_count, check_number
from tokensieve.scoring import cosine, full_precision, minmax, top

GUMBEL_MASSES = ("kept", "one")  # of the soft decision: as many as are kept, or 1 as a softmax has


@dataclass(frozen=True)
class Sparse:
    """The selection of TokenSparse among N tokens."""

    select_tokens: Tensor  # (B, S, C), in raster order
    extra_token: Tensor  # (B, 1, C)
    score_mask: Tensor  # (B, N), the decision matrix D: 1 for the kept, 0 for the others; it has the gradient of the choice
    index: Tensor  # (B, S)
    extra: Tensor  # (B, N), the share of each token in the extra one
    scores: Tensor  # (B, N)


class SparseTokens(NamedTuple):
    """The same selection as the five values that the authors' code unpacks."""

    select_tokens: Tensor  # (B, S, C), in raster order
    extra_token: Tensor  # (B, 1, C)
    score_mask: Tensor  # (B, N), D
    selected_mask: Tensor  # (B, S), D of the selected tokens: the keep_policy of TokenAggregation
    keep_indices: Tensor  # (B, S)


class TokenSparse(nn.Module):
    """Scores the tokens, keeps the best of them, and fuses the others into one extra token.

    Args:
        embed_dim: width C of the tokens; `dim` is another name of it.
        sparse_ratio: the share of the tokens that is kept, rounded up.
        use_gumbel: D has the slope of a softmax with Gumbel noise; otherwise that of the scores.
        gumbel_tau: temperature of that softmax; `tau` is another name of it.
        beta: weight of the similarities, unless a call gives another.
        gumbel_mass: "kept": the softmax times the number of kept tokens, so that it has D's mass; "one": the softmax itself.
    """

    def __init__(
        self,
        embed_dim: int = 512,
        sparse_ratio: float = 0.5,
        use_gumbel: bool = False,
        gumbel_tau: float = 1.0,
        *,
        beta: float = 0.25,
        gumbel_mass: str = "kept",
        dim: int | None = None,
        tau: float | None = None,
    ) -> None:
        super().__init__()
        embed_dim, gumbel_tau = embed_dim if dim is None else dim, gumbel_tau if tau is None else tau
        check_count("embed_dim", embed_dim)
        for name, value in {"sparse_ratio": sparse_ratio, "gumbel_tau": gumbel_tau}.items():
            check_number(name, value)
        if not isinstance(use_gumbel, bool):
            raise UserError(f"use_gumbel is True or False, not {describe_value(use_gumbel)}; write beta=... for that")
        if not 0 < sparse_ratio < 1:
            raise UserError(f"sparse_ratio={sparse_ratio} must be above 0 and below 1; the default is 0.5")
        if gumbel_tau <= 0:
            raise UserError(f"gumbel_tau={gumbel_tau} must be above 0; the default is 1")
        if gumbel_mass not in GUMBEL_MASSES:
            hint = did_you_mean(str(gumbel_mass), GUMBEL_MASSES)
            raise UserError(f"gumbel_mass={gumbel_mass} is not one of {', '.join(GUMBEL_MASSES)}.{hint}")
        check_beta(beta)
        self.sparse_ratio, self.beta, self.use_gumbel = sparse_ratio, beta, use_gumbel
        self.tau, self.gumbel_mass = gumbel_tau, gumbel_mass
        hidden = max(1, embed_dim // 4)
        self.score_predictor = nn.Sequential(nn.Linear(embed_dim, hidden), nn.GELU(), nn.Linear(hidden, 1))

    def kept(self, n: int) -> int:
        """The number of tokens kept of n; at least one is left for the extra token."""
        return min(math.ceil(round(self.sparse_ratio * n, 9)), n - 1)

    @full_precision
    def score(self, tokens: Tensor, own: Tensor, others: Tensor | None = None) -> Tensor:
        """s of tokens (B, N, C), with the own global feature (B, C) and the other modalities' (B, O, C): (B, N)."""
        with torch.no_grad():
            own_similarity = cosine(tokens, own[:, None])[..., 0]  # (B, N)
            other = [] if others is None else list(cosine(tokens, others).unbind(-1))
        return self._combine(tokens, own_similarity, other, self.beta)

    def _combine(self, tokens: Tensor, own: Tensor, others: list[Tensor], beta: float) -> Tensor:
        """s of tokens (B, N, C), from their similarities (B, N) with the own and the others' global features."""
        learned: Tensor = self.score_predictor(tokens.float())[..., 0].sigmoid()
        with torch.no_grad():
            guided = 2 * minmax(own.float())
            if others:
                guided = guided + 2 * torch.stack([minmax(row.float()) for row in others]).mean(0)
        return (1 - 2 * beta) * learned + beta * guided

    @overload
    def forward(self, tokens: Tensor, own: Tensor, others: Tensor | None = None, noise: Tensor | None = None) -> Sparse: ...

    @overload
    def forward(
        self,
        tokens: Tensor,
        self_attention: Tensor,
        cross_attention_m2: Tensor,
        cross_attention_m3: Tensor,
        beta: float | None = None,
    ) -> SparseTokens: ...

    def forward(self, tokens: Tensor, *args: Any, **named: Any) -> Sparse | SparseTokens:
        """Either form: `select_by_features` with global features (B, C), `select_by_attention` with similarities.

        Similarities are recognised by their names, or by the third argument: (B, N) is one, (B, O, C) are features.
        """
        by_name = any(name == "beta" or name.endswith(("_attention", "_m2", "_m3")) for name in named)
        if by_name or (len(args) > 1 and isinstance(args[1], Tensor) and args[1].dim() == 2):
            return self.select_by_attention(tokens, *args, **named)
        return self.select_by_features(tokens, *args, **named)

    @full_precision
    def select_by_features(
        self, tokens: Tensor, own: Tensor, others: Tensor | None = None, noise: Tensor | None = None
    ) -> Sparse:
        """noise (B, N): uniform numbers, for Gumbel in training; drawn from torch's generator where they are not given."""
        return self._select(tokens, self.score(tokens, own, others), noise)

    @full_precision
    def select_by_attention(
        self,
        tokens: Tensor,
        self_attention: Tensor,
        cross_attention_m2: Tensor,
        cross_attention_m3: Tensor,
        beta: float | None = None,
    ) -> SparseTokens:
        """As the authors call it: similarities (B, N) of the tokens with the own and the two other global features."""
        for name, row in {
            "self_attention": self_attention,
            "cross_attention_m2": cross_attention_m2,
            "cross_attention_m3": cross_attention_m3,
        }.items():
            if row.shape != tokens.shape[:2]:
                raise UserError(f"{name} has one number for each token, {tuple(tokens.shape[:2])}, not {tuple(row.shape)}")
        beta = self.beta if beta is None else beta
        check_beta(beta)
        found = self._select(tokens, self._combine(tokens, self_attention, [cross_attention_m2, cross_attention_m3], beta))
        selected = found.score_mask.gather(1, found.index)  # (B, S)
        return SparseTokens(found.select_tokens, found.extra_token, found.score_mask, selected, found.index)

    def _select(self, tokens: Tensor, scores: Tensor, noise: Tensor | None = None) -> Sparse:
        """The best tokens by these scores (B, N), and the extra token."""
        index = top(scores.detach(), self.kept(scores.shape[1]))  # (B, S)
        hard = torch.zeros_like(scores).scatter(1, index, 1.0)
        soft = scores
        if self.use_gumbel:
            soft = scores / self.tau
            if self.training:
                uniform = torch.rand_like(scores) if noise is None else noise
                soft = soft - (-uniform.clamp(1e-6, 1 - 1e-6).log()).log() / self.tau
            soft = soft.softmax(-1) * (index.shape[1] if self.gumbel_mass == "kept" else 1)
        decision = hard + (soft - soft.detach())
        extra = scores.masked_fill(hard.bool(), -torch.inf).softmax(-1)
        select_tokens = tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[2]))
        extra_token = (extra[:, None] @ tokens.float()).to(tokens.dtype)
        return Sparse(select_tokens, extra_token, decision, index, extra, scores)


class TokenAggregation(nn.Module):
    """Mixes any number of tokens into `keeped_patches`: (B, S, C) -> (B, keeped_patches, C)."""

    def __init__(self, dim: int = 512, keeped_patches: int = 26, dim_ratio: float = 0.2) -> None:
        super().__init__()
        check_count("dim", dim)
        check_count("keeped_patches", keeped_patches)
        check_number("dim_ratio", dim_ratio)
        self.keeped_patches = keeped_patches
        hidden = max(1, int(dim * dim_ratio))
        self.weight = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, keeped_patches))
        self.scale = nn.Parameter(torch.ones(1, 1, 1))

    @full_precision
    def shares(self, tokens: Tensor, keep_policy: Tensor | None = None, prior: Tensor | None = None) -> Tensor:
        """W (B, K, S), rows adding up to 1.

        Args:
            tokens: (B, S, C).
            keep_policy: (B, S), gates of the tokens, such as D's; 0 keeps a token out.
            prior: (B, K, S), above 0: what W is, up to the sums of its rows, where the network gives 0.
        """
        logits: Tensor = (self.scale * self.weight(tokens.float())).transpose(1, 2)  # (B, K, S)
        weight = (logits if prior is None else logits + prior.log()).softmax(-1)
        if keep_policy is None:
            return weight
        weight = weight * keep_policy[:, None]
        return weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)

    def forward(self, x: Tensor, keep_policy: Tensor | None = None) -> Tensor:
        """keep_policy: of the tokens x (B, S), or D of all tokens (B, N), of which x are the kept ones in raster order."""
        if keep_policy is not None and keep_policy.shape != x.shape[:2]:
            keep_policy = _of_kept(keep_policy, x)
        return (self.shares(x, keep_policy) @ x.float()).to(x.dtype)


class MultiModalTokens(NamedTuple):
    """What MultiModalSDTPS leaves of each modality, and its decision matrices D."""

    rgb: Tensor  # (B, K, C)
    nir: Tensor
    tir: Tensor
    rgb_mask: Tensor  # (B, N)
    nir_mask: Tensor
    tir_mask: Tensor


class MultiModalSDTPS(nn.Module):
    """SDTPS of RGB, near infrared and thermal infrared, each with its own weights and guided by the other two.

    128 patches of each leave int(num_patches * aggr_ratio * sparse_ratio) + 1 = 26 tokens. Arguments as in TokenSparse and
    TokenAggregation.
    """

    MODALITIES = ("rgb", "nir", "tir")

    def __init__(
        self,
        embed_dim: int = 512,
        num_patches: int = 128,
        sparse_ratio: float = 0.5,
        aggr_ratio: float = 0.4,
        use_gumbel: bool = False,
        gumbel_tau: float = 1.0,
        beta: float = 0.25,
        dim_ratio: float = 0.2,
    ) -> None:
        super().__init__()
        self.keeped_patches = aggregated_count(num_patches, sparse_ratio, aggr_ratio)
        for name in self.MODALITIES:
            self.add_module(f"{name}_sparse", TokenSparse(embed_dim, sparse_ratio, use_gumbel, gumbel_tau, beta=beta))
            self.add_module(f"{name}_aggr", TokenAggregation(embed_dim, self.keeped_patches, dim_ratio))

    def forward(
        self,
        RGB_cash: Tensor,
        NI_cash: Tensor,
        TI_cash: Tensor,
        RGB_global: Tensor,
        NI_global: Tensor,
        TI_global: Tensor,
    ) -> MultiModalTokens:
        """Patches (B, N, C) and global features (B, C) or (B, 1, C) of each modality."""
        patches = (RGB_cash, NI_cash, TI_cash)
        features = torch.stack([each.flatten(1) for each in (RGB_global, NI_global, TI_global)], dim=1)  # (B, 3, C)
        tokens, masks = [], []
        for m, name in enumerate(self.MODALITIES):
            sparse, aggregate = self.get_submodule(f"{name}_sparse"), self.get_submodule(f"{name}_aggr")
            others = features[:, [other for other in range(3) if other != m]]
            found: Sparse = sparse(patches[m], features[:, m], others)
            mixed = aggregate(found.select_tokens, found.score_mask.gather(1, found.index))
            tokens.append(torch.cat([mixed, found.extra_token], dim=1))
            masks.append(found.score_mask)
        return MultiModalTokens(*tokens, *masks)


def aggregated_count(patches: int, sparse_ratio: float, aggr_ratio: float) -> int:
    """The number of aggregated tokens, without the extra one."""
    check_count("patches", patches)
    for name, ratio in {"sparse_ratio": sparse_ratio, "aggr_ratio": aggr_ratio}.items():
        check_number(name, ratio)
    count = int(round(patches * aggr_ratio * sparse_ratio, 9))
    if count < 1:
        raise UserError(
            f"sdtps: aggr_ratio={aggr_ratio} and sparse_ratio={sparse_ratio} leave no token of {patches}; raise them"
        )
    return count


def check_beta(beta: Any) -> None:
    check_number("beta", beta)
    if not 0 <= beta <= 0.5:
        raise UserError(f"beta={beta} is outside [0, 0.5]; the default is 0.25")


def _of_kept(decision: Tensor, x: Tensor) -> Tensor:
    """D of all tokens (B, N) at the kept ones, in raster order: (B, S) for tokens x (B, S, C)."""
    kept = decision.detach() > 0.5  # (B, N)
    if decision.dim() != 2 or len(decision) != len(x) or not bool((kept.sum(1) == x.shape[1]).all()):
        counts = "" if decision.dim() != 2 else f" that keeps {sorted(set(kept.sum(1).tolist()))} tokens of each image"
        raise UserError(
            f"keep_policy is {tuple(decision.shape)}{counts}, and x {tuple(x.shape)}; give the mask of these tokens, "
            f"{tuple(x.shape[:2])} (selected_mask), or D of all tokens with {x.shape[1]} kept ones in each image (score_mask)"
        )
    return decision[kept].reshape(x.shape[:2])
