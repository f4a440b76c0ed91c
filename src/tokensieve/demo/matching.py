"""Models that compare images with texts: the nearest class or the similarity to typed texts. Those without a text tower have
only the likeness of the feature to that of the full model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from tokensieve import embedded
from tokensieve.cutting.handle import Handle
from tokensieve.demo.subject import Shown, Subject
from tokensieve.embedded.datasets import EmbeddedScenes
from tokensieve.errors import UserError
from tokensieve.models import features
from tokensieve.tasks.zeroshot_classification.classifier import zero_shot_classifier

MAX_TEXTS, MAX_TEXT = 64, 300
SCALE = 100.0  # of cosine similarities before the softmax, as in zero-shot classification
EVERYDAY = (  # for models that are not ours, until the user types others
    *("a photo of a person", "a photo of a dog", "a photo of a cat", "a photo of a bird", "a photo of a car"),
    *("a photo of food", "a photo of a building", "a landscape", "a drawing", "a page of text"),
)


class Matching(Subject):
    """CLIP-like models, and bare vision models."""

    kind = "texts"
    dataset = "embedded"
    samples = (3, 10, 17, 24, 41, 58)
    plan = "cover@4:32"
    prompt_label = "Texts to compare with, one a line"
    max_prompt = MAX_TEXTS * (MAX_TEXT + 1)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scenes = EmbeddedScenes("test")
        self.has_text = hasattr(self.model, "encode_text") or hasattr(self.model, "get_text_features")
        self._classifiers: dict[str, Tensor] = {}
        self._full: tuple[tuple[str, ...], Tensor] | None = None  # the feature of the last image without a plan
        if not self.has_text:
            self.prompt_label = ""
        if self.depth[0] != 8:
            self.plan = "cover:25%"

    @property
    def has_classes(self) -> bool:
        """Whether the model knows the classes of the samples."""
        return self.name.model in embedded.MODELS

    def sample(self, number: int) -> Mapping[str, Image.Image]:
        return {"image": self.scenes[number][0]}

    def prompt(self, number: int) -> str:
        return "" if self.has_classes or not self.has_text else "\n".join(EVERYDAY)

    def check_prompt(self, prompt: str) -> str:
        if not self.has_text:
            return ""
        texts = [line.strip() for line in prompt.splitlines() if line.strip()]
        if len(texts) > MAX_TEXTS:
            raise UserError(f"{len(texts)} texts: at most {MAX_TEXTS}, one a line")
        for text in texts:
            if len(text) > MAX_TEXT:
                raise UserError(f"a text of {len(text):,} characters: at most {MAX_TEXT}")
        if not texts and not self.has_classes:
            texts = list(EVERYDAY)
        return "\n".join(dict.fromkeys(texts))

    def inputs(self, shown: Shown, prompt: str, copies: int = 1) -> Tensor:
        batch: Tensor = self.loaded.transform(shown.images["image"])[None].repeat(copies, 1, 1, 1).to(self.device)
        return batch

    def call(self, inputs: Tensor) -> Tensor:
        return features.encode_image(self.model, inputs)

    def says(self, shown: Shown, prompt: str, handle: Handle) -> dict[str, Any]:
        inputs = self.inputs(shown, prompt)
        with handle, handle.call(samples=torch.tensor([shown.number])):
            feature = F.normalize(self.call(inputs), dim=-1)[0]  # (E,)
        if handle.plan.is_identity:
            self._full = (shown.key, feature)
        said: dict[str, Any] = {"kind": self.kind, "rows": []}
        if self._full is not None and self._full[0] == shown.key:
            said["likeness"] = float(feature @ self._full[1])
        if self.has_text:
            names, classifier = self._classifier(prompt)
            similarity = (feature @ classifier).float().cpu()  # (C,)
            shares = (SCALE * similarity).softmax(0)
            columns = zip(names, shares.tolist(), similarity.tolist(), strict=True)
            said["rows"] = [{"text": text, "share": share, "similarity": cosine} for text, share, cosine in columns]
            said["typed"] = bool(prompt)
        return said

    def _classifier(self, prompt: str) -> tuple[list[str], Tensor]:
        """The texts, or the classes of the samples where there are none, and their features (E, C)."""
        names, templates = (prompt.splitlines(), ["{c}"]) if prompt else (self.scenes.classes, self.scenes.templates)
        if prompt not in self._classifiers:
            while len(self._classifiers) > 8:
                del self._classifiers[next(iter(self._classifiers))]
            tokenizer = self.loaded.tokenizer
            made = zero_shot_classifier(self.model, tokenizer, names, templates, self.device, nullcontext)
            self._classifiers[prompt] = made
        return list(names), self._classifiers[prompt]

    def python(self, shown: Shown, prompt: str, plan: str) -> str:
        lines = ["import torch", "import tokensieve", "from tokensieve.models import features, loading", ""]
        if shown.sample is None:
            lines.insert(2, "from tokensieve.data.images import open_photo")
            image = f"image = open_photo({shown.files['image']!r})"
        else:
            lines.insert(2, "from tokensieve.embedded.datasets import EmbeddedScenes")
            image = f'image = EmbeddedScenes("test")[{shown.sample}][0]'
        lines += [self.python_load(), image, "batch = loaded.transform(image)[None]"]
        lines += [f"with torch.inference_mode(), {self.python_apply(plan)}:"]
        lines += ["    feature = features.encode_image(loaded.model, batch)"]
        if prompt and self.has_text:
            lines += [f"texts = loaded.tokenizer({prompt.splitlines()!r})", "with torch.inference_mode():"]
            lines += ["    text_features = features.encode_text(loaded.model, texts)"]
            lines += ["print(torch.cosine_similarity(feature, text_features))"]
        lines += ["print(sieve.ledger)", 'sieve.picture(image, transform=loaded.transform).savefig("kept.png")']
        return "\n".join(lines)
