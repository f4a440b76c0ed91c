"""LLaVA-NeXT and LLaVA-OneVision in vLLM. Their tokens come from tiles, with line ends between them, so they are cut before the
language model, where they are one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models import llava_next, llava_onevision

from tokensieve.serving.vllm_models.model import CutModel, Grid, under_plan
from tokensieve.serving.vllm_models.names import with_bare_tower
from tokensieve.serving.vllm_models.processor import PlanInfo, PlanProcessor


class TiledProcessor(PlanProcessor):
    """Prompts and pixels of images that are cut into tiles."""

    def grids(self, processed: Mapping[str, Any]) -> list[Grid]:
        sizes = [[int(side) for side in size] for size in processed["image_sizes"]]
        return [(1, self.info.get_num_image_tokens(image_width=w, image_height=h)) for h, w in sizes]


class TiledModel(CutModel):
    """The features of an image are one sequence without a grid."""

    def _process_image_input(self, image_input: Any) -> Any:
        features = list(super()._process_image_input(image_input))  # type: ignore[misc]
        return self.cut_features(features, features[0].shape[1], lambda grid: None)


class LlavaNextInfo(PlanInfo, llava_next.LlavaNextProcessingInfo):
    """What vLLM asks about images."""


class LlavaNextProcessor(TiledProcessor, llava_next.LlavaNextMultiModalProcessor):
    """Prompts and pixels."""


@under_plan(llava_next.LlavaNextForConditionalGeneration, LlavaNextProcessor, LlavaNextInfo)
class CutLlavaNext(TiledModel, llava_next.LlavaNextForConditionalGeneration):
    """LLaVA-NeXT under a plan."""

    stock = llava_next.LlavaNextForConditionalGeneration
    hf_to_vllm_mapper = with_bare_tower(stock.hf_to_vllm_mapper)


class LlavaOnevisionInfo(PlanInfo, llava_onevision.LlavaOnevisionProcessingInfo):
    """What vLLM asks about images."""


class LlavaOnevisionProcessor(TiledProcessor, llava_onevision.LlavaOnevisionMultiModalProcessor):
    """Prompts and pixels."""


@under_plan(llava_onevision.LlavaOnevisionForConditionalGeneration, LlavaOnevisionProcessor, LlavaOnevisionInfo)
class CutLlavaOnevision(TiledModel, llava_onevision.LlavaOnevisionForConditionalGeneration):
    """LLaVA-OneVision under a plan."""

    stock = llava_onevision.LlavaOnevisionForConditionalGeneration
    hf_to_vllm_mapper = with_bare_tower(stock.hf_to_vllm_mapper)
