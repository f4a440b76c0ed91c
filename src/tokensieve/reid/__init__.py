"""Re-identification of objects seen by several cameras in several modalities, plugged in through the registries.

This module holds its declarations and imports no torch.
"""

from __future__ import annotations

from tokensieve.data.registry import DATASETS, DatasetSpec
from tokensieve.reid.layouts import LAYOUTS

for _name, _layout in LAYOUTS.items():
    _load = "tokensieve.reid.data:load"
    DATASETS.add(DatasetSpec(_name, _layout.summary, _load, "objects", "reid", "re-identification"), origin=__name__)
