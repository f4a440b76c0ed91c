"""Evaluation of two-stage VLM pruning on validation questions: accuracies, numbers of tokens, FLOPs and times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.config.pruning import PruningTraining
from tokensieve.cutting.handle import Handle
from tokensieve.data import vqa_items
from tokensieve.data.images import BrokenImage
from tokensieve.errors import UserError
from tokensieve.measuring import generation
from tokensieve.tasks.statistics import share_stderr
from tokensieve.tasks.vqa import answering
from tokensieve.tasks.vqa.scores import soft_score
from tokensieve.training.pruning.batches import Batch, Collate
from tokensieve.training.pruning.losses import answer_losses
from tokensieve.training.pruning.tower_cache import TowerCache


@dataclass
class Evaluator:
    """Measures the model with soft masks, with hard ones as in use, and without pruning."""

    config: PruningTraining
    model: Any
    processor: Any
    handle: Handle
    parts: dict[str, nn.Module]
    data: vqa_items.VqaData  # the validation questions
    collate: Collate
    template: str
    vision_tokens: int | None  # per image; None: they vary
    depth: int  # layers of the language model
    accelerator: Any
    tower_cache: TowerCache
    baseline: list[float | None] = field(default_factory=list)  # scores of the full model, which do not change

    def evaluate(self) -> dict[str, float]:
        """Accuracies of the full model, the soft path and the hard path on the validation questions; tokens and FLOPs."""
        with self._evaluation_mode():
            scores = {"hard": self.score(soft=False)}
            if self.vision_tokens is not None:  # soft masks need a fixed number of tokens
                scores["soft"] = self.score(soft=True)
            self.baseline = scores["baseline"] = self.baseline or self.score(soft=None)
            broken, n = scores["hard"].count(None), len(scores["hard"])
            data = self.config.dataset_settings
            if broken > data.allowed(n) or broken == n:
                raise UserError(
                    f"{broken} of {n} validation images could not be read; at most {data.allowed(n)} are allowed "
                    f"(dataset_settings.max_broken: {data.max_broken:g})"
                )
            values = {
                name: torch.tensor([score or 0.0 for score in scores[name]])
                for name in ("baseline", "soft", "hard")
                if name in scores
            }
            numbers = {f"accuracy_{name}": float(value.mean()) for name, value in values.items()}
            drop = values["hard"] - values["baseline"]
            drop_stderr = float(drop.std()) / n**0.5 if n > 1 else 0.0
            numbers |= {"accuracy_drop": -float(drop.mean()), "accuracy_drop_stderr": drop_stderr}
            numbers |= {"accuracy_hard_stderr": share_stderr(numbers["accuracy_hard"], n), "questions": n}
            return numbers | {"loss": self.loss(), "unreadable": broken} | self.costs()

    def _questions(self, first: int = 0, every: int = 1) -> Iterator[vqa_items.VqaItem | None]:
        """Every so many of the validation questions; None for one whose image cannot be read."""
        for i in range(first, len(self.data), every):
            try:
                yield self.collate.reduced(self.data[i])
            except BrokenImage:
                yield None

    def score(self, soft: bool | None) -> list[float | None]:
        """The score of every validation question, with soft masks, with hard ones, or (soft=None) of the full model.

        None for a question whose image cannot be read. Only one batch of images is in memory.
        """
        a, settings = self.accelerator, self.config.trainer_settings.dl_settings
        references: list[list[str] | None] = []

        def mine() -> Iterator[vqa_items.VqaItem]:
            for item in self._questions(a.process_index, a.num_processes):
                references.append(None if item is None else item.answers)
                if item is not None:
                    yield item

        for part in self.parts.values():
            part.soft = bool(soft)  # type: ignore[assignment]
        with self.tower_cache, self.handle if soft is not None else nullcontext():
            answers = answering.answer_questions(
                self.model, self.processor, mine(), settings.eval_batch_size, settings.max_new_tokens, self.template
            )
        for part in self.parts.values():
            part.soft = False  # type: ignore[assignment]
        left = iter(answers)
        scores = [None if reference is None else soft_score(next(left), reference) for reference in references]
        if a.num_processes == 1:
            return scores
        from accelerate.utils import gather_object  # type: ignore[import-untyped]

        return list(gather_object(scores))

    @torch.no_grad()
    def loss(self) -> float:
        """The mean over validation questions of the answer's cross-entropy on the hard path."""
        a, size = self.accelerator, self.config.trainer_settings.dl_settings.eval_batch_size
        questions = filter(None, self._questions(a.process_index, a.num_processes))
        total = torch.zeros(2, dtype=torch.float64)  # the sum of the losses, and the number of questions
        while items := list(islice(questions, size)):
            batch = self.collate(items, torch.arange(len(items))).to(a.device)
            options = self.handle.call(context={"question": batch.question})
            with self.tower_cache, self.handle, options, a.autocast():
                states = self.model.model(**batch.inputs, use_cache=False).last_hidden_state
                losses = answer_losses(self.model.get_output_embeddings(), states, batch.labels)
            total += torch.tensor([float(losses["task_loss"]) * len(items), len(items)], dtype=torch.float64)
        sums = a.reduce(total.to(a.device, torch.float32), "sum")
        return float(sums[0] / sums[1])

    def _sample(self, size: int) -> Batch:
        """The first validation questions whose images can be read."""
        items = list(islice(filter(None, self._questions()), size))
        return self.collate(items, torch.zeros(1, dtype=torch.long)).to(self.accelerator.device)

    @torch.no_grad()
    def times(self) -> dict[str, float]:
        """Median seconds of a batch of questions, answers of a few tokens included, with and without the plan in one run."""
        inputs = self._sample(self.config.trainer_settings.dl_settings.eval_batch_size).inputs
        with self._evaluation_mode():
            row = generation.measure(self.model, inputs, self.handle, repeats=5, new_tokens=2, what=("phases",))
        before_answer = ("selection", "prefill")
        return {
            "seconds": row["seconds"]["total"],
            "seconds_baseline": row["seconds_full"]["total"],
            "seconds_prefill": sum(row["seconds"][phase] for phase in before_answer),
            "seconds_prefill_baseline": sum(row["seconds_full"][phase] for phase in before_answer),
        }

    @torch.no_grad()
    def costs(self) -> dict[str, float]:
        """Vision tokens at every stage and FLOPs of the language model for one question, its heads included."""
        one = self._sample(1)
        full = language_gflops(self.model, one.inputs)
        with self.handle:
            pruned = language_gflops(self.model, one.inputs)
        n = self.vision_tokens or self.handle.ledger[0].tokens_in
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
            **{f"tokens_after_layer_{layer}": by_layer[layer] for layer in self.config.method_settings.pruning_layers},
            "avg_tokens_over_layers": mean,
            "tokens_cut_over_layers": 1 - mean / n,
            "tokens_cut_at_end": 1 - by_layer[-1] / n,
            "llm_gflops_baseline": full,
            "llm_gflops": pruned,
            "llm_flops_cut": 1 - pruned / full,
        }

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """The parts in evaluation mode; afterwards in training mode again."""
        for part in self.parts.values():
            part.eval()
        try:
            yield
        finally:
            for part in self.parts.values():
                part.train()


def language_gflops(model: Any, inputs: dict[str, Tensor]) -> float:
    """GFLOPs of the language model, including what a plan does inside it, for one forward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model(**inputs, use_cache=False)
    counts = counter.get_flop_counts()
    (name,) = (name for name in counts if name.endswith(".language_model"))
    return sum(counts[name].values()) / 1e9
