"""Token fusion: the image feature is the model's own, or that mixed with the patches that a plan selected.

    cls       the stock feature, bit for bit
    weighted  weight * cls + (1 - weight) * sum_i w_i p_i,   w = softmax of the scores of the selected patches
    mean      mean_i p_i: known to be bad, kept as a control

p_i is a selected patch token as it leaves the tower, through the model's own final norm and projection. Its score is that of
the last cut; where there was no cut, or its method gives no scores, all count alike. A merged token counts as often as it
stands for patches (log(size) on its score), as it does in attention and pooling. The parts are mixed at the scale the model
gives them: nothing is normalised before, not even the feature of a model whose own is a unit vector (CoCa).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tokensieve.cutting.handle import Handle
from tokensieve.errors import UserError, did_you_mean
from tokensieve.evaluation.flags import FUSIONS
from tokensieve.models.features import encode_image, get_image_features_with_tokens
from tokensieve.models.registry import open_tower


def check_fusion(fusion: str, weight: float) -> None:
    """A UserError unless this is a fusion and its weight lies within [0, 1]."""
    if fusion not in FUSIONS:
        raise UserError(f"--token_fusion {fusion!r} is not one of {', '.join(FUSIONS)}.{did_you_mean(fusion, FUSIONS)}")
    if not 0 <= weight <= 1:
        raise UserError(f"--token_fusion_weight {weight} is outside [0, 1]; 1 is the CLS feature alone, the default is 0.8")


def fused_feature(
    model: nn.Module, images: Tensor, handle: Handle | None = None, fusion: str = "cls", weight: float = 0.8
) -> Tensor:
    """(B, 3, h, w) -> (B, E). handle: that of the plan which is on the model; without one all patches are selected."""
    check_fusion(fusion, weight)
    if fusion == "cls":
        return encode_image(model, images)
    tower = open_tower(model)  # raises for a model without patch tokens
    feature, tokens = get_image_features_with_tokens(model, images, unscaled=True)
    assert tokens is not None
    tokens, share = _selected(tokens, handle, scored=fusion == "weighted")
    projected = tower.project(tokens)  # (B, K, E)
    with torch.autocast(images.device.type, enabled=False):
        patches = (share[:, None] @ projected.float())[:, 0]  # (B, E)
        mixed = patches if fusion == "mean" else weight * feature.float() + (1 - weight) * patches
    return mixed.to(feature.dtype)


def _selected(tokens: Tensor, handle: Handle | None, scored: bool) -> tuple[Tensor, Tensor]:
    """The tokens that the plan selected, of those that left the tower, and the share of each: (B, K, D), (B, K)."""
    stages = [] if handle is None else [reduction for _, reduction in handle.stages]
    if stages and tokens.shape[1] > stages[-1].k:  # rest=zero: the others are still there, as zeros
        tokens = tokens.gather(1, stages[-1].index[..., None].expand(-1, -1, tokens.shape[2]))
    logits = torch.zeros(tokens.shape[:2], device=tokens.device)
    if scored and stages and stages[-1].scores is not None:
        logits = stages[-1].scores.float().gather(1, stages[-1].index)
    sizes: Tensor | None = None
    for reduction in stages:
        sizes = reduction.sizes_after(sizes)
    return tokens, (logits if sizes is None else logits + sizes.log()).softmax(-1)
