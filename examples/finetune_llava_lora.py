"""Fine-tune a LLaVA with LoRA adapters and a plan on, beside one with all tokens: time, memory and accuracy of both.

    python examples/finetune_llava_lora.py --plan cover@out:8

The embedded LLaVA learns to answer from fewer image tokens than it was trained with. Adapters (PEFT) are on the attention
of the language model and on the projector. To train on your own questions, replace `draw`; to train another model, `load`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import AutoProcessor, LlavaForConditionalGeneration

import tokensieve
from tokensieve import embedded
from tokensieve.embedded import scenes
from tokensieve.embedded.datasets import split_seed
from tokensieve.embedded.scene_texts import Question, ask
from tokensieve.measuring.memory import peak_memory

FIRST = 700_000_000  # number of the first scene: no other training has seen them
PROMPT = "USER: <image>\n{question} ASSISTANT:"
ADAPTED = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj)|.*multi_modal_projector\.linear_[12]"


def load(rank: int) -> Any:
    """The embedded LLaVA with fresh adapters, which change nothing yet."""
    model = LlavaForConditionalGeneration.from_pretrained(embedded.llava_path(), dtype=torch.float32)
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ADAPTED))


def draw(split: str, first: int, number: int) -> tuple[list[Any], list[Question]]:
    """Pictures (h, w, 3), and a question about each with its answer."""
    drawn = [ask(split_seed(split), FIRST + index, scenes.SEEN) for index in range(first, first + number)]
    return [scenes.render(scene) for scene, _ in drawn], [question for _, question in drawn]


def inputs_of(processor: Any, pictures: list[Any], questions: list[Question]) -> dict[str, Tensor]:
    """What the model is trained with: prompts with their answers, and labels for the answers only."""
    prompts = [PROMPT.format(question=question.text) for question in questions]
    end = processor.tokenizer.eos_token
    texts = [f"{prompt} {question.answer}{end}" for prompt, question in zip(prompts, questions, strict=True)]
    batch = processor(images=pictures, text=texts, padding=True, return_tensors="pt")  # padded on the left
    labels = batch["input_ids"].clone()
    for row, question in enumerate(questions):
        answer = len(processor.tokenizer(question.answer + end, add_special_tokens=False)["input_ids"])
        labels[row, :-answer] = -100
    return {**batch, "labels": labels}


class Training:
    """One training: a model with adapters, its plan, and what its steps cost."""

    def __init__(self, plan: str | None, rank: int, rate: float, device: str) -> None:
        self.model, self.processor = load(rank).to(device), AutoProcessor.from_pretrained(embedded.llava_path())
        self.device = torch.device(device)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=rate)
        self.seconds: list[float] = []
        if plan is not None:
            tokensieve.apply(self.model, plan)  # it stays on: training and evaluation see the same tokens

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**{name: values.to(self.device) for name, values in batch.items()}).loss
        return loss

    def step(self, batch: dict[str, Tensor]) -> float:
        began = time.process_time()
        loss = self.loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.process_time() - began)
        return float(loss.detach())

    @torch.no_grad()
    def accuracy(self, number: int, plan: str | None = None) -> float:
        """The share of test questions that are answered right. plan: one for the evaluation only."""
        self.model.eval()
        on: AbstractContextManager[Any] = nullcontext() if plan is None else tokensieve.apply(self.model, plan)
        right = 0
        with on:
            for first in range(0, number, 50):
                pictures, questions = draw("test", first, min(50, number - first))
                prompts = [PROMPT.format(question=question.text) for question in questions]
                batch = self.processor(images=pictures, text=prompts, padding=True, return_tensors="pt").to(self.device)
                ids = self.model.generate(**batch, max_new_tokens=4, do_sample=False)[:, batch["input_ids"].shape[1] :]
                said = self.processor.batch_decode(ids, skip_special_tokens=True)
                right += sum(answer == question.answer for answer, question in zip(said, questions, strict=True))
        self.model.train()
        return right / number


def main(words: Sequence[str] | None = None) -> dict[str, float]:
    """Trains both, step by step in turn, prints a table, and returns its accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="cover@out:8", help="the plan of the second training")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--rate", type=float, default=1e-3, help="the learning rate")
    parser.add_argument("--test", type=int, default=500, help="test questions")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(words)

    full = Training(None, args.rank, args.rate, args.device)
    planned = Training(args.plan, args.rank, args.rate, args.device)
    results = {"untrained": full.accuracy(args.test), "untrained, plan on": planned.accuracy(args.test)}
    first = inputs_of(full.processor, *draw("train", 0, args.batch))
    memory = [peak_memory(lambda each=each: each.loss(first).backward(), each.device) for each in (full, planned)]  # type: ignore[misc]
    for step in range(args.steps):
        batch = inputs_of(full.processor, *draw("train", step * args.batch, args.batch))
        losses = [training.step(batch) for training in (full, planned)]
        if step % 10 == 9 or step == args.steps - 1:
            print(
                f"step {step + 1} of {args.steps}: loss {losses[0]:.3f} with all tokens, {losses[1]:.3f} with {args.plan}",
                flush=True,
            )
    results["full"] = full.accuracy(args.test)
    results["full, plan on afterwards"] = full.accuracy(args.test, args.plan)
    results["plan"] = planned.accuracy(args.test)
    seconds = [median(training.seconds) for training in (full, planned)]
    rows = (
        ("not trained", "", "", results["untrained"], results["untrained, plan on"]),
        ("all tokens", f"{seconds[0]:.2f}", f"{memory[0] or 0:.0f}", results["full"], results["full, plan on afterwards"]),
        (args.plan, f"{seconds[1]:.2f}", f"{memory[1] or 0:.0f}", None, results["plan"]),
    )
    print(f"\n{'trained with':24}{'CPU s/step':>12}{'MiB':>8}{'accuracy, %':>14}{'with the plan, %':>18}")
    for name, cost, mebibytes, whole, with_plan in rows:
        print(f"{name:24}{cost:>12}{mebibytes:>8}{'' if whole is None else f'{100 * whole:.1f}':>14}{100 * with_plan:18.1f}")
    print(f"a step with the plan takes {seconds[1] / seconds[0]:.2f} of the time of a step with all tokens")
    return results


if __name__ == "__main__":
    main()
