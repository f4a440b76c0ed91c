"""Pruning in the tower under the names that users of the CLIP benchmark expect: a function, and a module around a vision tower.

Both are the plan of `pruning_plan`. `tokensieve.apply(model, "anchor@6(k=10,m=50)")` does the same.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.cutting.handle import Handle
from tokensieve.cutting.passes import Row
from tokensieve.errors import PlanWarning, UserError, describe_value
from tokensieve.methods.registry import get_method
from tokensieve.models.features import encode_image
from tokensieve.models.patching import PerThread
from tokensieve.plan import Plan, Where, make_step

_pruning = threading.RLock()  # one PrunedVisionEncoder at a time has its plan on its tower


def pruning_plan(
    k_anchors: int = 10, top_m: int = 50, alpha: float = 0.5, prune_layer: int | None = None, rest: str = "drop"
) -> Plan:
    """Pruning in the tower as a plan: by default after half of the blocks."""
    where = None if prune_layer is None else Where("block", (prune_layer,))
    options = {"k": k_anchors, "m": top_m, "alpha": alpha} | ({} if rest == "drop" else {"rest": rest})
    return Plan((make_step(get_method("anchor"), where, None, options),))


class PrunedModel(Handle):
    """A model that is pruned in place: the handle of its plan, and what a PrunedVisionEncoder has."""

    def __init__(
        self, model: nn.Module, k_anchors: int, top_m: int, alpha: float, prune_layer: int | None = None, rest: str = "drop"
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UserError(f"pruning needs a model, a torch.nn.Module, not {describe_value(model)}")
        super().__init__(model, pruning_plan(k_anchors, top_m, alpha, prune_layer, rest))
        self.model, self.k_anchors, self.top_m, self.alpha = model, k_anchors, top_m, alpha

    def register_hooks(self) -> PrunedModel:
        """`attach` under its name in the CLIP benchmark."""
        self.attach()
        return self

    def encode_image(self, images: Tensor, normalize: bool = False) -> Tensor:
        """The model's image features with pruning, (B, E), also while the plan is removed. normalize: to unit length."""
        with self._attached():
            features = encode_image(self.model, images)
        return F.normalize(features, dim=-1) if normalize else features

    def encode_image_with_pruning(self, images: Tensor, normalize: bool = False) -> Tensor:
        """`encode_image` under the name that it has in the CLIP benchmark."""
        return self.encode_image(images, normalize)

    def _attached(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.is_attached else self


def apply_pruning_to_model(
    model: nn.Module,
    k_anchors: int = 10,
    top_m: int = 50,
    alpha: float = 0.5,
    prune_layer: int | None = None,
    rest: str = "drop",
) -> PrunedModel:
    """Prunes the model in place: from prune_layer on (default: half the depth) it runs on 1 + k_anchors + top_m tokens.

    What it returns is a Handle (`remove`, `ledger`, `with`) that also has `model`, `k_anchors`, `top_m`, `alpha`,
    `encode_image`, `encode_image_with_pruning` and `register_hooks`.
    """
    pruned = PrunedModel(model, k_anchors, top_m, alpha, prune_layer, rest)
    for note in pruned.notes:
        warnings.warn(note, PlanWarning, stacklevel=2)
    return pruned.register_hooks()


class PrunedVisionEncoder(nn.Module):
    """The vision tower of a CLIP with pruning. Outside of this module's calls the model is unchanged, until `register_hooks`.

    The plan is on the model during a call only, so threads that share a model wait for each other. With
    `tokensieve.apply` they run at the same time.
    """

    def __init__(
        self,
        model: nn.Module,
        k_anchors: int = 10,
        top_m: int = 50,
        alpha: float = 0.5,
        prune_layer: int | None = None,
        rest: str = "drop",
    ) -> None:
        super().__init__()
        self.visual: Any = getattr(model, "visual", model)
        self.k_anchors, self.top_m, self.alpha, self.prune_layer, self.rest = k_anchors, top_m, alpha, prune_layer, rest
        self.plan = str(pruning_plan(k_anchors, top_m, alpha, prune_layer, rest))
        self._whole = (model,)  # in a tuple: the weights of this module are those of its tower
        self._registered: PrunedModel | None = None
        self._ledger = PerThread()
        for note in self._prune().notes:  # raises here if the plan does not fit
            warnings.warn(note, PlanWarning, stacklevel=2)

    @property
    def model(self) -> nn.Module:
        """The model as it was passed in."""
        return self._whole[0]

    @property
    def ledger(self) -> list[Row]:
        """Patch tokens in and out at each cut, in the last batch of this thread."""
        return list(self._ledger.value or [])

    def register_hooks(self) -> PrunedModel:
        """Prunes the model itself, as `apply_pruning_to_model` does, until `remove()` of what this returns."""
        if self._registered is None or not self._registered.is_attached:
            self._registered = self._prune().register_hooks()
        return self._registered

    def forward(self, images: Tensor) -> Any:
        """(B, 3, h, w) -> the output of the stock tower, (B, E) for a CLIP; of a Hugging Face model, its image feature."""
        return self._run(
            partial(encode_image, self.visual) if hasattr(self.visual, "base_model_prefix") else self.visual, images
        )

    def encode_image(self, images: Tensor, normalize: bool = False) -> Tensor:
        """The model's image features with pruning, (B, E). normalize: to unit length."""
        features: Tensor = self._run(partial(encode_image, self.model), images)
        return F.normalize(features, dim=-1) if normalize else features

    def encode_image_with_pruning(self, images: Tensor, normalize: bool = False) -> Tensor:
        """`encode_image` under the name that it has in the CLIP benchmark."""
        return self.encode_image(images, normalize)

    def _run(self, encode: Any, images: Tensor) -> Any:
        with _pruning:
            pruned = self._registered
            if pruned is None or not pruned.is_attached:
                pruned = self._prune()
            with pruned._attached():
                output = encode(images)
                self._ledger.value = pruned.ledger
        return output

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_registered": None}  # a handle is not copied

    def _prune(self) -> PrunedModel:
        return PrunedModel(self.model, self.k_anchors, self.top_m, self.alpha, self.prune_layer, self.rest)
