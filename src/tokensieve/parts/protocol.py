"""What loading the trained parts of methods takes and gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

Weights = str | Path | Sequence[str | Path] | Mapping[str, nn.Module] | None


@dataclass(frozen=True)
class LoadedPart:
    """A trained module, where it came from (for messages), and its header; a module that a user made has none."""

    part: nn.Module
    source: str
    about: Mapping[str, Any] | None = None
