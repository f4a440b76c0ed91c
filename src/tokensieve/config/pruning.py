"""The file of the training `pruning` (two-stage VLM pruning), for example configs/vision_token_pruning.yaml.

What depends on the file alone is checked here; what needs the model and the data is checked in training/pruning/, before the
first step.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from tokensieve.config import pruning_space
from tokensieve.config.model_shape import model_shape
from tokensieve.config.pruning_steps import Trainer
from tokensieve.config.schema import Training
from tokensieve.config.section import (
    Count,
    FilePath,
    Fraction,
    Index,
    Problems,
    Section,
    Share,
    Size,
    Temperature,
    Text,
    Weight,
)
from tokensieve.errors import short

Tokens = Annotated[int, Field(ge=1, le=10**6)]
Target = Annotated[float, Field(gt=0, le=10**6)]
EMBEDDED = "embedded"


class Backbone(Section):
    """The model that is pruned. All of its weights stay frozen."""

    name: Text = "llava-hf/llava-1.5-7b-hf"
    """sieve-llava-8, a folder, or an id on the Hub."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """None: the dtype of its weight files; on a CPU float32."""
    attn_implementation: Literal["sdpa", "eager"] | None = None
    """The soft masks of the training need an implementation with an attention bias; flash attention has none."""
    cache_dir: Text | None = None
    tower_cache: FilePath | None = None
    """A folder for the outputs of the vision tower, so that each image is encoded once. None: they are not stored."""


class Files(Section):
    """Where the questions, the annotations (answers) and the images of a split are."""

    questions: FilePath | None = None
    annotations: FilePath | None = None
    images: FilePath | None = None
    split: Text | None = None
    """Split of data that comes in splits of its own; None: train, or val."""
    limit: Count | None = None
    """Use only the first questions, this many."""


class Data(Section):
    """Questions about images, with their answers."""

    name: Literal["vqav2", "gqa", "jsonl", "csv", "embedded"] = "vqav2"
    train: Files = Files()
    val: Files = Files(limit=2000)
    """For the accuracies during training, by which the best weights are chosen: never the test split."""
    max_broken: Fraction = 0.01
    """The largest allowed share of questions with an unreadable image, rounded up."""

    def allowed(self, questions: int) -> int:
        """How many images may be unreadable, of this many questions."""
        return math.ceil(self.max_broken * questions)

    @model_validator(mode="after")
    def _check_paths(self) -> Data:
        needed = {"vqav2": ("questions", "annotations", "images"), "gqa": ("questions", "images"), "jsonl": ("questions",)}
        needed["csv"] = needed["jsonl"]
        problems = []
        for split in ("train", "val"):
            files = getattr(self, split)
            missing = [key for key in needed.get(self.name, ()) if getattr(files, key) is None]
            if missing:
                problems.append(f"{split}: {self.name} needs the path of {' and '.join(missing)}")
            if files.split is not None and files.split.startswith("test"):
                problems.append(f"{split}.split: {files.split} is reserved for the final results; use train or val")
        if problems:
            raise Problems(problems)
        return self


QUESTIONS = """\
dataset_settings:
  name: vqav2                        # or gqa, jsonl (one JSON object a line), csv (a table), embedded (no files)
  train:
    questions: data/vqav2/v2_OpenEnded_mscoco_train2014_questions.json
    annotations: data/vqav2/v2_mscoco_train2014_annotations.json
    images: data/vqav2/train2014
  val:
    questions: data/vqav2/v2_OpenEnded_mscoco_val2014_questions.json
    annotations: data/vqav2/v2_mscoco_val2014_annotations.json
    images: data/vqav2/val2014
    limit: 2000"""


class Pruning(Section):
    """The two stages, their targets, and the weights of the losses."""

    merger_type: Literal["none", "simple", "question_aware"] = "simple"
    merge_ratio: Share = 0.5
    target_merge_tokens: Tokens | None = None
    """The tokens that the merger leaves; None: from merge_ratio. Both may be given where they agree."""
    merge_sparsity_weight: Weight = 1e-4
    merger_hidden: Size = 256
    merger_temperature: Temperature = 0.1
    """Temperature of the merger's assignment and of its noise. It does not change during the training."""
    token_choice: Literal["spread", "top"] = "spread"
    """How centres and kept tokens are chosen: by score and coverage, or the largest scores alone."""
    pruning_layers: Annotated[tuple[Index, ...], Field(max_length=100)] = (10, 20, 31)
    """Layers of the language model, counted from 0, whose input is pruned."""
    target_prune_tokens: Annotated[tuple[Target, ...], Field(max_length=100)] | None = None
    """Vision tokens left from each pruning layer on: counts, or shares below 1 of the tokens that arrive there. One number
    alone is that of the last layer, and those before it fall geometrically; None: to 100 of 576 (see `pruned`)."""
    prune_sparsity_weight: Weight = 10.0
    """Weight of how undecided the soft masks are: 0 if exactly the target counts of tokens have a mask of 1."""
    pruner_d_internal: Size = 512
    pruner_num_heads: Size = 4
    pruner_type: Literal["cross_attention"] = "cross_attention"
    temperature: Temperature = 1.0
    temperature_min: Temperature = 0.1
    temperature_anneal_rate: Share = 0.5
    """The share of all steps over which the temperature falls linearly."""
    adv_loss_weight: Weight = 1.0
    """0: no discriminator."""
    task_loss_weight: Weight = 25.0
    distill_loss_weight: Weight = 0.0
    """Weight of the divergence from the full model's distribution over the answer's words. 0: none."""
    hard_share: Fraction = 0.5
    """Share of the steps, at the end, in which the pruners drop tokens as in use, with a straight-through gradient."""
    prune_rest: Literal["drop", "merge"] = "drop"
    """Pruned tokens are dropped, or averaged into the most similar kept ones (rest=merge in the plan)."""
    disc_hidden: Size = 256
    disc_reinit_prob: Fraction = 0.01
    """Probability that a step starts with a new discriminator, so that it does not become too strong."""
    max_vision_tokens: Tokens | None = None
    """At most this many vision tokens of an image enter the language model: the merger leaves no more, and without a merger
    `cover` merges them before the first layer."""
    image_max_size: Size | None = 1024
    """Images with a longer side are scaled down to this when they are read."""

    @field_validator("target_prune_tokens", mode="before")
    @classmethod
    def _accept_one_number(cls, value: Any) -> Any:
        return [value] if isinstance(value, (int, float, str)) and not isinstance(value, bool) else value

    @field_validator("target_prune_tokens", mode="after")
    @classmethod
    def _whole_counts(cls, targets: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if any(target >= 1 and target != int(target) for target in targets or ()):
            raise ValueError("a count of tokens is a whole number, and a share is below 1")
        return targets if targets is None else tuple(int(target) if target >= 1 else target for target in targets)

    @model_validator(mode="after")
    def _check_pruning(self) -> Pruning:
        layers, targets = self.pruning_layers, self.target_prune_tokens or ()
        problems = []
        if sorted(set(layers)) != list(layers):
            problems.append(f"pruning_layers: {list(layers)} do not ascend; for example {sorted(set(layers))}")
        if layers and len(targets) not in (0, 1, len(layers)):
            problems.append(
                f"target_prune_tokens: {len(targets)} counts for {len(layers)} pruning layers; give one for each, or one "
                "number for the last layer, or leave the line out"
            )
        if any(b >= a >= 1 for a, b in itertools.pairwise(targets)):
            problems.append(f"target_prune_tokens: {list(targets)} do not descend, but tokens that are gone do not come back")
        if self.merger_type != "none" and self.target_merge_tokens and targets and not problems:
            problems += self._check_pruned(2 * self.target_merge_tokens)  # the same whatever the model has before
        if self.pruner_d_internal % self.pruner_num_heads:
            problems.append(
                f"pruner_d_internal: {self.pruner_d_internal} cannot be divided among {self.pruner_num_heads} heads"
            )
        if self.merger_type == "question_aware":
            from tokensieve.methods.merger import HEADS  # imports torch

            if self.merger_hidden % HEADS:
                problems.append(f"merger_hidden: {self.merger_hidden} cannot be divided among the merger's {HEADS} heads")
        if self.temperature_min > self.temperature:
            problems.append(f"temperature_min: {self.temperature_min} is above the temperature of {self.temperature}")
        if self.merger_type == "none" and not layers:
            problems.append("merger_type: none and no pruning_layers leave nothing to train; use merger_type: simple")
        if self.task_loss_weight == self.adv_loss_weight == self.distill_loss_weight == 0:
            problems.append(
                "task_loss_weight, adv_loss_weight and distill_loss_weight are all 0, so there is nothing to learn from"
            )
        if problems:
            raise Problems(problems)
        return self

    def merged(self, n: int) -> int:
        """Tokens that enter the language model, of n before the merger."""
        kept = self.target_merge_tokens or max(1, math.ceil(round(self.merge_ratio * n, 6)))
        return min(n if self.merger_type == "none" else kept, self.max_vision_tokens or n)

    def pruned(self, n: int) -> tuple[int, ...]:
        """Tokens left from each pruning layer on, of n before the merger.

        Given counts and shares, or a geometric sequence from the merger's count to that of the last layer, which without a
        target is that of the original: 100 of 576 tokens, or of 288 that the merger leaves.
        """
        targets, layers, before = self.target_prune_tokens or (), len(self.pruning_layers), self.merged(n)
        last = targets[-1] if targets else max(1, round(min(before, n / 2) * 100 / 288))
        last = last if last >= 1 else math.ceil(round(last * before, 6))
        counts: list[int] = []
        for index in range(layers):
            arriving = counts[-1] if counts else before
            if len(targets) == layers:
                target = targets[index]
                counts.append(int(target) if target >= 1 else math.ceil(round(target * arriving, 6)))
            else:
                counts.append(min(arriving - 1, round(before * (last / before) ** ((index + 1) / layers))))
        return tuple(counts)

    def shares(self) -> tuple[float, ...] | None:
        """The share that stays at each pruning layer of the tokens that arrive there; None if targets are counts.

        For models whose images have different numbers of tokens. Without targets, 100 of 576 are left after the last layer.
        """
        targets, layers = self.target_prune_tokens or (100 / 576,), len(self.pruning_layers)
        if any(target >= 1 for target in targets):
            return None
        return tuple(targets) if len(targets) == layers else (targets[-1] ** (1 / layers),) * layers

    def temperature_at(self, step: int, steps: int) -> float:
        """The temperature of a step: linear, over the first temperature_anneal_rate of the steps."""
        done = min(1.0, step / max(1.0, self.temperature_anneal_rate * steps))
        return self.temperature + (self.temperature_min - self.temperature) * done

    def describe(self, n: int | None, steps: int) -> list[str]:
        """What is trained, in a few lines, for a model of n vision tokens per image (None: it varies) and so many steps."""
        lines: list[str] = []
        annealed = round(self.temperature_anneal_rate * steps)
        falls = f"temperature: {self.temperature:g} -> {self.temperature_min:g} over the first {annealed} of {steps} steps"
        if n is None:
            shares = ", ".join(f"{share:.3g}" for share in self.shares() or ())
            return [
                f"no token merger; pruning layers: {list(self.pruning_layers)} (shares {shares}), {self.pruner_type}",
                falls,
            ]
        merged = self.merged(n)
        if self.merger_type != "none":
            lines.append(f"token merger: {self.merger_type}, merge ratio {merged / n:.3g} ({n} -> {merged} tokens)")
        elif merged < n:
            lines.append(f"no token merger; max_vision_tokens: {n} -> {merged} tokens, by cover")
        if self.pruning_layers:
            counts = ", ".join(map(str, self.pruned(n)))
            lines.append(f"pruning layers: {list(self.pruning_layers)} ({merged} -> {counts} tokens), {self.pruner_type}")
        return [*lines, falls]

    def check_varying(self, depth: int) -> list[str]:
        """Problems of these settings with a model whose images have different numbers of tokens."""
        problems = self._check_depth(depth)
        if self.merger_type != "none":
            problems.append(f"merger_type: {self.merger_type} needs a fixed number of vision tokens; write none")
        if self.shares() is None:
            problems.append("target_prune_tokens: counts need a fixed number of vision tokens; give shares such as 0.7")
        if self.hard_share < 1:
            problems.append(f"hard_share: {self.hard_share} trains soft masks, which need a fixed number of tokens; write 1.0")
        return problems

    def _check_depth(self, depth: int) -> list[str]:
        beyond = [layer for layer in self.pruning_layers if layer >= depth]
        allowed = f"the language model's {depth} layers; allowed are 0 to {depth - 1}"
        return [f"pruning_layers: {beyond} beyond {allowed}"] if beyond else []

    def check_counts(self, n: int, depth: int) -> list[str]:
        """Problems of these settings with a model of n vision tokens per image and a language model of this depth."""
        problems = self._check_depth(depth)
        by_ratio, target = math.ceil(round(self.merge_ratio * n, 6)), self.target_merge_tokens
        both = target is not None and "merge_ratio" in self.model_fields_set
        if self.merger_type != "none" and both and abs((target or 0) - by_ratio) > 1:
            problems += [
                f"merge_ratio: {self.merge_ratio} keeps {by_ratio} of {n} tokens and contradicts target_merge_tokens "
                f"({target}); remove one of the two lines",
                f"target_merge_tokens: {target} contradicts merge_ratio ({self.merge_ratio}: {by_ratio} of {n} tokens); "
                "remove one of the two lines",
            ]
        before = self.merged(n)
        if self.merger_type != "none" and target is not None and target > n:
            problems.append(f"target_merge_tokens: {target} are more than the {n} vision tokens of an image")
        elif before == n and self.merger_type != "none":
            key = "merge_ratio" if target is None else "target_merge_tokens"
            problems.append(
                f"{key}: leaves all {n} vision tokens, so there is nothing to merge; give less, or merger_type: none"
            )
        problems += self._check_pruned(n)
        return problems

    def _check_pruned(self, n: int) -> Iterator[str]:
        """Problems with the numbers of tokens at the pruning layers."""
        before, counts = self.merged(n), self.pruned(n)
        for layer, arriving, left in zip(self.pruning_layers, (before, *counts), counts, strict=False):
            if left < 1:
                yield f"pruning_layers: {before} tokens are too few for {len(counts)} layers that prune; give fewer layers"
                return
            if left == arriving:
                yield (
                    f"target_prune_tokens: {left} are all the tokens that arrive there (layer {layer}), "
                    "so there is nothing to prune"
                )
                return
            if left > arriving:
                yield f"target_prune_tokens: {left} are more than the {arriving} tokens that arrive there (layer {layer})"
                return


class PruningTraining(Training):
    """For example configs/vision_token_pruning.yaml."""

    several_processes: ClassVar[bool] = True
    examples: ClassVar[dict[str, str]] = {"dataset_settings": QUESTIONS}

    output: FilePath = Path("outputs")
    backbone_settings: Backbone = Backbone()
    dataset_settings: Data
    trainer_settings: Trainer = Trainer()
    method_settings: Pruning = Pruning()

    @property
    def task(self) -> str:
        return "pruning"

    @property
    def threads(self) -> int | None:
        return self.trainer_settings.dl_settings.threads

    @property
    def device(self) -> str | None:
        return self.trainer_settings.dl_settings.device

    @property
    def checkpoint_every(self) -> int:
        return self.trainer_settings.dl_settings.checkpoint_every

    @property
    def keep_checkpoints(self) -> int | str:
        return self.trainer_settings.dl_settings.keep_checkpoints

    @property
    def evaluate_every(self) -> int | None:
        return self.trainer_settings.dl_settings.evaluate_every

    @classmethod
    def default_space(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        return pruning_space.default_space(data)

    def check_files(self) -> Iterator[tuple[str, str]]:
        """Missing files, and settings that do not fit the model, as far as it is known without loading it."""
        for split in ("train", "val"):
            for key in ("questions", "annotations", "images"):
                path = getattr(getattr(self.dataset_settings, split), key)
                if path is not None and not os.path.exists(path):
                    kind = "folder" if key == "images" else "file"
                    yield f"dataset_settings.{split}.{key}", f"no {kind} {short(path, 200)!r}"
        shape = model_shape(self.backbone_settings.name, self.backbone_settings.cache_dir)
        if shape is not None:
            for problem in self.method_settings.check_counts(*shape):
                key, _, message = problem.partition(": ")
                yield f"method_settings.{key}", message

    def recipe(self) -> dict[str, Any]:
        """The keys of the file that decide the result, without those that set where and how it runs."""
        recipe: dict[str, Any] = json.loads(
            self.model_dump_json(exclude={"output": True, "manager_settings": True, "search_settings": True})
        )
        for key in ("num_workers", "threads", "device", "checkpoint_every", "keep_checkpoints", "eval_batch_size"):
            del recipe["trainer_settings"]["dl_settings"][key]
        for key in ("cache_dir", "tower_cache"):
            del recipe["backbone_settings"][key]
        return recipe
