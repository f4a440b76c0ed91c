"""Token fusion: the image feature is the model's own, or that mixed with the patches that a plan selected.

    cls       the stock feature, bit for bit
    weighted  weight * cls + (1 - weight) * sum_i w_i p_i,   w = softmax(score / temperature) over the selected patches
    mean      mean_i p_i: known to be bad, kept as a control

p_i is a selected patch token as it leaves the tower, through the model's own final norm and projection. Its score is that of
the last cut; where there was no cut, or its method gives no scores, all count alike. Anchors were chosen by CLS attention, and
their diversity is 0 by construction, so their own score would rank them last: they get the score 1, the largest that scaled
scores can have (with normalize=none the largest of the image, if that is above 1). A merged token counts as often as it stands
for patches (log(size) on its logit), as it does in attention and pooling. The parts are mixed at the scale the model
gives them: nothing is normalised before, not even the feature of a model whose own is a unit vector (CoCa).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tokensieve.core import Reduction
from tokensieve.cutting.handle import Handle
from tokensieve.errors import UserError, did_you_mean
from tokensieve.evaluation.flags import FUSIONS
from tokensieve.models.features import encode_image, get_image_features_with_tokens
from tokensieve.models.registry import open_tower

ANCHOR_RULE = "score 1"  # how anchors are weighted, for results


def check_fusion(fusion: str, weight: float, temperature: float) -> None:
    """A UserError unless this is a fusion, its weight lies within [0, 1] and its temperature is above 0."""
    if fusion not in FUSIONS:
        raise UserError(f"--token_fusion {fusion!r} is not one of {', '.join(FUSIONS)}.{did_you_mean(fusion, FUSIONS)}")
    if not 0 <= weight <= 1:
        raise UserError(f"--token_fusion_weight {weight} is outside [0, 1]; 1 is the CLS feature alone, the default is 0.8")
    if not 0 < temperature < math.inf:
        raise UserError(f"--token_fusion_temperature {temperature} is not a finite number above 0; the default is 1")


def fused_feature(
    model: nn.Module,
    images: Tensor,
    handle: Handle | None = None,
    fusion: str = "cls",
    weight: float = 0.8,
    temperature: float = 1.0,
) -> Tensor:
    """(B, 3, h, w) -> (B, E). handle: that of the plan which is on the model; without one all patches are selected."""
    check_fusion(fusion, weight, temperature)
    if fusion == "cls":
        return encode_image(model, images)
    tower = open_tower(model)  # raises for a model without patch tokens
    feature, tokens = get_image_features_with_tokens(model, images, unscaled=True)
    assert tokens is not None
    tokens, share = _selected(tokens, handle, temperature if fusion == "weighted" else None)
    projected = tower.project(tokens)  # (B, K, E)
    with torch.autocast(images.device.type, enabled=False):
        patches = (share[:, None] @ projected.float())[:, 0]  # (B, E)
        mixed = patches if fusion == "mean" else weight * feature.float() + (1 - weight) * patches
    return mixed.to(feature.dtype)


def _selected(tokens: Tensor, handle: Handle | None, temperature: float | None) -> tuple[Tensor, Tensor]:
    """The tokens that the plan selected, of those that left the tower, and the share of each: (B, K, D), (B, K).

    temperature: of the softmax of the scores; None: scores do not count.
    """
    stages = [] if handle is None else [reduction for _, reduction in handle.stages]
    if stages and tokens.shape[1] > stages[-1].k:  # rest=zero: the others are still there, as zeros
        tokens = tokens.gather(1, stages[-1].index[..., None].expand(-1, -1, tokens.shape[2]))
    logits = torch.zeros(tokens.shape[:2], device=tokens.device)
    if temperature is not None and stages and stages[-1].scores is not None:
        logits = _scores(stages[-1]).gather(1, stages[-1].index) / temperature
    sizes: Tensor | None = None
    for reduction in stages:
        sizes = reduction.sizes_after(sizes)
    return tokens, (logits if sizes is None else logits + sizes.log()).softmax(-1)


def _scores(reduction: Reduction) -> Tensor:
    """The scores of a cut, those of its anchors at the top: (B, N)."""
    assert reduction.scores is not None
    scores = reduction.scores.float()
    if reduction.anchors is None:
        return scores
    highest = scores.amax(-1, keepdim=True).clamp_min(1.0)  # (B, 1)
    return scores.scatter(1, reduction.anchors, highest.expand_as(reduction.anchors))
