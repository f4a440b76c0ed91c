"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL in vLLM, cut behind the patch merger: each token is a square of patches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from vllm.model_executor.models import qwen2_5_vl, qwen2_vl, qwen3_vl

from tokensieve.serving.vllm_models.model import CutModel, Grid, under_plan
from tokensieve.serving.vllm_models.processor import PlanInfo, PlanProcessor, kept


class QwenInfo(PlanInfo):
    """What vLLM asks about images."""

    def get_mm_max_tokens_per_item(self: Any, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int] | None:
        """vLLM counts the tokens of an image in the prompt, as its dummy images do: behind the cut."""
        return {"image": kept(self.plan, self.get_max_image_tokens())}


class QwenProcessor(PlanProcessor):
    """Prompts and pixels."""

    def grids(self, processed: Mapping[str, Any]) -> list[Grid]:
        merge = self.info.get_hf_config().vision_config.spatial_merge_size
        return [(int(h) // merge, int(w) // merge) for _, h, w in processed["image_grid_thw"]]

    def pixels(self, processed: Mapping[str, Any]) -> Sequence[Tensor]:
        sizes = [int(t) * int(h) * int(w) for t, h, w in processed["image_grid_thw"]]
        patches: Sequence[Tensor] = processed["pixel_values"].split(sizes)
        return patches


class QwenModel(CutModel):
    """Images of any size, as flat patches one after another."""

    def _process_image_input(self, image_input: Any) -> Any:
        grids, pixels, features = image_input["image_grid_thw"], image_input["pixel_values"], []
        ends = list(itertools.accumulate(grids.prod(-1).tolist(), initial=0))
        for start, stop in self.batches():
            part = {
                "type": "pixel_values",
                "pixel_values": pixels[ends[start] : ends[stop]],
                "image_grid_thw": grids[start:stop],
            }
            features += super()._process_image_input(part)  # type: ignore[misc]
        width = self.config.vision_config.out_hidden_size if self._has_out_size else features[0].shape[1]
        return self.cut_features(features, width)

    @property
    def _has_out_size(self) -> bool:
        """Whether features are wider than tokens: Qwen3-VL's have those of DeepStack behind them."""
        return hasattr(self.config.vision_config, "deepstack_visual_indexes")

    def _postprocess_image_embeds_evs(self, features: Any, image_input: Any) -> Any:
        """vLLM's own columns for positions; `cut_features` has added ours."""
        return features


class Qwen2Info(QwenInfo, qwen2_vl.Qwen2VLProcessingInfo):
    """What vLLM asks about images."""


class Qwen2Processor(QwenProcessor, qwen2_vl.Qwen2VLMultiModalProcessor):
    """Prompts and pixels."""


@under_plan(qwen2_vl.Qwen2VLForConditionalGeneration, Qwen2Processor, Qwen2Info)
class CutQwen2(QwenModel, qwen2_vl.Qwen2VLForConditionalGeneration):
    """Qwen2-VL under a plan."""

    stock = qwen2_vl.Qwen2VLForConditionalGeneration


class Qwen2_5Info(QwenInfo, qwen2_5_vl.Qwen2_5_VLProcessingInfo):
    """What vLLM asks about images."""


class Qwen2_5Processor(QwenProcessor, qwen2_5_vl.Qwen2_5_VLMultiModalProcessor):
    """Prompts and pixels."""


@under_plan(qwen2_5_vl.Qwen2_5_VLForConditionalGeneration, Qwen2_5Processor, Qwen2_5Info)
class CutQwen2_5(QwenModel, qwen2_5_vl.Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL under a plan."""

    stock = qwen2_5_vl.Qwen2_5_VLForConditionalGeneration


class Qwen3Info(QwenInfo, qwen3_vl.Qwen3VLProcessingInfo):
    """What vLLM asks about images."""


class Qwen3Processor(QwenProcessor, qwen3_vl.Qwen3VLMultiModalProcessor):
    """Prompts and pixels."""


@under_plan(qwen3_vl.Qwen3VLForConditionalGeneration, Qwen3Processor, Qwen3Info)
class CutQwen3(QwenModel, qwen3_vl.Qwen3VLForConditionalGeneration):
    """Qwen3-VL under a plan. DeepStack's features are those of the tokens that stay."""

    stock = qwen3_vl.Qwen3VLForConditionalGeneration
