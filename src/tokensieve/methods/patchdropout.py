"""PatchDropout: random patches before the first block, the simplest control.

Liu et al., "PatchDropout: Economizing Vision Transformers Using Patch Dropout", WACV 2023, arXiv:2208.07220; the same in
FLIP, arXiv:2212.00794. Released in timm and open_clip (Apache-2.0, MIT), where it acts in training alone.

    of L patches, max(1, int(L (1 - p))) random ones are kept; prefix tokens stay; nothing is rescaled

Here it also acts in evaluation. Place: after the position embedding (@0). The default budget is p = 0.5. The choice depends on
the seed and the image, not on the batch.
"""

from __future__ import annotations

from tokensieve.core import Reduction, View
from tokensieve.methods.places import floored_share
from tokensieve.methods.registry import method
from tokensieve.scoring import top


@method(
    summary="random patches before the first block, as in training with patch dropout",
    paper='Liu et al., "PatchDropout: Economizing Vision Transformers Using Patch Dropout", WACV, 2023, arXiv:2208.07220',
    budget=lambda options: "50%",
    count=floored_share,
    where="0",
    control=True,
)
def patchdropout(view: View, keep: int) -> Reduction:
    """The patches with the largest random numbers."""
    return Reduction.keep(top(view.noise(), keep), view.n)
