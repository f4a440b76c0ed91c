"""A CoCa learns to write captions on top of the embedded CLIP's frozen vision tower.

The tower is frozen, so that a picture's tokens are computed once and then kept (float16, in memory): a step runs only the two
small text transformers. The losses are CoCa's: next-word prediction, and a contrastive loss between captions and pictures.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokensieve import embedded, files
from tokensieve.config import recipe
from tokensieve.config.captions import CaptionTraining
from tokensieve.embedded import scene_texts, scenes
from tokensieve.embedded.datasets import EmbeddedCaptions, as_batch
from tokensieve.embedded.recipes.clip import in_block
from tokensieve.tasks.captioning.beam_search import CaptionTokenizer, write
from tokensieve.training.log import loss_curve
from tokensieve.training.muon import TwoOptimizers


class Pictures:
    """The frozen tower's outputs for training pictures, computed when first used, one picture at a time.

    One at a time, so that a resumed run gets the same bits whatever it reads first.
    """

    def __init__(self, visual: nn.Module, data: EmbeddedCaptions) -> None:
        self.visual, self.data = visual, data
        preprocess: Any = visual.preprocess_cfg
        self.mean, self.std = (torch.tensor(preprocess[key]).view(3, 1, 1) * 255 for key in ("mean", "std"))
        self.computed: dict[int, tuple[Tensor, Tensor, list[str]]] = {}

    def pixels(self, drawn: list[scenes.Scene]) -> Tensor:
        """The scenes as input of the tower.  (B, 3, h, w)"""
        images = torch.from_numpy(as_batch([scenes.render(scene) for scene in drawn])).float()
        return (images - self.mean) / self.std

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, list[str]]:
        """latent (E), tokens (N, D) and the captions of one picture."""
        if index not in self.computed:
            scene = self.data.scene(index)
            with torch.no_grad():
                latent, tokens = self.visual(self.pixels([scene]))
            self.computed[index] = (F.normalize(latent[0], dim=-1), tokens[0].half(), scene_texts.captions(scene))
        return self.computed[index]


class CaptionLearner:
    """The model, its optimizers and its pictures, driven by training.loop."""

    def __init__(self, config: CaptionTraining) -> None:
        import open_clip

        torch.manual_seed(config.seed)
        embedded.register()
        self.config = config
        self.model = open_clip.create_model(config.model)
        self.tokenizer = open_clip.get_tokenizer(config.model)
        _load_clip(self.model, embedded.weights_path(config.start))
        self.model.visual.eval().requires_grad_(False)
        self.pictures = Pictures(self.model.visual, EmbeddedCaptions("train", length=config.pictures))
        self.optimizers = TwoOptimizers(self.model, config.optimizer, in_block)
        self.seconds = 0.0

    def step(self, index: int) -> dict[str, float]:
        began = time.perf_counter()
        latents, tokens, words = self._batch(index)
        rate = self.config.optimizer.rate(index, self.config.steps)
        self.optimizers.start_step(rate)
        out = self.model(None, words, image_latent=latents, image_embs=tokens)
        wording = F.cross_entropy(out["logits"].flatten(0, 1), out["labels"].flatten(), ignore_index=0)
        logits = out["logit_scale"] * latents @ out["text_features"].T  # (B, B)
        same = torch.arange(len(logits))
        contrast = (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)) / 2
        (wording + self.config.contrast * contrast).backward()
        self.optimizers.step()
        with torch.no_grad():
            self.model.logit_scale.clamp_(0, math.log(100))
        self.seconds += time.perf_counter() - began
        return {"caption": float(wording.detach()), "contrast": float(contrast.detach())}

    def _batch(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """The pictures of a step, from a shuffle that is new in every epoch, each with one of its captions."""
        size = self.config.batch
        epoch, batch = divmod(index, self.config.pictures // size)
        order = np.random.default_rng([self.config.seed, epoch, 3]).permutation(self.config.pictures)
        rng = np.random.default_rng([self.config.seed, index, 4])
        latents, tokens, captions = zip(*(self.pictures[int(i)] for i in order[batch * size :][:size]), strict=True)
        texts = [options[int(rng.integers(len(options)))] for options in captions]
        return torch.stack(latents), torch.stack(tokens).float(), self.tokenizer(texts)

    def state(self) -> dict[str, Any]:
        return {
            "recipe": recipe.recipe(self.config),
            "model": self.model.state_dict(),
            **self.optimizers.state(),
            "seconds": self.seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        recipe.check_recipe(recipe.recipe(self.config), state["recipe"])
        self.model.load_state_dict(state["model"])
        self.optimizers.restore(state)
        self.seconds = state["seconds"]


def _load_clip(model: nn.Module, weights: Path) -> None:
    """Load a CLIP's two towers; the text tower's extra token and the decoder stay random."""
    clip = safetensors.torch.load_file(weights)
    state = model.state_dict()
    for name, value in clip.items():
        target = name if name.startswith("visual.") or name == "logit_scale" else f"text.{name}"
        if target == "text.positional_embedding":
            value = torch.cat([value, state[target][len(value) :]])
        state[target].copy_(value)  # the model's own storage
    projection: Tensor = model.text_decoder.text_projection  # type: ignore[union-attr, assignment]
    nn.init.normal_(projection, std=projection.shape[0] ** -0.5)  # open_clip leaves it uninitialised


# ------------------------------------------------------------------------------------------------------ after the last step


@torch.inference_mode()
def quality(model: Any, words: CaptionTokenizer, split: str) -> dict[str, float]:
    """The shares of captions that equal a reference, of objects that are named, and of positions that are correct.

    An object is correct if the caption names its colour and shape together; a position if the caption's relation of two
    objects of the picture is true. Both are shares of all that the pictures show (positions: relative to one object).
    """
    data = EmbeddedCaptions(split)
    pictures = Pictures(model.visual, data)
    exact, objects, places, total, related = [], 0, 0, 0, 0
    for start in range(0, len(data), 50):
        chunk = [data.scene(i) for i in range(start, min(start + 50, len(data)))]
        pixels = pictures.pixels(chunk)
        for scene, ids in zip(chunk, write(model, pixels, words), strict=True):
            written = words.text(ids)
            exact.append(written in scene_texts.captions(scene))
            named = [thing for thing in scene.objects if f"{scenes.name_of(thing.pair)} " in f"{written} "]
            objects, total, related = objects + len(named), total + len(scene.objects), related + len(scene.objects) - 1
            first = [thing for thing in named if written.startswith(f"a {scenes.name_of(thing.pair)} ")]
            for one in first:
                around = [(other, f"{scene_texts.relation(one, other)} a {scenes.name_of(other.pair)} ") for other in named]
                places += sum(true in f"{written} " for other, true in around if other is not one)
    p = sum(exact) / len(exact)
    return {
        "exact": round(p, 4),
        "stderr": round(math.sqrt(p * (1 - p) / len(exact)), 4),
        "objects": round(objects / total, 4),
        "places": round(places / related, 4),
        "n": len(exact),
    }


def export(learner: CaptionLearner, run: Path) -> dict[str, Any]:
    """Write what ships, weights (float16) and card, and the loss curve as a table. Returns the card."""
    config, model = learner.config, learner.model
    weights = {name: value.half().contiguous() for name, value in model.state_dict().items()}
    files.write_bytes(run / f"{embedded.CAPTIONER_PRETRAINED}.safetensors", safetensors.torch.save(weights))
    model.load_state_dict(weights)  # what is measured is what ships
    curve = loss_curve(run)
    words = CaptionTokenizer.of(learner.tokenizer)
    measured = {split: quality(model.eval(), words, split) for split in ("val", "test")} if config.evaluate else {}
    card = {
        "model": config.model,
        "weights": embedded.CAPTIONER_PRETRAINED,
        "data": "tokensieve.embedded.scenes with several objects, a caption from the view of each; 68 colour-shape pairs",
        "objective": "the next word of a caption, and InfoNCE between captions and pictures; the vision tower is frozen",
        "tokens": "the decoder sees all 196 patches; nothing in training knows of token reduction",
        "begins_with": config.start,
        "recipe": json.loads(config.model_dump_json(exclude={"output"})),
        "seed": config.seed,
        "steps": config.steps,
        "pictures": config.pictures,
        "seconds": round(learner.seconds),
        "parameters": {
            "vision": sum(p.numel() for p in model.visual.parameters()),
            "all": sum(p.numel() for p in model.parameters()),
        },
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "accuracy": measured,
        "loss_curve": curve,
    }
    files.write_json(run / f"{embedded.CAPTIONER_PRETRAINED}.card.json", card)
    return card
