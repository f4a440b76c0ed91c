"""A merger and pruner heads learn to serve a frozen LLaVA: with few vision tokens it shall answer as with all of them (S4).

Every step runs the full model once (no gradient) and the pruned one once, on the same questions with their answers. The pruned
one's hidden states at the words shall look like the full one's to a discriminator, and it shall say the right answer; the soft
masks of the heads shall leave as many tokens as the targets say. Gradients go through the frozen model to merger and heads.

What a step does depends on the seed and the step alone: batches, noise, and whether the discriminator begins anew. So a resumed
run ends with the same bits. With several processes each takes its part of every batch, and gradients are averaged by one
all-reduce for each group of weights; since every loss is a mean over questions, that is what one process does with a batch so
many times as large.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve.config.pruning import EMBEDDED, PruningTraining
from tokensieve.config.recipe import check_recipe
from tokensieve.cutting.handle import Handle
from tokensieve.data import vqa_items
from tokensieve.data.images import BrokenImage
from tokensieve.errors import UserError
from tokensieve.measuring import generation
from tokensieve.methods import cross, merger
from tokensieve.methods.cross import Heads
from tokensieve.methods.merger import Merger
from tokensieve.models.loading import vlm as load_vlm
from tokensieve.models.vlm import open_vlm
from tokensieve.parts import signature
from tokensieve.plan import Plan
from tokensieve.tasks.statistics import share_stderr
from tokensieve.tasks.vqa import answering
from tokensieve.tasks.vqa.scores import soft_score
from tokensieve.training.loader import read_ahead
from tokensieve.training.processes import average, start_accelerator
from tokensieve.training.pruning.batches import NO_ANSWER, Batch, Batches, Collate, read_data
from tokensieve.training.pruning.discriminator import Discriminator, critic_loss

PARTS = {"token_merger": "merger", "layer_pruners": "cross"}  # group of weights: the method whose part it is


class PruningLearner:
    """The frozen model, the three groups of weights with their optimizers, and the questions: what the loop drives."""

    monitor = ("accuracy_hard", "max")

    def __init__(self, config: PruningTraining) -> None:
        self.config, self.how, self.goal = config, config.trainer_settings.dl_settings, config.method_settings
        often, key = self.how.gradient_accumulation_steps, "trainer_settings.dl_settings.device"
        self.accelerator = start_accelerator(self.how.device, self.how.mixed_precision, often, key)
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
        self.steps = self._count_steps()
        torch.manual_seed(self.how.seed)
        self.groups = self._make_parts()
        self.parts = {PARTS[name]: part for name, part in self.groups.items() if name in PARTS}
        self.plan = Plan.parse(self._plan())
        self.handle = Handle(self.model, self.plan, self.how.seed, parts=self.parts)
        self.optimizers = {
            name: torch.optim.Adam(part.parameters(), lr=getattr(self.how.optimizers, name).lr)
            for name, part in self.groups.items()
        }
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.how.mixed_precision == "fp16")
        self.template = answering.BARE if config.dataset_settings.name == EMBEDDED else answering.SHORT
        self.collate = Collate(self.processor, self.template, self.model.config.image_token_id, self.goal.image_max_size)
        self.seconds = 0.0
        self.broken = 0  # questions of this process that another one replaced, since their images could not be read
        self.answered: dict[str, list[float | None]] = {}  # of the full model, which answers the same way at every evaluation
        self._batches: Iterator[tuple[Batch | None, list[str]]] | None = None

    def _plan(self) -> str:
        steps = ["merger@out"] if "merger" in self.parts else []
        if "cross" in self.parts:
            rest = "" if self.goal.prune_rest == "drop" else f"(rest={self.goal.prune_rest})"
            steps.append("cross@llm." + ",".join(map(str, self.goal.pruning_layers)) + rest)
        return " + ".join(steps)

    def _make_parts(self) -> dict[str, nn.Module]:
        """Merger, heads and discriminator, those that the file asks for."""
        inner, goal, n = open_vlm(self.model), self.goal, self.vision_tokens
        assert inner is not None
        width, made = inner.decoder.width, dict[str, nn.Module]()
        if goal.merger_type != "none":
            assert inner.tower is not None
            made["token_merger"] = Merger(
                width=signature.token_width(inner.tower),
                question_width=width,
                kind=goal.merger_type,
                hidden=goal.merger_hidden,
                keep=goal.merged(n),
                temperature=goal.temperature,
            )
        if goal.pruning_layers:
            made["layer_pruners"] = Heads(
                width=width,
                layers=goal.pruning_layers,
                d_internal=goal.pruner_d_internal,
                heads=goal.pruner_num_heads,
                keep=goal.target_prune_tokens,
                arriving=goal.merged(n),
                temperature=goal.temperature,
            )
        if goal.adv_loss_weight > 0:
            made["discriminator"] = Discriminator(width, goal.disc_hidden)
        return {name: part.to(self.device) for name, part in made.items()}

    @property
    def a_step(self) -> int:
        """Questions that a step sees, in all processes."""
        return self.how.batch_size * self.how.gradient_accumulation_steps * self.accelerator.num_processes

    def _count_steps(self) -> int:
        world, whole = self.accelerator.num_processes, self.a_step
        if len(self.train_data) < whole:
            raise UserError(
                f"{len(self.train_data)} training questions are less than a step of {whole} ({world} processes with batch_size "
                f"{self.how.batch_size}, accumulated {self.how.gradient_accumulation_steps} times); lower batch_size"
            )
        steps = self.how.epochs * (len(self.train_data) // whole)
        steps = min(steps, self.how.max_steps or steps)
        if self.how.warmup_steps >= steps:
            raise UserError(f"warmup_steps: {self.how.warmup_steps} is not less than the {steps} steps of the training")
        return steps

    # --- a step ---------------------------------------------------------------------------------------------------

    def step(self, index: int) -> dict[str, float]:
        began = time.perf_counter()
        often = self.how.gradient_accumulation_steps
        if self._batches is None:
            self._batches = self._loader(index * often)
        temperature = self._begin(index)
        told: dict[str, float] = {}
        for _ in range(often):
            numbers = self._learn(self._readable(*next(self._batches)).to(self.device), often)
            told = {name: told.get(name, 0.0) + value / often for name, value in numbers.items()}
        self._move()
        self.seconds += time.perf_counter() - began
        return told | {"temperature": temperature}

    def _readable(self, batch: Batch | None, broken: list[str]) -> Batch:
        """The batch; a UserError if there is none, or if of all that is to be read too much cannot be."""
        if broken and not self.broken:
            print(f"{broken[0]}: an image that cannot be read; another question takes its place", file=sys.stderr)
        self.broken += len(broken)
        whole = self.steps * self.how.gradient_accumulation_steps * self.how.batch_size
        data = self.config.dataset_settings
        if batch is None or self.broken > data.allowed(whole):
            raise UserError(
                f"{self.broken} images could not be read, the last {broken[-1]}; of the {whole} that a process learns from "
                f"{data.allowed(whole)} may be so (dataset_settings.max_broken: {data.max_broken:g})"
            )
        return batch

    def _begin(self, index: int) -> float:
        """Temperature, learning rates, and now and then a new discriminator."""
        temperature = self.goal.temperature_at(index, self.steps)
        for part in self.parts.values():
            part.train()
            part.temperature.fill_(temperature)  # type: ignore[operator]
        if "cross" in self.parts:
            self.parts["cross"].straight = index >= round(self.steps * (1 - self.goal.hard_share))  # type: ignore[assignment]
        drawn = np.random.default_rng([self.how.seed, index, 9]).random()
        if "discriminator" in self.groups and drawn < self.goal.disc_reinit_prob:
            critic = self.groups["discriminator"]
            critic.begin_anew(int(np.random.default_rng([self.how.seed, index, 10]).integers(2**31)))  # type: ignore[operator]
            self.optimizers["discriminator"].state.clear()
        for name, optimizer in self.optimizers.items():
            rate = 1.0 if name == "discriminator" else self.how.rate(index, self.steps)
            for group in optimizer.param_groups:
                group["lr"] = rate * getattr(self.how.optimizers, name).lr
            optimizer.zero_grad(set_to_none=True)
        return temperature

    def _learn(self, batch: Batch, often: int) -> dict[str, float]:
        """The losses of one batch, their gradients added to the weights' own."""
        with torch.no_grad(), self.accelerator.autocast():
            real = self.model.model(**batch.inputs, use_cache=False).last_hidden_state  # (B, L, D)
        options = self.handle.call(samples=batch.numbers, context={"question": batch.question})
        with self.handle, options, self.accelerator.autocast():
            fake = self.model.model(**batch.inputs, use_cache=False).last_hidden_state
            losses = self._answer_losses(real, fake, batch)
        losses |= self._count_losses()
        goal, critic = self.goal, self.groups.get("discriminator")
        weights = {
            "task_loss": goal.task_loss_weight,
            "distill_loss": goal.distill_loss_weight,
            "adv_loss": goal.adv_loss_weight,
            "merge_sparsity_loss": goal.merge_sparsity_weight,
            "mask_sparsity_loss": goal.prune_sparsity_weight,
        }
        odds: dict[str, float] = {}
        if critic is not None:
            critic.requires_grad_(False)  # it is asked, and learns nothing from it
            losses["adv_loss"] = critic_loss(critic(fake, batch.words), real=True)
            critic.requires_grad_(True)
        loss = torch.stack([weights[name] * value for name, value in losses.items() if name in weights]).sum()
        self.scaler.scale(loss / often).backward()
        if critic is not None:
            on_real, on_fake = critic(real, batch.words), critic(fake.detach(), batch.words)
            losses |= {"real_loss": critic_loss(on_real, real=True), "fake_loss": critic_loss(on_fake, real=False)}
            self.scaler.scale((losses["real_loss"] + losses["fake_loss"]) / often).backward()
            seen = {"disc_prob_real": on_real, "disc_prob_fake": on_fake}
            odds = {name: float(logits.detach().sigmoid().mean()) for name, logits in seen.items()}
        return {name: float(value.detach()) for name, value in losses.items()} | odds

    def _answer_losses(self, real: Tensor, fake: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The mean over questions of the answer's cross-entropy, and of the divergence from what the full model says."""
        head, said = self.model.get_output_embeddings(), batch.labels != NO_ANSWER
        logits, owner = head(fake[said]).float(), said.nonzero()[:, 0]  # (answer tokens, words), (answer tokens,)
        share = 1.0 / (said.sum(1)[owner] * len(said))  # of every answer, long or short, the same weight
        losses = {"task_loss": (F.cross_entropy(logits, batch.labels[said], reduction="none") * share).sum()}
        if self.goal.distill_loss_weight > 0:
            meant = head(real[said]).float().log_softmax(-1)
            apart = F.kl_div(logits.log_softmax(-1), meant, reduction="none", log_target=True).sum(-1)
            losses["distill_loss"] = (apart * share).sum()
        return losses

    def _count_losses(self) -> dict[str, Tensor]:
        """How far merger and heads are from the numbers of tokens they are to leave, and what they leave."""
        losses: dict[str, Tensor] = {}
        heads: Any = self.parts.get("cross")
        stays: Any = 1.0  # (B, N), the probability of being there still
        off: list[Tensor] = []
        for place, made in (*self.handle.stages, *self.handle.soft):
            assert made.scores is not None
            if place == "out":
                losses["merge_sparsity_loss"] = merger.sparsity(made.scores, made.k)
                continue
            here = (made.scores / heads.temperature).sigmoid() if made.soft is None else made.soft
            stays = here if made.soft is None else stays * here  # on the hard path, what was dropped before is not there
            off.append(cross.sparsity(stays, heads.budget(place)))
            losses[f"tokens_{place}"] = stays.sum(-1).mean()
        if off:
            losses["mask_sparsity_loss"] = torch.stack(off).sum()
        return losses

    def _move(self) -> None:
        """The groups' own steps, by gradients that are the mean of all processes'."""
        for name, optimizer in self.optimizers.items():
            weights = list(self.groups[name].parameters())
            average([p.grad for p in weights if p.grad is not None], self.accelerator.num_processes)
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(weights, self.how.clip)
            self.scaler.step(optimizer)
        self.scaler.update()

    def _loader(self, start: int) -> Iterator[tuple[Batch | None, list[str]]]:
        a, how = self.accelerator, self.how
        stop = self.steps * how.gradient_accumulation_steps
        data = Batches(self.train_data, self.collate, how.batch_size, how.seed, a.process_index, a.num_processes, start, stop)
        return read_ahead(data, how.num_workers)

    # --- its state ------------------------------------------------------------------------------------------------

    @property
    def recipe(self) -> dict[str, Any]:
        """What decides the result: the file, and what the model and the data are that it names."""
        given = {"train": self.train_data.fingerprint, "val": self.val_data.fingerprint, "model": self.loaded.fingerprint}
        return self.config.recipe() | {"processes": self.accelerator.num_processes, "fingerprints": given}

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
        self.take(state)
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        self.scaler.load_state_dict(state["scaler"])
        self.seconds, self.broken = state["seconds"], state["broken"]
        self._batches = None

    def take(self, state: dict[str, Any]) -> None:
        """The weights of a state, and nothing else of it."""
        for name, part in self.groups.items():
            part.load_state_dict(state["groups"][name])

    def exports(self) -> dict[str, dict[str, Tensor]]:
        return {name: dict(part.state_dict()) for name, part in self.groups.items()}

    # --- measuring ------------------------------------------------------------------------------------------------

    def evaluate(self, index: int) -> dict[str, float]:
        """Accuracies of the full model, the soft path and the hard path on the validation questions; tokens and FLOPs."""
        with self._still():
            scores = self.answered | {"soft": self._score(soft=True), "hard": self._score(soft=False)}
            if not self.answered:
                scores["baseline"] = self._score(soft=None)
                self.answered = {"baseline": scores["baseline"]}
            broken, n = scores["hard"].count(None), len(scores["hard"])
            data = self.config.dataset_settings
            if broken > data.allowed(n) or broken == n:
                raise UserError(
                    f"{broken} of {n} validation images could not be read; {data.allowed(n)} may be so "
                    f"(dataset_settings.max_broken: {data.max_broken:g})"
                )
            reached = {name: torch.tensor([score or 0.0 for score in scores[name]]) for name in ("baseline", "soft", "hard")}
            told = {f"accuracy_{name}": float(found.mean()) for name, found in reached.items()}
            drop = reached["hard"] - reached["baseline"]
            told |= {"accuracy_drop": -float(drop.mean()), "accuracy_drop_stderr": float(drop.std()) / n**0.5 if n > 1 else 0.0}
            told |= {"accuracy_hard_stderr": share_stderr(told["accuracy_hard"], n), "questions": n}
            return told | {"unreadable": broken} | self._costs()

    def _asked(self, first: int = 0, every: int = 1) -> Iterator[vqa_items.VqaItem | None]:
        """Every so many of the validation questions; None for one whose image cannot be read."""
        for i in range(first, len(self.val_data), every):
            try:
                yield self.collate.reduced(self.val_data[i])
            except BrokenImage:
                yield None

    def _score(self, soft: bool | None) -> list[float | None]:
        """The score of every validation question, by soft masks, by hard ones, or (soft=None) of the full model.

        None for one that could not be asked. A batch of images is in memory at a time.
        """
        a = self.accelerator
        people: list[list[str] | None] = []  # what they answered

        def mine() -> Iterator[vqa_items.VqaItem]:
            for item in self._asked(a.process_index, a.num_processes):
                people.append(None if item is None else item.answers)
                if item is not None:
                    yield item

        for part in self.parts.values():
            part.soft = bool(soft)  # type: ignore[assignment]
        with self.handle if soft is not None else nullcontext():
            answers = answering.answer_questions(
                self.model, self.processor, mine(), self.how.eval_batch_size, self.how.max_new_tokens, self.template
            )
        for part in self.parts.values():
            part.soft = False  # type: ignore[assignment]
        said = iter(answers)
        found = [None if known is None else soft_score(next(said), known) for known in people]
        if a.num_processes == 1:
            return found
        from accelerate.utils import gather_object  # type: ignore[import-untyped]

        return list(gather_object(found))

    def _sample(self, size: int) -> Batch:
        """The first validation questions that can be asked."""
        items = list(islice(filter(None, self._asked()), size))
        return self.collate(items, torch.zeros(1, dtype=torch.long)).to(self.device)

    @torch.no_grad()
    def times(self) -> dict[str, float]:
        """Median seconds of a batch of questions, answers of a few tokens included, with and without the parts in one run."""
        inputs = self._sample(self.how.eval_batch_size).inputs
        with self._still():
            row = generation.measure(self.model, inputs, self.handle, repeats=5, new_tokens=2)
        reading = ("selection", "prefill")
        return {
            "seconds": row["seconds"]["total"],
            "seconds_baseline": row["seconds_full"]["total"],
            "seconds_prefill": sum(row["seconds"][phase] for phase in reading),
            "seconds_prefill_baseline": sum(row["seconds_full"][phase] for phase in reading),
        }

    @torch.no_grad()
    def _costs(self) -> dict[str, float]:
        """Vision tokens at every stage and FLOPs of the language model for one question, its heads included."""
        one = self._sample(1)
        full = language_gflops(self.model, one.inputs)
        with self.handle:
            pruned = language_gflops(self.model, one.inputs)
        n = self.vision_tokens
        after = {row.layer: row.tokens_out for row in self.handle.ledger}
        merged = after.get("out", n)
        by_layer, left = [], merged
        for layer in range(self.depth):
            left = after.get(f"llm.{layer}", left)
            by_layer.append(left)
        mean = sum(by_layer) / self.depth
        return {
            "avg_original_tokens": n,
            "avg_merged_tokens": merged,
            "keep_ratio_merge": merged / n,
            **{f"tokens_after_layer_{layer}": by_layer[layer] for layer in self.goal.pruning_layers},
            "avg_tokens_over_layers": mean,
            "tokens_cut_over_layers": 1 - mean / n,
            "tokens_cut_at_end": 1 - by_layer[-1] / n,
            "llm_gflops_baseline": full,
            "llm_gflops": pruned,
            "llm_flops_cut": 1 - pruned / full,
        }

    @contextmanager
    def _still(self) -> Iterator[None]:
        """Parts in evaluation, the question found by the plumbing; afterwards all is as it was in training."""
        for part in self.parts.values():
            part.eval()
        try:
            yield
        finally:
            for part in self.parts.values():
                part.train()


def check_fit(config: PruningTraining, model: Any) -> tuple[int, int]:
    """Vision tokens of an image and layers of the language model; a UserError names all of the file that they cannot do."""
    goal, inner = config.method_settings, open_vlm(model)
    if inner is None:
        raise UserError(
            f"{type(model).__name__} is no vision-language model; backbone_settings.name: llava-hf/llava-1.5-7b-hf is one"
        )
    if inner.tower is None:
        raise UserError(
            f"{inner.family}: {inner.reason}; the number of its vision tokens is not fixed, so no counts can be trained for"
        )
    n, wrong = inner.tower.grid[0] * inner.tower.grid[1], []
    if inner.decoder.implementation not in ("sdpa", "eager"):
        wrong.append(
            f"backbone_settings.attn_implementation: {inner.decoder.implementation} takes no soft masks; use sdpa or eager"
        )
    wrong += goal.check_counts(n, inner.decoder.depth)
    if wrong:
        raise UserError("; ".join(wrong))
    return n, inner.decoder.depth


def language_gflops(model: Any, inputs: dict[str, Tensor]) -> float:
    """GFLOPs of the language model, and of what a plan does inside it, for one forward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model(**inputs, use_cache=False)
    counts = counter.get_flop_counts()
    (name,) = (name for name in counts if name.endswith(".language_model"))
    return sum(counts[name].values()) / 1e9
