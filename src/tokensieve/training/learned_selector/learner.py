"""A selector learns which tokens a frozen model needs: what the model says of few tokens shall be what it says of all.

Every step draws one of the plans and a batch, lets the stock model see all tokens and the plan choose some, and moves the
selector (methods/learned.py) so that the two image features agree, and the two class distributions where there are classes.
Near the goal these losses say little about single tokens (all their derivatives vanish there), so a third one tells where to
look: the scores shall be what CLS attends to in the full model's next block, the first that the cut keeps from seeing all.
The model is run through the same Handle as everywhere; only what comes after the cut has a gradient, so a step costs little
more than looking at the pictures twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
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
from tokensieve.errors import UserError
from tokensieve.methods.learned import Scorer, learned
from tokensieve.models import loading
from tokensieve.models.features import encode_image
from tokensieve.models.registry import open_tower
from tokensieve.models.tower import Block
from tokensieve.parts import signature
from tokensieve.plan import Plan
from tokensieve.tasks.zeroshot_classification.classifier import zero_shot_classifier
from tokensieve.training.loader import read_ahead

METHOD = learned.__name__


class Shuffled(Dataset[Tensor]):
    """Item i is the batch of images of step i: the next ones of a shuffle that is new in every epoch."""

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

    def __getitem__(self, offset: int) -> Tensor:
        batch = self.config.batch
        epoch, place = divmod(self.start + offset, self.size // batch)
        order = np.random.default_rng([self.config.seed, epoch, 5]).permutation(self.size)
        found = [self.samples[int(i)] for i in order[place * batch :][:batch]]
        images = [sample[0] for sample in found if not isinstance(sample, Broken)]
        if not images:
            raise UserError(
                f"no image of a whole batch of {self.config.dataset} can be read; look at the files of the data set"
            )
        return torch.stack(images)  # (B, 3, h, w)


def seen_in_full(model: nn.Module, images: Tensor, block: Block | None) -> tuple[Tensor, Tensor | None]:
    """Of all tokens: the model's unit feature (B, E), and what CLS attends to in this block (B, N), adding up to 1.

    Without a CLS token: what the patches attend to.
    """
    caught: list[Any] = []

    def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append((args, kwargs))

    with torch.no_grad():
        if block is None:
            return F.normalize(encode_image(model, images), dim=-1), None
        hook = block.module.register_forward_pre_hook(catch, with_kwargs=True)
        try:
            goal = F.normalize(encode_image(model, images), dim=-1)
        finally:
            hook.remove()
        (x, *given), named = caught[0]
        args, kwargs = block.select_inputs(None, tuple(given), named)
        _, attention = block.attend(x, None, *args, **kwargs)
        heard = View(x[:, attention.prefix :], x[:, : attention.prefix], None, attention).coarse()
        return goal, heard / heard.sum(-1, keepdim=True)


def has_slope(loss: Tensor, scores: Tensor | None) -> bool:
    """Whether other scores would change the loss."""
    if scores is None or not loss.requires_grad:
        return False
    (slope,) = torch.autograd.grad(loss, [scores], allow_unused=True, retain_graph=True)
    return slope is not None and bool(slope.any())


class SelectorLearner:
    """The frozen model, the selector, its optimizer and the batches: what the loop drives."""

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
        self.scorer = Scorer(signature.token_width(open_tower(self.model))).to(self.device)
        self.scorer.exploration = config.exploration
        self.plans = [Plan.parse(text) for text in config.plans]
        self.handles = [Handle(self.model, plan, config.seed, parts={METHOD: self.scorer}) for plan in self.plans]
        for note in (note for handle in self.handles for note in handle.notes):
            raise UserError(f"{note}, so there is nothing to learn; keep fewer")
        self.nexts = [self._next_block(plan) for plan in self.plans]
        self.source = self.read(config.split)
        self.scale, self.classifier = self._classifier()
        self._check_teaching()
        matrices = [p for p in self.scorer.parameters() if p.ndim >= 2]
        gains = [p for p in self.scorer.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": config.optimizer.weight_decay}, {"params": gains, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, lr=config.optimizer.lr)
        self.seconds = 0.0
        self._batches: Iterator[Tensor] | None = None

    def step(self, index: int) -> dict[str, float]:
        began = time.perf_counter()
        if self._batches is None:
            self._batches = self._loader(index)
        images = next(self._batches).to(self.device)
        drawn = int(np.random.default_rng([self.config.seed, index, 6]).integers(len(self.plans)))
        handle = self.handles[drawn]
        samples = index * self.config.batch + torch.arange(len(images))  # other noise for every image of the run
        for group in self.adamw.param_groups:
            group["lr"] = self.config.optimizer.rate(index, self.config.steps)
        self.adamw.zero_grad(set_to_none=True)
        with handle.call(samples=samples):
            loss, told = self._compare(handle, self.nexts[drawn], images)
        loss.backward()
        nn.utils.clip_grad_norm_(self.scorer.parameters(), self.config.optimizer.clip)
        self.adamw.step()
        self.seconds += time.perf_counter() - began
        return told

    def _compare(self, handle: Handle, block: Block | None, images: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The loss between what the model says of all tokens and of those that a plan leaves it."""
        goal, heard = seen_in_full(self.model, images, block)
        self.scorer.train()
        with handle:
            feature = F.normalize(encode_image(self.model, images), dim=-1)
        scores = handle.stages[0][1].scores if heard is not None and handle.stages else None
        return self._loss(feature, goal, scores, heard)

    def _loss(
        self, feature: Tensor, goal: Tensor, scores: Tensor | None, heard: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        """One minus the cosine of the features; divergences of the class distributions (at the model's temperature) and of
        the scores from the attention."""
        losses = {"feature": (1 - (feature * goal).sum(-1)).mean()}
        if self.classifier is not None:
            said, meant = ((self.scale * x @ self.classifier).log_softmax(-1) for x in (feature, goal))
            losses["logits"] = F.kl_div(said, meant, reduction="batchmean", log_target=True)
        if any(self.nexts):  # a row of the log has the same losses at every step
            losses["attention"] = goal.new_zeros(())
        if scores is not None and heard is not None:
            losses["attention"] = F.kl_div(scores, heard, reduction="batchmean")
        weights = {"feature": self.config.feature, "logits": self.config.logits, "attention": self.config.attention}
        loss = torch.stack([weights[name] * value for name, value in losses.items()]).sum()
        return loss, {name: float(value.detach()) for name, value in losses.items()}

    def _next_block(self, plan: Plan) -> Block | None:
        """The block after the plan's first cut; None where it is not to be imitated, or there is none."""
        tower = open_tower(self.model)
        first = place_plan(plan, tower, seed=0)[0]
        wanted = self.config.attention > 0 and first.step.method.name == METHOD
        return tower.blocks[first.layer] if wanted and first.layer < tower.depth else None

    def _check_teaching(self) -> None:
        """A UserError where the loss has no slope in the scores of a learned cut: tried on two images, not foreseen."""
        tower = open_tower(self.model)
        images = Shuffled(self.source, self.config, 0)[0][:2].to(self.device)
        for plan, handle, block in zip(self.plans, self.handles, self.nexts, strict=True):
            with handle.call(samples=torch.arange(len(images))):
                loss, _ = self._compare(handle, block, images)
            met = zip(place_plan(plan, tower, seed=0), handle.stages, strict=True)
            for cut, (name, made) in met:
                if cut.step.method.name != METHOD or has_slope(loss, made.scores):
                    continue
                mend = "keep more tokens" if self.config.feature else "set feature: 1"
                if cut.layer == tower.depth:
                    mend = f"use @{tower.depth // 2}"
                raise UserError(f"{plan}: no loss looks at what is chosen at layer {name}, so nothing is learned; {mend}")

    def read(self, split: str, limit: int | None = None) -> Source:
        """A split of the data set, or the first images of it."""
        config = self.config
        return data_registry.build_source(
            config.dataset, self.loaded.transform, root=config.dataset_root, split=split, limit=limit
        )

    def _classifier(self) -> tuple[float, Tensor | None]:
        """The model's temperature and one column a class (E, C); None where data or model know no classes."""
        scale = getattr(self.model, "logit_scale", None)
        if scale is None or not self.source.classes or not self.config.logits:
            return 1.0, None
        source, made = self.source, self.loaded
        columns = zero_shot_classifier(made.model, made.tokenizer, source.classes, source.templates, self.device, nullcontext)
        return float(scale.exp()), columns.clone()  # no longer of inference mode

    def _loader(self, start: int) -> Iterator[Tensor]:
        return read_ahead(Shuffled(self.source, self.config, start), self.config.workers)

    def state(self) -> dict[str, Any]:
        return {
            "recipe": recipe.recipe(self.config),
            "scorer": self.scorer.state_dict(),
            "adamw": self.adamw.state_dict(),
            "seconds": self.seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        recipe.check_recipe(recipe.recipe(self.config), state["recipe"])
        self.scorer.load_state_dict(state["scorer"])
        self.adamw.load_state_dict(state["adamw"])
        self.seconds = state["seconds"]
        self._batches = None
