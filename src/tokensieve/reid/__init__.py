"""Re-identification of objects seen by several cameras in several modalities, plugged in through the registries.

This module holds its declarations and imports no torch.
"""

from __future__ import annotations

from tokensieve import embedded
from tokensieve.data.registry import DATASETS, DatasetSpec
from tokensieve.models.families import FAMILIES, Family
from tokensieve.models.loading.registry import MODEL_TYPES, ModelType
from tokensieve.reid.layouts import LAYOUTS

for _name, _layout in LAYOUTS.items():
    _load = "tokensieve.reid.data:load"
    DATASETS.add(DatasetSpec(_name, _layout.summary, _load, "objects", "reid", "re-identification"), origin=__name__)

MODEL_TYPES.add(
    ModelType(
        "reid",
        f"{embedded.REID}, or the folder of a training, which holds the weights; --pretrained is not used",
        check="tokensieve.reid.loading:check_model",
        load="tokensieve.reid.loading:load",
        default_model=embedded.REID,
        is_model_name="tokensieve.reid.loading:is_model_name",
    ),
    origin=__name__,
)

FAMILIES.add(Family("reid", "re-identification models", open_tower="tokensieve.reid.tower:open_tower"), origin=__name__)
