"""What vLLM's configuration needs for a plan. Where the model's config names none, nothing here changes anything."""

from __future__ import annotations

import logging
from typing import Any

from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

from tokensieve.errors import UserError
from tokensieve.serving.families import FAMILIES, titles
from tokensieve.serving.positions import line_sections
from tokensieve.serving.served_plan import KEYS, ServedPlan, family_of, grid_of, read_served_plan

logger = logging.getLogger("vllm.tokensieve")
ASKS_FOR_POSITIONS = 0.5  # a rate of vLLM's own video pruning: under it, vLLM asks models for positions behind the encoder


def served_plan(model_config: Any) -> ServedPlan | None:
    """The plan of vLLM's ModelConfig; a ValueError, which vLLM reports and ends with, if it cannot be carried out."""
    return plan_of(model_config.hf_config)


def plan_of(hf_config: Any) -> ServedPlan | None:
    """The plan of a model's config, as transformers reads it."""
    if all(getattr(hf_config, key, None) is None for key in KEYS):
        return None
    try:
        return read_served_plan(hf_config.to_dict())
    except UserError as error:
        raise ValueError(f"tokensieve: {error}") from None


class PlanHooks(VerifyAndUpdateConfig):
    """Called by vLLM when it has read the configuration of a model that can be cut."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        plan = served_plan(model_config)
        if plan is None:
            return
        multimodal = model_config.multimodal_config
        if getattr(multimodal, "enable_mm_embeds", False):
            raise ValueError("tokensieve: a plan cuts images, not embeddings of images; leave --enable-mm-embeds out")
        if plan.loses_sizes:
            logger.warning(
                "tokensieve: %s merges tokens; vLLM has no bias on keys, so log(size) is not added to attention "
                "(as with sizes=no). docs/serving.md has the measured loss.",
                plan.text,
            )
        if plan.compact:
            return
        if not plan.has_grid_positions:
            text = model_config.hf_config.get_text_config()
            text.rope_parameters = dict(text.rope_parameters) | {"mrope_section": line_sections(text.to_dict())}
        multimodal.video_pruning_rate = ASKS_FOR_POSITIONS

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Charges images to the encoder's budget by the tokens that they have before the cut."""
        plan = served_plan(vllm_config.model_config)
        if plan is None:
            return
        config = vllm_config.model_config.hf_config.to_dict()
        scheduler, budget = vllm_config.scheduler_config, plan.cut.budget
        if family_of(config).cuts_tower_output:
            h, w = grid_of(config)
            share = plan.kept(h * w) / (h * w)
        else:
            share = float(budget.amount) if budget.kind == "share" else 1.0
        scheduler.max_num_encoder_input_tokens = max(1, int(scheduler.max_num_encoder_input_tokens * share))


def add_config_hooks() -> None:
    """Has vLLM call the hooks."""
    for name in FAMILIES:
        MODELS_CONFIG_MAP[name] = PlanHooks


def check_architecture(model_config: Any) -> None:
    """A ValueError if a model has a plan and vLLM runs it by a class that knows nothing of plans, and would ignore it."""
    if model_config.architecture not in FAMILIES and served_plan(model_config) is not None:
        raise ValueError(
            f"tokensieve: vLLM runs this model as {model_config.architecture}, which cannot be cut; plans work with vLLM's own "
            f"models of {titles()}. Leave --model-impl out"
        )


def refuse_other_models() -> None:
    """Has vLLM check the architecture of every model; its map of hooks has an entry for some only."""
    from vllm.config import ModelConfig

    stock = ModelConfig._try_verify_and_update_model_config
    if getattr(stock, "checks_plans", False):
        return

    def verify(self: Any) -> None:
        check_architecture(self)
        stock(self)

    verify.checks_plans = True  # type: ignore[attr-defined]
    ModelConfig._try_verify_and_update_model_config = verify


def mend_cpu_runner() -> None:
    """vLLM 0.32 on a CPU: under a plan, CPUModelRunner asks for positions as GPUModelRunner does.

    Its load_model leaves out the end of GPUModelRunner.load_model, which sets this.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker import cpu_model_runner

    stock = cpu_model_runner.CPUModelRunner.load_model
    if getattr(stock, "asks_for_positions", False):
        return

    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        if (plan := plan_of(self.model_config.hf_config)) is not None:
            self.is_multimodal_pruning_enabled = not plan.compact

    load_model.asks_for_positions = True  # type: ignore[attr-defined]
    cpu_model_runner.CPUModelRunner.load_model = load_model
