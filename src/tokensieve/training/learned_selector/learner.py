"""The part of a method learns which tokens a frozen model needs, so that its outputs for few tokens match those for all.

Every step draws one of the plans and a batch, runs the model with all tokens and with the plan, and trains the part (of
methods/learned.py, dynamicvit.py, ...) so that the two image features agree, and the two class distributions where there are
classes. Near the optimum these losses say little about single tokens (all their derivatives vanish there), so for `learned` a
third one guides the scores towards the attention of CLS in the full model's next block, the first block that the cut deprives
of tokens. The model is run through the same Handle as everywhere; only what comes after the cut has a gradient, so a step costs
little more than two forward passes.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from tokensieve.config import recipe
from tokensieve.config.learned_selector import SelectorTraining
from tokensieve.core import View
from tokensieve.cutting.handle import Handle
from tokensieve.cutting.placement import place_plan
from tokensieve.data import registry as data_registry
from tokensieve.data.source import Broken, Source
from tokensieve.device import find_device
from tokensieve.errors import UserError, short
from tokensieve.methods.learned import learned
from tokensieve.methods.registry import Method, get_method
from tokensieve.models import loading
from tokensieve.models.features import encode_image
from tokensieve.models.registry import open_tower
from tokensieve.models.tower import Block, Tower
from tokensieve.parts import signature
from tokensieve.plan import Plan
from tokensieve.tasks.zeroshot_classification.classifier import zero_shot_classifier
from tokensieve.training.loader import read_ahead


def build_part(method: Method, tower: Tower, plans: Sequence[Plan]) -> Any:
    """The untrained module of a method, for the cuts of these plans where its weights belong to cuts."""
    width = signature.token_width(tower)
    if "cuts" not in inspect.signature(method.part).parameters:
        return method.part(width)
    cuts: dict[str, int] = {}
    for plan in plans:
        n = first = tower.grid[0] * tower.grid[1]
        for cut in place_plan(plan, tower, seed=0):
            keep = cut.count(n, first)
            n = cut.outputs(n, first)
            if cut.step.method is not method:
                continue
            if method.mixes and cuts.setdefault(cut.name, keep) != keep:
                raise UserError(
                    f"{plan}: {method.name} leaves {cuts[cut.name]} tokens at {cut.name} in another plan; train one"
                )
            cuts[cut.name] = keep
    return method.part(width, cuts=cuts)


class Shuffled(Dataset[tuple[Tensor | None, list[str]]]):
    """Item i is the batch of images of step i, from a shuffle that is new in every epoch, and what of it cannot be read.

    None: nothing can be read. (Nothing is raised, since an error of a worker has its traceback in the message.)
    """

    def __init__(self, source: Source, config: SelectorTraining, start: int) -> None:
        if source.size is None:
            raise UserError(f"{config.dataset} is a stream of shards, which cannot be shuffled; give a data set on the disk")
        if source.size < config.batch:
            raise UserError(
                f"{config.dataset} ({config.split}) has {source.size} images, less than one batch of {config.batch}"
            )
        self.samples: Any = source.samples
        self.size, self.config, self.start = source.size, config, start

    def __len__(self) -> int:
        return self.config.steps - self.start

    def __getitem__(self, offset: int) -> tuple[Tensor | None, list[str]]:
        batch = self.config.batch
        epoch, number = divmod(self.start + offset, self.size // batch)
        order = np.random.default_rng([self.config.seed, epoch, 5]).permutation(self.size)
        samples = [self.samples[int(i)] for i in order[number * batch :][:batch]]
        images = [sample[0] for sample in samples if not isinstance(sample, Broken)]
        broken = [f"{short(sample.name, 200)}: {sample.reason}" for sample in samples if isinstance(sample, Broken)]
        return torch.stack(images) if images else None, broken  # (B, 3, h, w)


def full_outputs(model: nn.Module, images: Tensor, block: Block | None) -> tuple[Tensor, Tensor | None]:
    """With all tokens: the model's unit feature (B, E), and the attention of CLS in this block (B, N), which sums to 1.

    Without a CLS token: the attention of the patches.
    """
    calls: list[Any] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))

    with torch.no_grad():
        if block is None:
            return F.normalize(encode_image(model, images), dim=-1), None
        hook = block.module.register_forward_pre_hook(record, with_kwargs=True)
        try:
            feature = F.normalize(encode_image(model, images), dim=-1)
        finally:
            hook.remove()
        (x, *args), kwargs = calls[0]
        positional, named = block.select_inputs(None, tuple(args), kwargs)
        _, attention = block.attend(x, None, *positional, **named)
        received = View(x[:, attention.prefix :], x[:, : attention.prefix], None, attention).coarse()
        return feature, received / received.sum(-1, keepdim=True)


def has_gradient(loss: Tensor, decided: Tensor | None) -> bool:
    """Whether the loss depends on what a method decided: its scores or its weights."""
    if decided is None or not loss.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(loss, [decided], allow_unused=True, retain_graph=True)
    return gradient is not None and bool(gradient.any())


class SelectorLearner:
    """The frozen model, the selector, its optimizer and its batches, driven by training.loop."""

    def __init__(self, config: SelectorTraining) -> None:
        torch.manual_seed(config.seed)
        self.config = config
        self.device = find_device(config.device)
        self.loaded = loading.load(
            config.model,
            config.pretrained,
            model_type=config.model_type,
            cache_dir=config.model_cache_dir,
            device=self.device,
        )
        self.model: nn.Module = self.loaded.model.requires_grad_(False)
        self.plans = [Plan.parse(text) for text in config.plans]
        self.method = get_method(config.method)
        self.scorer: nn.Module = build_part(self.method, open_tower(self.model), self.plans).to(self.device)
        self.scorer.exploration = config.exploration
        parts = {self.method.name: self.scorer}
        self.handles = [Handle(self.model, plan, config.seed, parts=parts) for plan in self.plans]
        for note in (note for handle in self.handles if not handle.leaves_feature for note in handle.notes):
            raise UserError(f"{note}, so there is nothing to learn; keep fewer")
        self.next_blocks = [self._next_block(plan) for plan in self.plans]
        self.source = self.read(config.split)
        self.broken: dict[str, None] = {}  # images of the training that cannot be read, and why
        self.scale, self.classifier = self._classifier()
        self._check_gradients()
        matrices = [p for p in self.scorer.parameters() if p.ndim >= 2]
        gains = [p for p in self.scorer.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.optimizer.weight_decay}, {"params": gains, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=config.optimizer.lr)
        self.seconds = 0.0
        self._batches: Iterator[tuple[Tensor | None, list[str]]] | None = None

    def step(self, index: int) -> dict[str, float]:
        began = time.perf_counter()
        if self._batches is None:
            self._batches = self._loader(index)
        images = self._readable(*next(self._batches)).to(self.device)
        drawn = int(np.random.default_rng([self.config.seed, index, 6]).integers(len(self.plans)))
        handle = self.handles[drawn]
        samples = index * self.config.batch + torch.arange(len(images))  # different noise for every image of the run
        for group in self.adamw.param_groups:
            group["lr"] = self.config.optimizer.rate(index, self.config.steps)
        self.adamw.zero_grad(set_to_none=True)
        with handle.call(samples=samples):
            loss, values = self._compare(handle, self.next_blocks[drawn], images)
        loss.backward()
        nn.utils.clip_grad_norm_(self.scorer.parameters(), self.config.optimizer.clip)
        self.adamw.step()
        self.seconds += time.perf_counter() - began
        return values

    def _readable(self, images: Tensor | None, broken: list[str]) -> Tensor:
        """The readable images of a batch; a UserError if too many of the data cannot be read."""
        new = [text for text in broken if text not in self.broken]
        if new and not self.broken:
            print(f"tokensieve: cannot read {new[0]}; it is left out", file=sys.stderr)
        self.broken |= dict.fromkeys(new)
        total = self.source.size or 0
        allowed = self.config.allowed(total)
        if images is None or len(self.broken) > allowed:
            raise UserError(
                f"{len(self.broken)} of {total} images of {self.config.dataset} cannot be read, the last {[*self.broken][-1]}; "
                f"at most {allowed} are allowed (max_broken: {self.config.max_broken:g})"
            )
        return images

    def _compare(self, handle: Handle, block: Block | None, images: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The loss between the model's outputs with all tokens and with a plan."""
        target, attention = full_outputs(self.model, images, block)
        self.scorer.train()
        with handle:
            feature = F.normalize(encode_image(self.model, images), dim=-1)
        scores = handle.stages[0][1].scores if attention is not None and handle.stages else None
        return self._loss(feature, target, scores, attention)

    def _loss(
        self, feature: Tensor, target: Tensor, scores: Tensor | None, attention: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        """One minus the cosine of the features; divergences of the class distributions (at the model's temperature) and of
        the scores from the attention."""
        losses = {"feature": (1 - (feature * target).sum(-1)).mean()}
        if self.classifier is not None:
            logits, targets = ((self.scale * x @ self.classifier).log_softmax(-1) for x in (feature, target))
            losses["logits"] = F.kl_div(logits, targets, reduction="batchmean", log_target=True)
        if any(self.next_blocks):  # a row of the log has the same losses at every step
            losses["attention"] = target.new_zeros(())
        if scores is not None and attention is not None:
            losses["attention"] = F.kl_div(scores, attention, reduction="batchmean")
        weights = {"feature": self.config.feature, "logits": self.config.logits, "attention": self.config.attention}
        loss = torch.stack([weights[name] * value for name, value in losses.items()]).sum()
        return loss, {name: float(value.detach()) for name, value in losses.items()}

    def _next_block(self, plan: Plan) -> Block | None:
        """The block after the plan's first cut; None where its attention is not a target, or there is no such block."""
        tower = open_tower(self.model)
        first = place_plan(plan, tower, seed=0)[0]
        wanted = self.config.attention > 0 and first.step.method.name == learned.__name__
        return tower.blocks[first.layer] if wanted and first.layer < tower.depth else None

    def _check_gradients(self) -> None:
        """A UserError where the loss does not depend on the scores of a learned cut, tried on two images."""
        tower = open_tower(self.model)
        images = self._readable(*Shuffled(self.source, self.config, 0)[0])[:2].to(self.device)
        for plan, handle, block in zip(self.plans, self.handles, self.next_blocks, strict=True):
            with handle.call(samples=torch.arange(len(images))):
                loss, _ = self._compare(handle, block, images)
            cuts = zip(place_plan(plan, tower, seed=0), handle.stages, strict=True)
            for cut, (layer, reduction) in cuts:
                decided = reduction.weight if reduction.scores is None else reduction.scores
                if cut.step.method is not self.method or has_gradient(loss, decided):
                    continue
                hint = "keep more tokens" if self.config.feature else "set feature: 1"
                if cut.layer == tower.depth:
                    hint = f"use @{tower.depth // 2}"
                raise UserError(f"{plan}: no loss depends on the selection at layer {layer}, so nothing is learned; {hint}")

    def read(self, split: str, limit: int | None = None) -> Source:
        """A split of the data set, or the first images of it."""
        config = self.config
        return data_registry.build_source(
            config.dataset,
            self.loaded.transform,
            root=config.dataset_root,
            split=split,
            limit=limit,
            needs_class_names=data_registry.contents_of(config.dataset) in ("labels", None),
        )

    def _classifier(self) -> tuple[float, Tensor | None]:
        """The model's temperature and a classifier (E, C); None where data or model have no classes."""
        scale = getattr(self.model, "logit_scale", None)
        if scale is None or not self.source.classes or not self.config.logits:
            return 1.0, None
        source, loaded = self.source, self.loaded
        columns = zero_shot_classifier(
            loaded.model, loaded.tokenizer, source.classes, source.templates, self.device, nullcontext
        )
        return float(scale.exp()), columns.clone()  # a tensor outside of inference mode

    def _loader(self, start: int) -> Iterator[tuple[Tensor | None, list[str]]]:
        return read_ahead(Shuffled(self.source, self.config, start), self.config.workers)

    def state(self) -> dict[str, Any]:
        return {
            "recipe": recipe.recipe(self.config),
            "scorer": self.scorer.state_dict(),
            "adamw": self.adamw.state_dict(),
            "seconds": self.seconds,
            "broken": list(self.broken),
        }

    def restore(self, state: dict[str, Any]) -> None:
        recipe.check_recipe(recipe.recipe(self.config), state["recipe"])
        self.scorer.load_state_dict(state["scorer"])
        self.adamw.load_state_dict(state["adamw"])
        self.seconds = state["seconds"]
        self.broken = dict.fromkeys(state.get("broken", []))  # checkpoints of 0.1 have none
        self._batches = None
