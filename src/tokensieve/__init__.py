"""tokensieve keeps the vision tokens that matter.

handle = tokensieve.apply(model, "anchor@6(k=10,m=50,alpha=0.5)")
features = model.encode_image(images)
print(handle.ledger)
handle.remove()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers and editors read these; at run time a name is imported when it is first used
    from tokensieve.core import Reduction as Reduction
    from tokensieve.core import View as View
    from tokensieve.cutting.handle import Handle as Handle
    from tokensieve.cutting.handle import apply as apply
    from tokensieve.cutting.pruning import PrunedVisionEncoder as PrunedVisionEncoder
    from tokensieve.cutting.pruning import apply_pruning_to_model as apply_pruning_to_model
    from tokensieve.cutting.selection import apply_token_selection as apply_token_selection
    from tokensieve.cutting.selection import compute_diversity_scores as compute_diversity_scores
    from tokensieve.cutting.selection import compute_importance_scores as compute_importance_scores
    from tokensieve.cutting.selection import select_anchor_tokens as select_anchor_tokens
    from tokensieve.cutting.selection import select_tokens_with_scoring as select_tokens_with_scoring
    from tokensieve.errors import Uncuttable as Uncuttable
    from tokensieve.errors import UserError as UserError
    from tokensieve.methods.learned import SelectionNetwork as SelectionNetwork
    from tokensieve.methods.registry import Method as Method
    from tokensieve.methods.registry import list_methods as list_methods
    from tokensieve.methods.registry import method as method
    from tokensieve.methods.sdtps_modules import MultiModalSDTPS as MultiModalSDTPS
    from tokensieve.methods.sdtps_modules import TokenAggregation as TokenAggregation
    from tokensieve.methods.sdtps_modules import TokenSparse as TokenSparse
    from tokensieve.models.features import get_image_features_with_tokens as get_image_features_with_tokens
    from tokensieve.parts.hub import Reducers as Reducers
    from tokensieve.plan import Budget as Budget
    from tokensieve.plan import Plan as Plan
    from tokensieve.plugins import load_plugin as load_plugin

__version__ = "0.1.0"

_MODULES = {  # public name -> the module that defines it
    "apply": "cutting.handle",
    "Handle": "cutting.handle",
    "Reducers": "parts.hub",
    "Plan": "plan",
    "Budget": "plan",
    "View": "core",
    "Reduction": "core",
    "Method": "methods.registry",
    "method": "methods.registry",
    "list_methods": "methods.registry",
    "load_plugin": "plugins",
    "UserError": "errors",
    "Uncuttable": "errors",
    "select_anchor_tokens": "cutting.selection",
    "compute_importance_scores": "cutting.selection",
    "compute_diversity_scores": "cutting.selection",
    "select_tokens_with_scoring": "cutting.selection",
    "apply_token_selection": "cutting.selection",
    "PrunedVisionEncoder": "cutting.pruning",
    "apply_pruning_to_model": "cutting.pruning",
    "get_image_features_with_tokens": "models.features",
    "SelectionNetwork": "methods.learned",
    "TokenSparse": "methods.sdtps_modules",
    "TokenAggregation": "methods.sdtps_modules",
    "MultiModalSDTPS": "methods.sdtps_modules",
}

__all__ = ["__version__", *_MODULES]

if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of type Any

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'tokensieve' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"tokensieve.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
