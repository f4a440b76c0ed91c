"""LLaVA-1.5 in vLLM, cut at the output of its tower or before the language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.models import llava

from tokensieve.scoring import Attention
from tokensieve.serving.served_plan import CLIP, grid_of
from tokensieve.serving.vllm_models.model import CutModel, under_plan
from tokensieve.serving.vllm_models.names import with_bare_tower
from tokensieve.serving.vllm_models.processor import PlanInfo, PlanProcessor, read_hash


class LlavaInfo(PlanInfo, llava.LlavaProcessingInfo):
    """What vLLM asks about images."""


class LlavaProcessor(PlanProcessor, llava.LlavaMultiModalProcessor):
    """Prompts and pixels."""

    def grids(self, processed: Mapping[str, Any]) -> list[tuple[int, int]]:
        return [grid_of(self.info.get_hf_config().to_dict())] * len(processed["pixel_values"])


@under_plan(llava.LlavaForConditionalGeneration, LlavaProcessor, LlavaInfo)
class CutLlava(CutModel, llava.LlavaForConditionalGeneration):
    """LLaVA-1.5 under a plan."""

    stock = llava.LlavaForConditionalGeneration
    hf_to_vllm_mapper = with_bare_tower(llava.LlavaForConditionalGeneration.hf_to_vllm_mapper)

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.grid = grid_of(self.config.to_dict())
        self.has_cls = self.config.vision_config.model_type == CLIP
        self._projected: dict[int, Tensor] = {}  # by the number of a block, what its q, k and v come from in this pass
        for number in self._blocks_to_watch():
            self._layers[number - 1].self_attn.qkv_proj.register_forward_hook(self._watch(number))

    @property
    def _layers(self) -> Any:
        return self.vision_tower.vision_model.encoder.layers

    def _blocks_to_watch(self) -> list[int]:
        """The blocks whose attention the method reads, from 1."""
        method = self.plan.step.method
        earlier = () if method.layers is None else method.layers(self.plan.depth)
        last = (self.plan.depth,) if self.plan.needs_attention else ()
        return sorted({*earlier, *last})

    def _watch(self, number: int) -> Any:
        def keep(module: Any, args: Any, output: Any) -> None:
            self._projected[number] = output[0]

        return keep

    def _process_image_input(self, image_input: Any) -> Any:
        n = self.grid[0] * self.grid[1]
        at_once = max(1, self.encoder_budget // n)
        made, start = [], 0
        for pixels in image_input["pixel_values"].split(at_once):
            hashes = [read_hash(row) for row in self._images[start : start + len(pixels)]]
            start += len(pixels)
            made.append(self._embed(pixels, hashes))
        return torch.cat(made)

    def _embed(self, pixels: Tensor, hashes: list[int]) -> Tensor:
        """The features of images that stay: (B, 3, H, W) -> (B, K, E), with the columns of their offsets."""
        strategy = "full" if self.has_cls else self.config.vision_feature_select_strategy
        x = self.vision_tower(pixels, feature_select_strategy=strategy)  # (B, P+N, D)
        p = 1 if self.has_cls else 0
        tokens, prefix = x[:, p:], x[:, :p]
        if self.plan.cut.part == "llm":
            tokens, prefix = self.multi_modal_projector(tokens), tokens[:, :0]
        attention = {number: self._attention(number, p) for number in self._projected}
        self._projected.clear()
        last = attention.get(self.plan.depth) if self.plan.needs_attention else None
        chosen = self.cutter.choose(tokens, hashes, prefix=prefix, grid=self.grid, attention=last, earlier=attention)
        features = chosen.apply(tokens)
        if self.plan.cut.part != "llm":
            features = self.multi_modal_projector(features)
        return self.with_offsets(features, chosen.index, self.grid[1])

    def _attention(self, number: int, prefix: int) -> Attention:
        """The attention of a block, with the heads of all processes."""
        module = self._layers[number - 1].self_attn
        parts = []
        for part in self._projected[number].chunk(3, dim=-1):
            whole = tensor_model_parallel_all_gather(part.contiguous(), dim=-1) if module.tp_size > 1 else part
            parts.append(whole.unflatten(-1, (-1, module.head_dim)).transpose(1, 2))  # (B, H, P+N, d)
        q, k, v = parts
        return Attention(q, k, prefix, module.scale, v=v)
