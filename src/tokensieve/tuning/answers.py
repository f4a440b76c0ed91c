"""Vision-language models: the distribution of the first token of the answer to a question about each image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tokensieve import embedded
from tokensieve.data.images import open_photo
from tokensieve.data.source import Inputs
from tokensieve.data.vqa_items import VqaItem
from tokensieve.embedded.datasets import EmbeddedQuestions
from tokensieve.errors import UserError
from tokensieve.models.loading.vlm import LoadedVlm
from tokensieve.tasks.fidelity.measures import kl_divergence, same_choice
from tokensieve.tasks.vqa.answering import ask, prefill
from tokensieve.tuning.images import ImageSet, draw_numbers, find_images, read_again, read_questions
from tokensieve.tuning.subject import Subject

QUESTION = "Describe this image."


class NextTokens(Subject):
    """The KL divergence of the next-token distributions, and how often the most likely token is the same."""

    unit = "question"
    distance = "KL divergence"

    def find(self) -> ImageSet:
        given = self.request.questions
        if given is not None and self.request.images is None:
            raise UserError("--questions needs --images: give the folder of images that they are about")
        self.questions = [QUESTION] if given is None else read_questions(given)
        return super().find()

    def shipped(self) -> ImageSet | None:
        if self.request.model != embedded.LLAVA:
            return None
        self.scenes = EmbeddedQuestions("val")
        return draw_numbers("embedded questions (val)", len(self.scenes), self.request)

    def find_files(self) -> ImageSet:
        return find_images(self.request)

    def batch(self, start: int, stop: int) -> Inputs:
        assert isinstance(self.loaded, LoadedVlm)
        return ask(self.loaded.processor, [self._item(number) for number in range(start, stop)])

    def _item(self, number: int) -> VqaItem:
        """The image of that number with its question; the questions take turns."""
        item = self.images.items[number]
        if isinstance(item, int):
            image, question = self.scenes[item]
            return VqaItem(image, question.text, [], str(item))
        return VqaItem(read_again(item, open_photo), self.questions[number % len(self.questions)], [], item)

    def run(self, model: Any, inputs: Inputs) -> Tensor:
        assert not isinstance(inputs, Tensor)
        logits: Tensor = prefill(model, inputs).logits[:, -1]
        return logits

    def compare(self, full: Tensor, reduced: Tensor) -> dict[str, Tensor]:
        return {"distance": kl_divergence(full, reduced), "agreement": same_choice(full, reduced)}

    def image_tokens(self, inputs: Inputs) -> int:
        assert not isinstance(inputs, Tensor)
        config: Any = self.loaded.model.config
        return int((inputs["input_ids"][0] == config.image_token_id).sum())

    def about(self) -> Mapping[str, Any]:
        drawn = self.request.images is None
        return {"questions": "drawn with the images" if drawn else self.questions}
