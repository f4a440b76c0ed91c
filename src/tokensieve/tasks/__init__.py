"""Tasks: what is computed from the outputs of a model. Each sub-package declares one and implements it.

Declarations import no torch. A new folder here is a new task.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    if _module.ispkg:
        importlib.import_module(f"{__name__}.{_module.name}")
