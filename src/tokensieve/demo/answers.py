"""Vision-language models on the page: the answer to a question about an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from tokensieve.cutting.handle import Handle
from tokensieve.data.vqa import load as load_questions
from tokensieve.data.vqa_items import VqaItem
from tokensieve.demo.subject import Shown, Subject
from tokensieve.device import to_device
from tokensieve.errors import UserError
from tokensieve.models.registry import open_vlm
from tokensieve.tasks.vqa.answering import answer, ask

MAX_QUESTION = 2000
MAX_NEW_TOKENS = 32


class Answers(Subject):
    """LLaVA and others."""

    kind = "question"
    dataset = "embedded"
    samples = (6, 3, 12, 13, 15, 19)
    plan = "cover@out:16"
    prompt_label = "Question"
    max_prompt = MAX_QUESTION

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.questions = load_questions("embedded-questions", split="test")
        vlm = open_vlm(self.model)
        if vlm is None or vlm.tower is None:
            self.plan = "fastv"

    def sample(self, number: int) -> Mapping[str, Image.Image]:
        return {"image": self.questions[number].image}

    def prompt(self, number: int) -> str:
        return self.questions[number].question

    def check_prompt(self, prompt: str) -> str:
        if not prompt.strip():
            raise UserError("a vision-language model needs a question about the image: type one")
        if len(prompt) > MAX_QUESTION:
            raise UserError(f"a question of {len(prompt):,} characters: at most {MAX_QUESTION:,}")
        processor = self.loaded.processor  # type: ignore[attr-defined]
        token = getattr(processor, "image_token", "") or ""
        if token and token in prompt:
            raise UserError(f"the question holds {token}, which stands for an image: leave it out")
        return prompt.strip()

    def inputs(self, shown: Shown, prompt: str, copies: int = 1) -> Mapping[str, Tensor]:
        item = VqaItem(shown.images["image"], prompt, [], "")
        processor = self.loaded.processor  # type: ignore[attr-defined]
        made: Mapping[str, Tensor] = to_device(ask(processor, [item] * copies), self.device)
        return made

    def call(self, inputs: Mapping[str, Tensor]) -> Any:
        """Up to the first word of the answer."""
        processor = self.loaded.processor  # type: ignore[attr-defined]
        return answer(self.model, processor, inputs, max_new_tokens=1)

    def gflops(self, inputs: Mapping[str, Tensor], handle: Handle) -> float:
        from tokensieve.measuring.phases import count_work, open_model

        arm = None if handle.plan.is_identity else handle
        return count_work(open_model(self.model), arm, self.model, inputs)["all"]

    def says(self, shown: Shown, prompt: str, handle: Handle) -> dict[str, Any]:
        inputs = self.inputs(shown, prompt)
        processor = self.loaded.processor  # type: ignore[attr-defined]
        with handle, handle.call(samples=torch.tensor([shown.number])):
            said = answer(self.model, processor, inputs, max_new_tokens=MAX_NEW_TOKENS)[0]
        expected = ""
        if shown.sample is not None and prompt == self.prompt(shown.sample):
            expected = self.questions[shown.sample].answer
        return {"kind": self.kind, "answer": said, "expected": expected}

    def prompt_words(self, prompt: str) -> list[str]:
        return ["--question", prompt]

    def python(self, shown: Shown, prompt: str, plan: str) -> str:
        lines = ["import tokensieve", "from tokensieve.data.vqa_items import VqaItem", "from tokensieve.models import loading"]
        lines += ["from tokensieve.tasks.vqa.answering import answer, ask", ""]
        if shown.sample is None:
            lines.insert(1, "from tokensieve.data.images import open_photo")
            image = f"image = open_photo({shown.files['image']!r})"
        else:
            lines.insert(1, "from tokensieve.data.vqa import load")
            image = f'image = load("embedded-questions")[{shown.sample}].image'
        lines += [self.python_load(), image, f"inputs = ask(loaded.processor, [VqaItem(image, {prompt!r}, [], '')])"]
        lines += [f"with {self.python_apply(plan)}:", "    print(answer(loaded.model, loaded.processor, inputs))"]
        lines += ["print(sieve.ledger)", 'sieve.picture(image, transform=loaded.transform).savefig("kept.png")']
        return "\n".join(lines)
