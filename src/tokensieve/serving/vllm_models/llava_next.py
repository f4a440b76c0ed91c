"""LLaVA-NeXT and LLaVA-OneVision in vLLM. Their tokens come from tiles, so they are cut before the language model, where they
are one sequence: the whole image made small, then lines of tokens. Each line has an end, which stays and is in no budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models import llava_next, llava_onevision

from tokensieve.serving.vllm_models.model import CutModel, Grid, under_plan
from tokensieve.serving.vllm_models.names import with_bare_tower
from tokensieve.serving.vllm_models.processor import PlanInfo, PlanProcessor


class TiledProcessor(PlanProcessor):
    """Prompts and pixels of images that are cut into tiles."""

    def grids(self, processed: Mapping[str, Any]) -> list[Grid]:
        sizes = [[int(side) for side in size] for size in processed["image_sizes"]]
        return [(1, self.info.get_num_image_tokens(image_width=w, image_height=h)) for h, w in sizes]

    def line_ends(self, processed: Mapping[str, Any]) -> list[int]:
        return [self.info.lines(*(int(side) for side in size)) for size in processed["image_sizes"]]


class TiledInfo(PlanInfo):
    """What vLLM asks about images that are cut into tiles."""

    def lines(self: Any, height: int, width: int) -> int:
        """How many lines of tokens an image of this size has behind the small one."""
        tower, config = self.get_vision_encoder_info(), self.get_hf_config()
        tiles = llava_next.get_anyres_image_grid_shape(
            image_size=(height, width), grid_pinpoints=config.image_grid_pinpoints, patch_size=tower.get_image_size()
        )
        _, lines = self._get_num_unpadded_features(
            original_height=height,
            original_width=width,
            npatches=tower.get_patch_grid_length(),
            num_patch_height=tiles[0],
            num_patch_width=tiles[1],
        )
        return int(lines)


class TiledModel(CutModel):
    """The features of an image are one sequence without a grid."""

    def _process_image_input(self, image_input: Any) -> Any:
        features: list[Tensor] = []
        for start, stop in self.batches():
            part = {
                "type": "pixel_values",
                "pixel_values": image_input["pixel_values"][start:stop],
                "image_sizes": image_input["image_sizes"][start:stop],
            }
            features += super()._process_image_input(part)  # type: ignore[misc]
        return self.cut_features(features, features[0].shape[1])

    def places_of_line_ends(self, n: int, line_ends: int) -> Tensor:
        vision = self.config.vision_config
        small = (vision.image_size // vision.patch_size) ** 2
        return torch.arange(small, n + 1, (n - small) // line_ends)[1:] - 1


class LlavaNextInfo(TiledInfo, llava_next.LlavaNextProcessingInfo):
    """What vLLM asks about images."""


class LlavaNextProcessor(TiledProcessor, llava_next.LlavaNextMultiModalProcessor):
    """Prompts and pixels."""


@under_plan(llava_next.LlavaNextForConditionalGeneration, LlavaNextProcessor, LlavaNextInfo)
class CutLlavaNext(TiledModel, llava_next.LlavaNextForConditionalGeneration):
    """LLaVA-NeXT under a plan."""

    stock = llava_next.LlavaNextForConditionalGeneration
    hf_to_vllm_mapper = with_bare_tower(stock.hf_to_vllm_mapper)


class LlavaOnevisionInfo(TiledInfo, llava_onevision.LlavaOnevisionProcessingInfo):
    """What vLLM asks about images."""


class LlavaOnevisionProcessor(TiledProcessor, llava_onevision.LlavaOnevisionMultiModalProcessor):
    """Prompts and pixels."""


@under_plan(llava_onevision.LlavaOnevisionForConditionalGeneration, LlavaOnevisionProcessor, LlavaOnevisionInfo)
class CutLlavaOnevision(TiledModel, llava_onevision.LlavaOnevisionForConditionalGeneration):
    """LLaVA-OneVision under a plan."""

    stock = llava_onevision.LlavaOnevisionForConditionalGeneration
    hf_to_vllm_mapper = with_bare_tower(stock.hf_to_vllm_mapper)
