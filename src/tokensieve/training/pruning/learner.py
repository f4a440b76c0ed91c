"""A merger and pruner heads learn to serve a frozen LLaVA, so that it answers with few vision tokens as with all of them.

Every step runs the pruned model on questions with their answers, and the full one too (no gradient) if a loss compares with
it. A discriminator compares the hidden states of the two at the words, the pruned one is trained on the right answer, and the
soft masks of the heads on being decided. Gradients flow through the frozen model to merger and heads.

What a step does depends on the seed and the step alone: batches, noise, and new discriminators. So a resumed run ends with the
same bits. With several processes each takes its share of every batch, and gradients are averaged by one all-reduce for each
group of weights. Since every loss is a mean over questions, one process does the same with a batch that is as many times
larger.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from tokensieve.config.pruning import EMBEDDED, PruningTraining
from tokensieve.config.recipe import check_recipe
from tokensieve.cutting.handle import Handle
from tokensieve.errors import UserError
from tokensieve.methods.cross import Heads
from tokensieve.methods.merger import Merger
from tokensieve.models.loading import vlm as load_vlm
from tokensieve.models.vlm import open_vlm
from tokensieve.parts import signature
from tokensieve.plan import Plan
from tokensieve.tasks.vqa import answering
from tokensieve.training.loader import read_ahead
from tokensieve.training.processes import average, start_accelerator
from tokensieve.training.pruning.batches import Batch, Batches, Collate, read_data
from tokensieve.training.pruning.discriminator import Discriminator, critic_loss
from tokensieve.training.pruning.evaluation import Evaluator
from tokensieve.training.pruning.losses import answer_losses, count_losses
from tokensieve.training.pruning.tower_cache import TowerCache

PARTS = {"token_merger": "merger", "layer_pruners": "cross"}  # group of weights: the method whose part it is
LOSS_GROUPS = {  # by which losses are logged
    "merge_sparsity_loss": "token_merger",
    **dict.fromkeys(("adv_loss", "task_loss", "distill_loss", "mask_sparsity_loss"), "layer_pruners"),
    **dict.fromkeys(("real_loss", "fake_loss", "disc_prob_real", "disc_prob_fake"), "discriminator"),
}


class PruningLearner:
    """The frozen model, three groups of weights with their optimizers, and the questions; driven by training.loop."""

    tie_breaker = ("loss", "min")
    loss_groups = LOSS_GROUPS

    def __init__(self, config: PruningTraining) -> None:
        self.config, self.optim, self.pruning = config, config.trainer_settings.dl_settings, config.method_settings
        self.monitor = (self.optim.monitor, "max" if self.optim.monitor == "accuracy_hard" else "min")
        self.accelerator = start_accelerator(
            self.optim.device,
            self.optim.mixed_precision,
            self.optim.gradient_accumulation_steps,
            key="trainer_settings.dl_settings.device",
        )
        self.device = self.accelerator.device
        backbone = config.backbone_settings
        self.train_data, self.val_data = read_data(config)
        self.loaded = load_vlm.load(
            backbone.name,
            self.device,
            dtype=backbone.dtype,
            attn_implementation=backbone.attn_implementation,
            cache_dir=backbone.cache_dir,
        )
        self.model: Any = self.loaded.model.requires_grad_(False).eval()
        self.processor = self.loaded.processor
        self.vision_tokens, self.depth = check_fit(config, self.model)
        inner = open_vlm(self.model)
        assert inner is not None
        self.tower_cache = TowerCache(backbone.tower_cache, inner.tower, self.loaded.fingerprint)
        self.steps = self._count_steps()
        torch.manual_seed(self.optim.seed)
        self.groups = self._make_parts()
        self.parts = {PARTS[name]: part for name, part in self.groups.items() if name in PARTS}
        self.plan = Plan.parse(self._plan())
        self.handle = Handle(self.model, self.plan, self.optim.seed, parts=self.parts)
        self.optimizers = {
            name: torch.optim.Adam(part.parameters(), lr=getattr(self.optim.optimizers, name).lr)
            for name, part in self.groups.items()
        }
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.optim.mixed_precision == "fp16")
        self.template = answering.BARE if config.dataset_settings.name == EMBEDDED else answering.SHORT
        self.collate = Collate(self.processor, self.template, self.model.config.image_token_id, self.pruning.image_max_size)
        self.seconds = 0.0
        self.broken = 0  # questions of this process that were replaced, since their images could not be read
        self.evaluator = Evaluator(
            config,
            self.model,
            self.processor,
            self.handle,
            self.parts,
            self.val_data,
            self.collate,
            self.template,
            self.vision_tokens,
            self.depth,
            self.accelerator,
            self.tower_cache,
        )
        self._batches: Iterator[tuple[Batch | None, list[str]]] | None = None

    def _plan(self) -> str:
        pruning, n = self.pruning, self.vision_tokens
        entering = pruning.max_vision_tokens if n is None else pruning.merged(n)
        steps = ["merger@out"] if "merger" in self.parts else [f"cover@llm.0:{entering}"] if entering not in (None, n) else []
        if "cross" in self.parts:
            rest = "" if pruning.prune_rest == "drop" else f"(rest={pruning.prune_rest})"
            if n is None:  # the plan itself has the budgets
                shares = zip(pruning.pruning_layers, pruning.shares() or (), strict=True)
                steps += [f"cross@llm.{layer}:{100 * share:.6g}%{rest}" for layer, share in shares]
            else:
                steps.append("cross@llm." + ",".join(map(str, pruning.pruning_layers)) + rest)
        return " + ".join(steps)

    def _make_parts(self) -> dict[str, nn.Module]:
        """Merger, heads and discriminator, those that the file configures."""
        inner, pruning, n = open_vlm(self.model), self.pruning, self.vision_tokens
        assert inner is not None
        width, parts = inner.decoder.width, dict[str, nn.Module]()
        if pruning.merger_type != "none":
            assert inner.tower is not None and n is not None
            parts["token_merger"] = Merger(
                width=signature.token_width(inner.tower),
                question_width=width,
                kind=pruning.merger_type,
                hidden=pruning.merger_hidden,
                keep=pruning.merged(n),
                temperature=pruning.merger_temperature,
                choice=pruning.token_choice,
            )
        if pruning.pruning_layers:
            parts["layer_pruners"] = Heads(
                width=width,
                layers=pruning.pruning_layers,
                d_internal=pruning.pruner_d_internal,
                heads=pruning.pruner_num_heads,
                keep=() if n is None else pruning.pruned(n),
                arriving=None if n is None else pruning.merged(n),
                temperature=pruning.temperature,
                choice=pruning.token_choice,
            )
        if pruning.adv_loss_weight > 0:
            parts["discriminator"] = Discriminator(width, pruning.disc_hidden)
        return {name: part.to(self.device) for name, part in parts.items()}

    @property
    def samples_per_step(self) -> int:
        """Questions of one step, in all processes."""
        return self.optim.batch_size * self.optim.gradient_accumulation_steps * self.accelerator.num_processes

    def _count_steps(self) -> int:
        processes, whole = self.accelerator.num_processes, self.samples_per_step
        if len(self.train_data) < whole:
            raise UserError(
                f"{len(self.train_data)} training questions are less than a step of {whole} ({processes} processes with "
                f"batch_size {self.optim.batch_size}, accumulated {self.optim.gradient_accumulation_steps} times); "
                "lower batch_size"
            )
        steps = self.optim.epochs * (len(self.train_data) // whole)
        steps = min(steps, self.optim.max_steps or steps)
        if self.optim.warmup_steps >= steps:
            raise UserError(f"warmup_steps: {self.optim.warmup_steps} is not less than the {steps} steps of the training")
        return steps

    # --- a step ---------------------------------------------------------------------------------------------------

    def step(self, index: int) -> dict[str, float]:
        began = time.perf_counter()
        accumulation_steps = self.optim.gradient_accumulation_steps
        if self._batches is None:
            self._batches = self._loader(index * accumulation_steps)
        temperature = self._start_step(index)
        means: dict[str, float] = {}
        for _ in range(accumulation_steps):
            losses = self._backward(self._readable(*next(self._batches)).to(self.device), accumulation_steps)
            means = {name: means.get(name, 0.0) + value / accumulation_steps for name, value in losses.items()}
        self._update()
        self.seconds += time.perf_counter() - began
        return means | {"temperature": temperature}

    def _readable(self, batch: Batch | None, broken: list[str]) -> Batch:
        """The batch; a UserError if there is none, or if too many images of the run cannot be read."""
        if broken and not self.broken:
            print(f"{broken[0]}: cannot be read; another question takes its place", file=sys.stderr)
        self.broken += len(broken)
        whole = self.steps * self.optim.gradient_accumulation_steps * self.optim.batch_size
        data = self.config.dataset_settings
        if batch is None or self.broken > data.allowed(whole):
            raise UserError(
                f"{self.broken} images could not be read, the last {broken[-1]}; of the {whole} images of a process "
                f"at most {data.allowed(whole)} are allowed (dataset_settings.max_broken: {data.max_broken:g})"
            )
        return batch

    def _start_step(self, index: int) -> float:
        """Set temperature and learning rates, clear the gradients, and now and then reset the discriminator."""
        temperature = self.pruning.temperature_at(index, self.steps)
        for part in self.parts.values():
            part.train()
        if "cross" in self.parts:
            heads: Any = self.parts["cross"]
            heads.temperature.fill_(temperature)
            heads.straight = index >= round(self.steps * (1 - self.pruning.hard_share))
        drawn = np.random.default_rng([self.optim.seed, index, 9]).random()
        if "discriminator" in self.groups and drawn < self.pruning.disc_reinit_prob:
            critic = self.groups["discriminator"]
            critic.reset_parameters(int(np.random.default_rng([self.optim.seed, index, 10]).integers(2**31)))  # type: ignore[operator]
            self.optimizers["discriminator"].state.clear()
        for name, optimizer in self.optimizers.items():
            rate = 1.0 if name == "discriminator" else self.optim.rate(index, self.steps)
            for group in optimizer.param_groups:
                group["lr"] = rate * getattr(self.optim.optimizers, name).lr
            optimizer.zero_grad(set_to_none=True)
        return temperature

    def _backward(self, batch: Batch, accumulation_steps: int) -> dict[str, float]:
        """The losses of one batch; their gradients are added to the weights' gradients."""
        pruning, critic = self.pruning, self.groups.get("discriminator")
        full = None  # (B, L, D), hidden states of the full model, if a loss compares with them
        if critic is not None or pruning.distill_loss_weight > 0:
            with torch.no_grad(), self.tower_cache, self.accelerator.autocast():
                full = self.model.model(**batch.inputs, use_cache=False).last_hidden_state
        options = self.handle.call(samples=batch.numbers, context={"question": batch.question})
        with self.tower_cache, self.handle, options, self.accelerator.autocast():
            pruned = self.model.model(**batch.inputs, use_cache=False).last_hidden_state
            losses = answer_losses(
                self.model.get_output_embeddings(), pruned, batch.labels, full if pruning.distill_loss_weight > 0 else None
            )
        losses |= count_losses(self.handle)
        weights = {
            "task_loss": pruning.task_loss_weight,
            "distill_loss": pruning.distill_loss_weight,
            "adv_loss": pruning.adv_loss_weight,
            "merge_sparsity_loss": pruning.merge_sparsity_weight,
            "mask_sparsity_loss": pruning.prune_sparsity_weight,
        }
        probabilities: dict[str, float] = {}
        if critic is not None:
            critic.requires_grad_(False)  # this loss trains the other groups only
            losses["adv_loss"] = critic_loss(critic(pruned, batch.words), real=True)
            critic.requires_grad_(True)
        loss = torch.stack([weights[name] * value for name, value in losses.items() if name in weights]).sum()
        self.scaler.scale(loss / accumulation_steps).backward()
        if critic is not None:
            on_full, on_pruned = critic(full, batch.words), critic(pruned.detach(), batch.words)
            losses |= {"real_loss": critic_loss(on_full, real=True), "fake_loss": critic_loss(on_pruned, real=False)}
            self.scaler.scale((losses["real_loss"] + losses["fake_loss"]) / accumulation_steps).backward()
            outputs = {"disc_prob_real": on_full, "disc_prob_fake": on_pruned}
            probabilities = {name: float(logits.detach().sigmoid().mean()) for name, logits in outputs.items()}
        return {name: float(value.detach()) for name, value in losses.items()} | probabilities

    def _update(self) -> None:
        """Update every group, by the mean gradients of all processes."""
        for name, optimizer in self.optimizers.items():
            weights = list(self.groups[name].parameters())
            average([p.grad for p in weights if p.grad is not None], self.accelerator.num_processes)
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(weights, self.optim.clip)
            self.scaler.step(optimizer)
        self.scaler.update()

    def _loader(self, start: int) -> Iterator[tuple[Batch | None, list[str]]]:
        a, optim = self.accelerator, self.optim
        stop = self.steps * optim.gradient_accumulation_steps
        batches = Batches(
            self.train_data, self.collate, optim.batch_size, optim.seed, a.process_index, a.num_processes, start, stop
        )
        return read_ahead(batches, optim.num_workers)

    # --- its state ------------------------------------------------------------------------------------------------

    @property
    def recipe(self) -> dict[str, Any]:
        """What decides the result: keys of the file, and fingerprints of the model and the data that it names."""
        fingerprints = {
            "train": self.train_data.fingerprint,
            "val": self.val_data.fingerprint,
            "model": self.loaded.fingerprint,
        }
        return self.config.recipe() | {"processes": self.accelerator.num_processes, "fingerprints": fingerprints}

    def state(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "groups": {name: part.state_dict() for name, part in self.groups.items()},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "scaler": self.scaler.state_dict(),
            "seconds": self.seconds,
            "broken": self.broken,
        }

    def restore(self, state: dict[str, Any]) -> None:
        check_recipe(self.recipe, state["recipe"])
        self.load_weights(state)
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.scaler.load_state_dict(state["scaler"])
        self.seconds, self.broken = state["seconds"], state["broken"]
        self._batches = None

    def load_weights(self, state: dict[str, Any]) -> None:
        """Load the weights of a state, and nothing else."""
        for name, part in self.groups.items():
            part.load_state_dict(state["groups"][name])

    def exports(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: dict(part.state_dict()) for name, part in self.groups.items()}

    def describe(self) -> list[str]:
        return self.pruning.describe(self.vision_tokens, self.steps)

    def evaluate(self, index: int) -> dict[str, float]:
        return self.evaluator.evaluate()


def check_fit(config: PruningTraining, model: Any) -> tuple[int | None, int]:
    """Vision tokens per image (None: they vary) and layers of the language model.

    A UserError with all settings that do not fit the model.
    """
    inner = open_vlm(model)
    if inner is None:
        raise UserError(
            f"{type(model).__name__} is not a vision-language model; backbone_settings.name: llava-hf/llava-1.5-7b-hf is one"
        )
    n = None if inner.tower is None else inner.tower.grid[0] * inner.tower.grid[1]
    problems, method = [], config.method_settings
    if inner.decoder.implementation not in ("sdpa", "eager"):
        problems.append(
            f"backbone_settings.attn_implementation: {inner.decoder.implementation} has no soft masks; use sdpa or eager"
        )
    depth = inner.decoder.depth
    problems += method.check_varying(depth) if n is None else method.check_counts(n, depth)
    if problems and n is None:
        raise UserError(f"{inner.family}: {'; '.join(problems)}")
    if problems:
        raise UserError("; ".join(problems))
    return n, depth
