"""Names of weights that vLLM 0.32 does not know: transformers 5 saves the tower of a LLaVA without the level `vision_model`."""

from __future__ import annotations

import re
from typing import Any

from vllm.model_executor.models.utils import WeightsMapper

BARE_TOWER = re.compile(r"^(model\.)?vision_tower\.(?!vision_model\.)")


def with_bare_tower(stock: WeightsMapper) -> Any:
    """vLLM's mapping of names, and that of such towers."""
    return stock | WeightsMapper(orig_to_new_regex={BARE_TOWER: "vision_tower.vision_model."})
