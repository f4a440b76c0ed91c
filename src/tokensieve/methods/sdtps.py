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

With `aggregation=merge`, for cuts inside a backbone, nothing is lost. N_c seeds lie far apart from each other (farthest_points;
the first is the patch with the largest s), and all patches are merged, the dropped ones too:

    prior_ji    (1 - EPSILON) [seed j is the one most similar to v_i] + EPSILON / N_c,  times the size of v_i
    aggregate   W = softmax over all patches of scale * MLP(LN(v))_j + log prior_ji
    size_j      sum_i size_i W_ji / sum_k W_ki: each patch is shared out among the tokens; the extra token has size 1

The MLP's last layer starts at 0, so that training starts from the merge. s sets the first seed and the extra token, by which it
learns. The aggregated tokens do not depend on which patches are kept, so there is no decision to relax (no gate, no Gumbel).
The options `norm` and `sizes` are those of every merge.

How the MLP of s_p learns. Being kept has no gradient, so every kept patch has a gate that is 1 forward; backward it is s, or
with Gumbel the decision matrix D: hard forward, and backward the softmax of (s + Gumbel noise) / tau over all patches, times
the number of kept ones, so that both have the same mass (gumbel_mass="one" leaves this factor out). The noise is in the slope
alone: which patches are kept is decided by s. The gates multiply W, whose rows are then brought back to 1:
W_ji g_i / sum_i W_ji g_i. So the slope of a gate is W_ji (v_i - v_j), the difference that this patch makes to the mixture, and
never large. (Subtracting (1 - D) * 1e10 from the logits, the usual way to mask, multiplies D's slope by 1e10.) s also weighs
the extra token.

Where the modalities are comes with the View: context["modalities"] names the equal parts, one after another, that the batch
consists of, as the re-identification model stacks them. context["others"], (B, O, D), are the other modalities' global features
where those are not in the batch. Without either it is a single modality's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.core import Reduction, View
from tokensieve.errors import UserError, describe_value
from tokensieve.methods.farthest_points import farthest_points
from tokensieve.methods.registry import method
from tokensieve.methods.sdtps_modules import Sparse, TokenAggregation, TokenSparse, aggregated_count
from tokensieve.methods.settings import check_entries

Aggregation = Literal["mix", "merge"]
ALL = "all"  # the name of the weights that serve every modality
EPSILON = 0.01  # of the prior: the part of each patch that all tokens share
CLIP = 2.0  # of farthest_points, as in cover


class Sdtps(nn.Module):
    """TokenSparse and TokenAggregation of each modality, or (without names) one pair for all.

    patches: N of the images it is for, which sets how many tokens it leaves. place: where it was trained ("out", "3"); None:
    it may stand anywhere. aggregation: "mix" the selected patches, or "merge" all patches.
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
        gumbel_mass: str = "kept",
        aggregation: str = "mix",
    ) -> None:
        super().__init__()
        names = check_entries("sdtps: modalities", modalities, str) or (ALL,)
        if place is not None and not isinstance(place, str):
            raise UserError(f"sdtps: place is a position of a plan, not {describe_value(place)}")
        if aggregation not in get_args(Aggregation):
            raise UserError(
                f"sdtps: aggregation is one of {', '.join(get_args(Aggregation))}, not {describe_value(aggregation)}"
            )
        mixed = aggregated_count(patches, sparse_ratio, aggr_ratio)
        if gumbel and aggregation == "merge":
            raise UserError("sdtps: aggregation=merge makes no decision that Gumbel noise could relax; turn Gumbel off")
        self.settings: dict[str, Any] = {
            **{"width": width, "patches": patches, "modalities": list(modalities), "sparse_ratio": sparse_ratio},
            **{"aggr_ratio": aggr_ratio, "beta": beta, "gumbel": gumbel, "tau": tau, "dim_ratio": dim_ratio, "place": place},
            **{"gumbel_mass": gumbel_mass, "aggregation": aggregation},
        }
        self.keep = mixed + 1
        options: dict[str, Any] = {"beta": beta, "gumbel_mass": gumbel_mass}
        self.sparse = nn.ModuleDict({name: TokenSparse(width, sparse_ratio, gumbel, tau, **options) for name in names})
        self.aggregate = nn.ModuleDict({name: TokenAggregation(width, mixed, dim_ratio) for name in names})
        if aggregation == "merge":
            for name in names:
                last: Any = self.aggregate[name].weight[-1]  # type: ignore[index]
                nn.init.zeros_(last.weight)
                nn.init.zeros_(last.bias)

    def budget(self, place: str) -> int:
        """The number of tokens it keeps."""
        return self.keep

    def retraining_for(self, keep: int) -> str:
        """The keys of a training that leaves another number of tokens."""
        patches, sparse_ratio = self.settings["patches"], self.settings["sparse_ratio"]
        if not 2 <= keep <= patches:
            return f"SDTPS leaves 2 to {patches} tokens of {patches}"
        aggr_ratio = _round_up((keep - 1) / (patches * sparse_ratio), patches)
        keys = f"MODEL.SDTPS_AGGR_RATIO {aggr_ratio:g}"
        if aggr_ratio > 1:
            keys = f"MODEL.SDTPS_SPARSE_RATIO {_round_up((keep - 1) / patches, patches):g} MODEL.SDTPS_AGGR_RATIO 1"
        return f"for {keep} tokens train it again with {keys}: tokensieve train CONFIG {keys}"

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


def _round_up(ratio: float, patches: int) -> float:
    """A ratio with few digits, not smaller, that gives the same number of this many patches."""
    steps = 10 ** len(str(patches))
    return float(math.ceil(round(ratio * steps, 6)) / steps)


@method(
    summary="patches scored with all modalities, aggregated into a few tokens, the rest as one token (--weights)",
    paper="adapted from SEPS (Mao et al., 2025, arXiv:2511.01390), which scores patches with texts",
    selects=False,
    mixes=True,
    part=Sdtps,
    norm=0.0,
    recipe="tokensieve train configs/RGBNT201/DeMo_SDTPS.yml",
)
def sdtps(view: View, keep: int, *, aggregation: Aggregation = "mix") -> Reduction:
    """The aggregated tokens, and last the extra one. `anchors` are the patches that were selected and mixed."""
    part: Sdtps = view.part
    if keep != part.keep:
        patches = part.settings["patches"]
        advice = part.retraining_for(keep)
        raise UserError(
            f"sdtps: its weights leave {part.keep} tokens of {patches}, not {keep}; write sdtps:{part.keep}; {advice}"
        )
    if aggregation != (trained := part.settings["aggregation"]):
        raise UserError(f"sdtps: its weights were trained with aggregation={trained}; write sdtps(aggregation={trained})")
    names = tuple(view.context.get("modalities", ())) or ("",)
    if (count := view.tokens.shape[0]) % len(names):
        raise UserError(f"sdtps: {count} images are not the same number of each of {', '.join(names)}")
    own = view.global_token()  # (M B, D)
    rows = zip(
        names,
        _by_modality(view.tokens, len(names)),
        _by_modality(own, len(names)),
        _other_features(own, len(names), view.context.get("others")),
        _by_modality(view.noise(), len(names)),
        _by_modality(view.sizes_or_ones(), len(names)),
        strict=True,
    )
    reductions = []
    for name, tokens, feature, others, noise, sizes in rows:
        sparse, aggregate = part.weights_of(name)
        selected: Sparse = sparse(tokens, feature, others, noise)
        reductions.append(_merge(tokens, selected, aggregate, sizes) if aggregation == "merge" else _mix(selected, aggregate))
    tensors = {name: [vars(each)[name] for each in reductions] for name in ("index", "weight", "sizes", "scores", "anchors")}
    stacked: dict[str, Any] = {name: torch.cat(values) for name, values in tensors.items() if values[0] is not None}
    if aggregation == "mix" and view.sizes is not None:
        stacked["sizes"] = torch.ones_like(stacked["index"], dtype=torch.float32)
    return Reduction(n=view.n, **stacked)


def _by_modality(x: Tensor, modalities: int) -> Sequence[Tensor]:
    """The rows of each modality, as many of each. In a graph, chunk would fix the size of the batch."""
    return list(x.unflatten(0, (modalities, -1)))


def _mix(selected: Sparse, aggregate: TokenAggregation) -> Reduction:
    """Each token is a mixture of the selected patches."""
    gates = selected.score_mask.gather(1, selected.index)  # (B, S), 1 forward
    shares = aggregate.shares(selected.select_tokens, gates)  # (B, K-1, S)
    mixed = shares.new_zeros((*shares.shape[:2], selected.scores.shape[1]))
    mixed = mixed.scatter(2, selected.index[:, None].expand_as(shares), shares)
    weight = torch.cat([mixed, selected.extra[:, None]], dim=1)  # (B, K, N)
    return Reduction(
        index=weight.detach().argmax(-1),
        n=weight.shape[2],
        weight=weight,
        scores=selected.scores,
        anchors=selected.index,
    )


def _merge(tokens: Tensor, selected: Sparse, aggregate: TokenAggregation, sizes: Tensor) -> Reduction:
    """Each token is the mean of the patches (B, N, D) most similar to its seed, changed by what the network has learned."""
    first = selected.scores.detach().argmax(-1)  # (B,)
    seeds = aggregate.keeped_patches
    index, groups = farthest_points(tokens.detach(), seeds, CLIP, first)  # (B, K-1), (B, N)
    nearest = F.one_hot(groups, seeds).transpose(1, 2)  # (B, K-1, N)
    prior = ((1 - EPSILON) * nearest + EPSILON / seeds) * sizes[:, None]
    shares = aggregate.shares(tokens, prior=prior)  # (B, K-1, N)
    spread = shares.sum(1, keepdim=True).clamp_min(torch.finfo(shares.dtype).tiny)  # (B, 1, N)
    mass = (sizes[:, None] * shares / spread).sum(-1)  # (B, K-1)
    extra = selected.extra.detach().argmax(-1, keepdim=True)
    return Reduction(
        index=torch.cat([index, extra], dim=1),
        n=tokens.shape[1],
        weight=torch.cat([shares, selected.extra[:, None]], dim=1),
        sizes=torch.cat([mass, torch.ones_like(mass[:, :1])], dim=1),
        scores=selected.scores,
    )


def _other_features(own: Tensor, modalities: int, given: Tensor | None) -> list[Tensor | None]:
    """For each modality the others' global features (B, O, D): those given, and those of the batch's other parts."""
    parts = _by_modality(own, modalities)
    outside = [None] * modalities if given is None else list(given.to(own.dtype).chunk(modalities))
    found: list[Tensor | None] = []
    for m, extern in enumerate(outside):
        inside = [part[:, None] for other, part in enumerate(parts) if other != m]
        everything = inside if extern is None else [*inside, extern]
        found.append(torch.cat(everything, dim=1) if everything else None)
    return found
