"""What vLLM calls at the start of each of its processes: it makes the models that can be cut known to vLLM.

Under a plan, vLLM gets our model class of that architecture; without one, that class makes vLLM's own (`vllm_models.model`).
"""

from __future__ import annotations

from tokensieve.serving.families import FAMILIES


def register() -> None:
    """The entry point in the group vllm.general_plugins. It may be called several times."""
    import logging

    from vllm import ModelRegistry

    from tokensieve.serving.engine_config import add_config_hooks, mend_cpu_runner, refuse_other_models

    logger = logging.getLogger("vllm.model_executor.models.registry")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that a class is replaced
    try:
        for name, family in FAMILIES.items():
            ModelRegistry.register_model(name, family.implementation)
    finally:
        logger.setLevel(level)
    add_config_hooks()
    refuse_other_models()
    mend_cpu_runner()
