"""The model families of vLLM that can be cut, and where. Keys are names of architectures, as in a model's config.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServedFamily:
    """One architecture of vLLM."""

    title: str
    implementation: str  # module and class of the model with a plan
    has_grid_positions: bool  # the language model numbers image tokens by row and column (mRoPE), not in a line
    cuts_tower_output: bool = False  # @out works; @llm.0 works in every family
    default_place: str = "llm.0"  # of the alias image_pruning_rate


def titles() -> str:
    """The names of all families, for messages."""
    return ", ".join(family.title for family in FAMILIES.values())


_MODELS = "tokensieve.serving.vllm_models"

FAMILIES = {
    "LlavaForConditionalGeneration": ServedFamily(
        "LLaVA-1.5", f"{_MODELS}.llava:CutLlava", has_grid_positions=False, cuts_tower_output=True, default_place="out"
    ),
    "LlavaNextForConditionalGeneration": ServedFamily(
        "LLaVA-NeXT", f"{_MODELS}.llava_next:CutLlavaNext", has_grid_positions=False
    ),
    "LlavaOnevisionForConditionalGeneration": ServedFamily(
        "LLaVA-OneVision", f"{_MODELS}.llava_next:CutLlavaOnevision", has_grid_positions=False
    ),
    "Qwen2VLForConditionalGeneration": ServedFamily("Qwen2-VL", f"{_MODELS}.qwen:CutQwen2", has_grid_positions=True),
    "Qwen2_5_VLForConditionalGeneration": ServedFamily("Qwen2.5-VL", f"{_MODELS}.qwen:CutQwen2_5", has_grid_positions=True),
    "Qwen3VLForConditionalGeneration": ServedFamily("Qwen3-VL", f"{_MODELS}.qwen:CutQwen3", has_grid_positions=True),
}
