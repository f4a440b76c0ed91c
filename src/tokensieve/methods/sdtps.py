"""SDTPS: scores patches with all modalities of an object, aggregates the selected ones, and fuses the others into one token.

Adapted from SEPS (Mao et al., 2025, arXiv:2511.01390). There a sparse and a dense text score the patches of an image; here the
other modalities do.

For a patch v_i of one modality, with the modality's own global feature and those of the other modalities of the same object:

    s_im, s_m2, s_m3 = cosines of v_i with the own global feature and with the others', each scaled to [0, 1] over the image
    s_p = sigmoid(MLP(v_i))                                     the only one that is learned
    s   = (1 - 2 beta) s_p + beta (s_m2 + s_m3 + 2 s_im)        one other modality counts twice, none counts 0
    sparse      the ceil(sparse_ratio N) best; extra token = softmax of the others' s, times the others
    aggregate   W = softmax over the kept of scale * MLP(LN(v));  N_c = int(N aggr_ratio sparse_ratio) tokens  sum_i W_ji v_i

128 patches -> 64 -> 25 + 1 with the default ratios, and 196 -> 98 -> 39 + 1.

How the MLP of s_p learns. Being kept has no gradient, so every kept patch has a gate that is 1 forward; backward it is s, or
with Gumbel the decision matrix D: hard forward, and backward the softmax of (s + Gumbel noise) / tau over all patches, times
the number of kept ones, so that both have the same mass. (The noise is in the slope alone: which patches are kept is decided
by s.) The gates multiply W, whose rows are then brought back to 1: W_ji g_i / sum_i W_ji g_i. So the slope of a gate is
W_ji (v_i - v_j), the difference that this patch makes to the mixture, and never large. (Subtracting (1 - D) * 1e10 from the
logits, the usual way to mask, multiplies D's slope by 1e10.) s also weighs the extra token.

Where the modalities are comes with the View: context["modalities"] names the equal parts, one after another, that the batch
consists of, as the re-identification model stacks them. context["others"], (B, O, D), are the other modalities' global features
where those are not in the batch. Without either it is a single modality's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError, describe_value
from tokensieve.methods.registry import method
from tokensieve.scoring import cosine, full_precision, minmax, top

ALL = "all"  # the name of the weights that serve every modality


@dataclass(frozen=True)
class Sparse:
    """The selection of TokenSparse among N tokens."""

    select_tokens: Tensor  # (B, S, C), in raster order
    extra_token: Tensor  # (B, 1, C)
    score_mask: Tensor  # (B, N), the decision matrix D: 1 for the kept, 0 for the others; it has the gradient of the choice
    index: Tensor  # (B, S)
    extra: Tensor  # (B, N), the share of each token in the extra one
    scores: Tensor  # (B, N)


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name} is a whole number of at least 1, not {describe_value(value)}")


def _check_number(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise UserError(f"{name} is a number, not {describe_value(value)}")


class TokenSparse(nn.Module):
    """Scores the tokens, keeps the best of them, and fuses the others into one extra token."""

    def __init__(
        self, dim: int = 512, sparse_ratio: float = 0.5, beta: float = 0.25, use_gumbel: bool = False, tau: float = 1.0
    ) -> None:
        super().__init__()
        _check_count("dim", dim)
        for name, value in {"sparse_ratio": sparse_ratio, "beta": beta, "tau": tau}.items():
            _check_number(name, value)
        if not 0 < sparse_ratio < 1:
            raise UserError(f"sparse_ratio={sparse_ratio} must be above 0 and below 1; the default is 0.5")
        if not 0 <= beta <= 0.5:
            raise UserError(f"beta={beta} is outside [0, 0.5]; the default is 0.25")
        if tau <= 0:
            raise UserError(f"tau={tau} must be above 0; the default is 1")
        self.sparse_ratio, self.beta, self.use_gumbel, self.tau = sparse_ratio, beta, use_gumbel, tau
        hidden = max(1, dim // 4)
        self.score_predictor = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, 1))

    def kept(self, n: int) -> int:
        """The number of tokens kept of n; at least one is left for the extra token."""
        return min(math.ceil(round(self.sparse_ratio * n, 9)), n - 1)

    @full_precision
    def score(self, tokens: Tensor, own: Tensor, others: Tensor | None = None) -> Tensor:
        """s of tokens (B, N, C), with the own global feature (B, C) and the other modalities' (B, O, C): (B, N)."""
        tokens = tokens.float()
        learned: Tensor = self.score_predictor(tokens)[..., 0].sigmoid()
        with torch.no_grad():
            guided = 2 * minmax(cosine(tokens, own[:, None])[..., 0])
            if others is not None and others.shape[1]:
                guided += 2 * torch.stack([minmax(row) for row in cosine(tokens, others).unbind(-1)]).mean(0)
        return (1 - 2 * self.beta) * learned + self.beta * guided

    @full_precision
    def forward(self, tokens: Tensor, own: Tensor, others: Tensor | None = None, noise: Tensor | None = None) -> Sparse:
        """noise (B, N): uniform numbers, for Gumbel in training; drawn from torch's generator where they are not given."""
        scores = self.score(tokens, own, others)
        index = top(scores.detach(), self.kept(scores.shape[1]))  # (B, S)
        hard = torch.zeros_like(scores).scatter(1, index, 1.0)
        soft = scores
        if self.use_gumbel:
            soft = scores / self.tau
            if self.training:
                uniform = torch.rand_like(scores) if noise is None else noise
                soft = soft - (-uniform.clamp(1e-6, 1 - 1e-6).log()).log() / self.tau
            soft = index.shape[1] * soft.softmax(-1)  # of the same mass as the hard one
        decision = hard + (soft - soft.detach())
        extra = scores.masked_fill(hard.bool(), -torch.inf).softmax(-1)
        select_tokens = tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[2]))
        extra_token = (extra[:, None] @ tokens.float()).to(tokens.dtype)
        return Sparse(select_tokens, extra_token, decision, index, extra, scores)


