"""What the models share: made by vLLM's own class where there is no plan, else cut images and positions as if uncut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.multimodal import MULTIMODAL_REGISTRY

from tokensieve.serving.choosing import ImageCutter
from tokensieve.serving.engine_config import plan_of
from tokensieve.serving.positions import N_COLUMNS, fill_positions, first_positions, offset_columns, span
from tokensieve.serving.served_plan import PLAN_KEY, ServedPlan
from tokensieve.serving.vllm_models import line_positions
from tokensieve.serving.vllm_models.processor import FIELD, N_NUMBERS, read_hash

Grid = tuple[int, int]


class CutModel:
    """Mixed into a model of vLLM, whose images it cuts. `__new__` makes vLLM's own model where there is no plan."""

    stock: type[Any]  # vLLM's own class
    supports_mrope = True
    supports_multimodal_pruning = True  # the name of vLLM's interface for positions behind the encoder
    hf_to_vllm_mapper: Any  # from names of weights, of which ours may know more
    config: Any

    def __new__(cls, *, vllm_config: Any, prefix: str = "") -> Any:
        config = vllm_config.model_config.hf_config
        if plan_of(config) is not None:
            return super().__new__(cls)
        model = cls.stock(vllm_config=vllm_config, prefix=prefix)
        if getattr(config, PLAN_KEY, None) is not None:  # the plan none
            model.hf_to_vllm_mapper = cls.hf_to_vllm_mapper
        return model

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        plan = plan_of(self.config)
        assert plan is not None
        self.plan: ServedPlan = plan
        if not plan.compact and not plan.has_grid_positions:
            line_positions.use_kernel(self)
        self.cutter = ImageCutter(plan)
        self.encoder_budget = int(vllm_config.scheduler_config.max_num_batched_tokens)  # tokens before the cut, at a time
        self._images: list[list[int]] = []  # what the processor says about the images that are being encoded

    def embed_multimodal(self, **kwargs: Any) -> Any:
        rows = kwargs.pop(FIELD, None)
        self._images = [] if rows is None else torch.as_tensor(rows).reshape(-1, N_NUMBERS).tolist()
        return super().embed_multimodal(**kwargs)  # type: ignore[misc]

    def batches(self) -> Iterator[tuple[int, int]]:
        """The images that are being encoded, as many at a time as the encoder's budget of tokens before the cut allows.

        (start, stop) for each batch; one image at least.
        """
        start, total = 0, 0
        for number, (h, w, *_) in enumerate(self._images):
            if number > start and total + h * w > self.encoder_budget:
                yield start, number
                start, total = number, 0
            total += h * w
        if self._images:
            yield start, len(self._images)

    def cut_features(self, features: Sequence[Tensor], width: int) -> list[Tensor]:
        """The features (n, E) of each image, cut at @llm.0: (k, E), with the columns of their offsets.

        width: of the features of tokens; what stands behind them (DeepStack) is taken along.
        """
        out: list[Tensor] = [features[0]] * len(features)
        groups: dict[tuple[Grid, int], list[int]] = {}
        for number, row in enumerate(self._images):
            groups.setdefault(((row[0], row[1]), row[-1]), []).append(number)
        for (grid, line_ends), numbers in groups.items():
            stacked = torch.stack([features[number] for number in numbers])  # (B, n, E)
            stays = self.places_of_line_ends(stacked.shape[1], line_ends).to(stacked.device)  # (F,)
            can_go = torch.ones(stacked.shape[1], dtype=torch.bool, device=stacked.device).index_fill(0, stays, False)
            places, free = can_go.nonzero()[:, 0], stacked[:, can_go]  # (N,), (B, N, E)
            hashes = [read_hash(self._images[number]) for number in numbers]
            seen = grid if self.plan.has_grid_positions else None  # as in transformers: joined tiles have no grid
            chosen = self.cutter.choose(free[..., :width], hashes, grid=seen)
            index = chosen.index[..., None].expand(-1, -1, stacked.shape[2] - width)
            made = torch.cat([chosen.apply(free[..., :width]), free[..., width:].gather(1, index)], dim=-1)
            at, order = torch.cat([places[chosen.index], stays.expand(len(numbers), -1)], dim=1).sort(1)  # (B, K)
            made = torch.cat([made, stacked[:, stays]], dim=1).gather(1, order[..., None].expand(-1, -1, made.shape[2]))
            for number, each in zip(numbers, self.with_offsets(made, at, grid[1]), strict=True):
                out[number] = each
        return out

    def places_of_line_ends(self, n: int, line_ends: int) -> Tensor:
        """Which of the n tokens of an image end a line, (F,)."""
        return torch.arange(0)

    def with_offsets(self, features: Tensor, index: Tensor, width: int) -> Tensor:
        """Features (B, K, E) with the columns of their offsets, unless positions are compact."""
        if self.plan.compact:
            return features
        columns = offset_columns(index, width, self.plan.has_grid_positions)
        return torch.cat([features, columns.to(features)], dim=-1)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: Sequence[Any]) -> tuple[Tensor, int]:
        """Positions of a prompt when it arrives: (3, L), and what is added to those behind it."""
        images = []
        for feature in sorted(mm_features, key=lambda feature: feature.mm_position.offset):
            place, kept = feature.mm_position.offset, feature.mm_position.length
            h, w = feature.data[FIELD].data.tolist()[:2]
            images.append((place, kept, kept if self.plan.compact else span((h, w), self.plan.has_grid_positions)))
        if self.plan.compact:
            return torch.arange(len(input_tokens)).expand(3, -1).clone(), 0
        return first_positions(len(input_tokens), images)

    def recompute_mrope_positions(
        self, input_ids: Any, multimodal_embeddings: Sequence[Tensor], mrope_positions: Tensor, num_computed_tokens: int
    ) -> tuple[Sequence[Tensor], Tensor, int]:
        """Embeddings without the columns, positions with those of the image tokens about to run, and what is added behind."""
        ids = torch.as_tensor(input_ids, device=mrope_positions.device)
        length = mrope_positions.shape[1]
        delta = int(mrope_positions[0, -1]) + 1 - length
        if not len(multimodal_embeddings):
            return multimodal_embeddings, mrope_positions, delta
        columns = torch.cat([each[:, -N_COLUMNS:] for each in multimodal_embeddings])
        positions = fill_positions(mrope_positions, ids[:length] == self._image_token, columns, num_computed_tokens)
        return [each[:, :-N_COLUMNS] for each in multimodal_embeddings], positions, delta

    @property
    def _image_token(self) -> int:
        name = "image_token_index" if hasattr(self.config, "image_token_index") else "image_token_id"
        return int(getattr(self.config, name))


def under_plan(stock: type[Any], processor: type[Any], info: type[Any]) -> Callable[[type[Any]], type[Any]]:
    """Registers the processor of a model class: ours under a plan, else that of vLLM's own class."""
    factories = stock._processor_factory

    def make_info(context: Any) -> Any:
        return (factories.info if plan_of(context.get_hf_config()) is None else info)(context)

    def make_processor(made: Any, dummy_inputs: Any) -> Any:
        return (processor if isinstance(made, info) else factories.processor)(made, dummy_inputs)

    return MULTIMODAL_REGISTRY.register_processor(make_processor, info=make_info, dummy_inputs=factories.dummy_inputs)
