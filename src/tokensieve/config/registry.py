"""Declarations of trainings. Each is declared beside its implementation; this module imports neither torch nor pydantic."""

from __future__ import annotations

from dataclasses import dataclass

from tokensieve.registry import Registry


@dataclass(frozen=True)
class TrainingSpec:
    """What `train`, `validate` and `search` need to know of a training. What it runs is named as "module:attribute"."""

    name: str  # the value of `task:` in a file
    summary: str  # one line: what learns what
    schema: str  # its file, a subclass of config.schema.Training, whose `task` is the name
    learner: str  # called with the checked file; what it has to offer is described by training.loop.Learner
    export: str  # (learner, folder) -> card: writes what was learned
    parts: str = ""  # (learner, steps done) -> files by name: trained parts as they are, for every checkpoint
    sections: tuple[str, ...] = ()  # top-level keys that identify a file without `task:`; with them such a file has no `task:`


TRAININGS: Registry[TrainingSpec] = Registry("training")