class TokenAggregation(nn.Module):
    """Mixes any number of tokens into `keeped_patches`: (B, S, C) -> (B, keeped_patches, C)."""

    def __init__(self, dim: int = 512, keeped_patches: int = 26, dim_ratio: float = 0.2) -> None:
        super().__init__()
        _check_count("dim", dim)
        _check_count("keeped_patches", keeped_patches)
        _check_number("dim_ratio", dim_ratio)
        hidden = max(1, int(dim * dim_ratio))
        self.weight = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, keeped_patches))
        self.scale = nn.Parameter(torch.ones(1, 1, 1))

    @full_precision
    def shares(self, tokens: Tensor, keep_policy: Tensor | None = None) -> Tensor:
        """W (B, K, S), rows adding up to 1. keep_policy (B, S): gates of the tokens, such as D's; 0 keeps a token out."""
        weight: Tensor = (self.scale * self.weight(tokens.float())).transpose(1, 2).softmax(-1)
        if keep_policy is None:
            return weight
        weight = weight * keep_policy[:, None]
        return weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)

    def forward(self, tokens: Tensor, keep_policy: Tensor | None = None) -> Tensor:
        return (self.shares(tokens, keep_policy) @ tokens.float()).to(tokens.dtype)


class Sdtps(nn.Module):
    """TokenSparse and TokenAggregation of each modality, or (without names) one pair for all.

    patches: N of the images it is for, which sets how many tokens it leaves. place: where it was trained ("out", "3"); None:
    it may stand anywhere.
    """

    def __init__(
        self,
        width: int,
        patches: int = 128,
        modalities: Sequence[str] = (),
        sparse_ratio: float = 0.5,
        aggr_ratio: float = 0.4,
        beta: float = 0.25,
        gumbel: bool = False,
        tau: float = 1.0,
        dim_ratio: float = 0.2,
        place: str | None = None,
    ) -> None:
        super().__init__()
        mixed = int(round(patches * aggr_ratio * sparse_ratio, 9))
        if mixed < 1:
            raise UserError(
                f"sdtps: aggr_ratio={aggr_ratio} and sparse_ratio={sparse_ratio} leave no token of {patches}; raise them"
            )
        self.settings: dict[str, Any] = {
            **{"width": width, "patches": patches, "modalities": list(modalities), "sparse_ratio": sparse_ratio},
            **{"aggr_ratio": aggr_ratio, "beta": beta, "gumbel": gumbel, "tau": tau, "dim_ratio": dim_ratio, "place": place},
        }
        self.keep = mixed + 1
        names = tuple(modalities) or (ALL,)
        self.sparse = nn.ModuleDict({name: TokenSparse(width, sparse_ratio, beta, gumbel, tau) for name in names})
        self.aggregate = nn.ModuleDict({name: TokenAggregation(width, mixed, dim_ratio) for name in names})

    def budget(self, place: str) -> int:
        """The number of tokens it keeps."""
        return self.keep

    def places(self) -> list[str] | None:
        """The positions it was trained for; None: any."""
        place = self.settings["place"]
        return None if place is None else [place]

    def weights_of(self, modality: str) -> tuple[TokenSparse, TokenAggregation]:
        """The modules of a modality; "" where the View names none."""
        name = ALL if ALL in self.sparse else modality
        if name not in self.sparse:
            problem = f"no weights for the modality {name!r}" if name else "the modality of the images is not known"
            raise UserError(
                f"sdtps: {problem}; its weights are for {', '.join(self.sparse)}. Pass context={{'modalities': (...)}}"
            )
        return self.sparse[name], self.aggregate[name]  # type: ignore[return-value]


