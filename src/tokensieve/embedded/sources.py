"""The embedded scenes as sources: what the declarations of these data sets name as `build`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tokensieve.data.registry import SourceOptions
from tokensieve.data.source import Source
from tokensieve.embedded.datasets import EmbeddedCaptions, EmbeddedScenes, EmbeddedSelection
from tokensieve.errors import UserError
from tokensieve.provenance import digest


def build_labels(name: str, transform: Callable[[Any], Tensor], options: SourceOptions) -> Source:
    """Scenes of one object."""
    _check_language(name, options)
    pairs = "heldout" if name == "embedded-heldout" else "seen"
    scenes = EmbeddedScenes(options.split, pairs=pairs, transform=transform)
    return Source(scenes, list(scenes.classes), list(scenes.templates), _fingerprint(name, options, len(scenes)))


def build_captions(name: str, transform: Callable[[Any], Tensor], options: SourceOptions) -> Source:
    """Scenes of several objects, one or two a sample."""
    _check_language(name, options)
    kind: Any = EmbeddedSelection if name == "embedded-selection" else EmbeddedCaptions
    scenes = kind(options.split, transform=transform)
    return Source(scenes, [], [], _fingerprint(name, options, len(scenes)), captions=True)


def _check_language(name: str, options: SourceOptions) -> None:
    if options.language != "en":
        raise UserError(f"{name} is in 'en' only, not in {options.language!r}.")


def _fingerprint(name: str, options: SourceOptions, length: int) -> str:
    """Scenes are drawn by code from fixed seeds, and the code is part of the key of every result."""
    return digest([name, options.split, length])
