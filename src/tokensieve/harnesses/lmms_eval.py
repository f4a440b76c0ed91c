"""The declaration of the model `tokensieve` for lmms-eval, which finds it by the entry point in pyproject.toml."""

from __future__ import annotations

from typing import Any

NAME = "tokensieve"


def manifest() -> Any:
    """The ModelManifest; lmms-eval imports the class when the model is used."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id=NAME, chat_class_path="tokensieve.harnesses.lmms_eval_model.PlannedLlava")