@method(
    summary="patches scored with all modalities, aggregated into a few tokens, the rest as one token (--weights)",
    paper="adapted from SEPS (Mao et al., 2025, arXiv:2511.01390), which scores patches with texts",
    selects=False,
    mixes=True,
    part=Sdtps,
    recipe="tokensieve train configs/RGBNT201/DeMo_SDTPS.yml",
)
def sdtps(view: View, keep: int) -> Reduction:
    """The aggregated tokens, and last the extra one; `anchors` are the patches that were selected."""
    part: Sdtps = view.part
    if keep != part.keep:
        patches = part.settings["patches"]
        raise UserError(f"sdtps: its weights leave {part.keep} tokens of {patches}, not {keep}; write sdtps:{part.keep}")
    names = tuple(view.context.get("modalities", ())) or ("",)
    if len(view.tokens) % len(names):
        raise UserError(f"sdtps: {len(view.tokens)} images are not the same number of each of {', '.join(names)}")
    own = view.global_token()  # (M B, D)
    reductions = [
        _reduce_modality(*part.weights_of(name), tokens, feature, others, noise)
        for name, tokens, feature, others, noise in zip(
            names,
            view.tokens.chunk(len(names)),
            own.chunk(len(names)),
            _other_features(own, len(names), view.context.get("others")),
            view.noise().chunk(len(names)),
            strict=True,
        )
    ]
    weight, anchors, scores = (torch.cat(parts) for parts in zip(*reductions, strict=True))
    return Reduction(
        index=weight.detach().argmax(-1),
        n=view.n,
        weight=weight,
        sizes=None if view.sizes is None else torch.ones(weight.shape[:2], device=weight.device),
        scores=scores,
        anchors=anchors,
    )


def _reduce_modality(
    sparse: TokenSparse, aggregate: TokenAggregation, tokens: Tensor, own: Tensor, others: Tensor | None, noise: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One modality: the reduction as a matrix (B, K, N), the selected patches (B, S), the scores (B, N)."""
    selected: Sparse = sparse(tokens, own, others, noise)
    gates = selected.score_mask.gather(1, selected.index)  # (B, S), 1 forward
    shares = aggregate.shares(selected.select_tokens, gates)  # (B, K-1, S)
    mixed = shares.new_zeros((*shares.shape[:2], tokens.shape[1]))
    mixed = mixed.scatter(2, selected.index[:, None].expand_as(shares), shares)
    return torch.cat([mixed, selected.extra[:, None]], dim=1), selected.index, selected.scores


def _other_features(own: Tensor, modalities: int, given: Tensor | None) -> list[Tensor | None]:
    """For each modality the others' global features (B, O, D): those given, and those of the batch's other parts."""
    parts = own.chunk(modalities)
    outside = [None] * modalities if given is None else list(given.to(own.dtype).chunk(modalities))
    found: list[Tensor | None] = []
    for m, extern in enumerate(outside):
        inside = [part[:, None] for other, part in enumerate(parts) if other != m]
        everything = inside if extern is None else [*inside, extern]
        found.append(torch.cat(everything, dim=1) if everything else None)
    return found
