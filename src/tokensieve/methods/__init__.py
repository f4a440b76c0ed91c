"""The methods a plan can name: one file each, and the registry that knows them."""

from __future__ import annotations

import importlib
import pkgutil

from tokensieve.methods.registry import REGISTRY, Method, Option, describe, get_method, list_methods, method

__all__ = ["REGISTRY", "Method", "Option", "describe", "get_method", "list_methods", "method"]

for _module in pkgutil.iter_modules(__path__):  # a new file in this folder is a new method
    importlib.import_module(f"{__name__}.{_module.name}")
