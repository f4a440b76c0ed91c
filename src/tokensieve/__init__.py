"""tokensieve keeps the vision tokens that matter.

handle = tokensieve.apply(model, "anchor@6(k=10,m=50,alpha=0.5)")
features = model.encode_image(images)
print(handle.ledger)
handle.remove()
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {  # public name -> the module it lives in, imported when first asked for
    "apply": "cutting.handle",
    "Handle": "cutting.handle",
    "Reducers": "parts.hub",
    "Plan": "plan",
    "Budget": "plan",
    "View": "core",
    "Reduction": "core",
    "method": "methods.registry",
    "list_methods": "methods.registry",
    "UserError": "errors",
    "Uncuttable": "errors",
    "select_anchor_tokens": "cutting.selection",
    "compute_importance_scores": "cutting.selection",
    "compute_diversity_scores": "cutting.selection",
    "select_tokens_with_scoring": "cutting.selection",
    "apply_token_selection": "cutting.selection",
    "PrunedVisionEncoder": "cutting.selection",
    "apply_pruning_to_model": "cutting.selection",
    "get_image_features_with_tokens": "models.features",
    "TokenSparse": "methods.sdtps",
    "TokenAggregation": "methods.sdtps",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tokensieve' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tokensieve.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
