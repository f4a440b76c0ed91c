"""A CLIP learns scenes and their captions by a contrastive loss, from pictures that get larger and harder.

Three things make a small transformer learn shapes in an hour on two cores:
captions of several kinds ("a red star", "a star", "a red object"), each with its own contrastive loss, so that colour,
which is easy, does not hide shape; crops of the picture before whole pictures, since a step on 49 patches costs a
quarter of one on 196; and Muon. The last phase sees whole pictures with all their patches: the result is an
ordinary CLIP that was never trained to lose tokens.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from tokensieve import embedded, files
from tokensieve.config import recipe
from tokensieve.config.clip import ClipTraining
from tokensieve.config.schema import Phase
from tokensieve.embedded import scenes
from tokensieve.embedded.datasets import TEMPLATES, EmbeddedScenes, as_batch, split_seed
from tokensieve.embedded.scene_texts import caption
from tokensieve.training.loader import read_ahead
from tokensieve.training.log import loss_curve
from tokensieve.training.muon import TwoOptimizers

_COLOURS, _SHAPES = list(scenes.COLOURS), list(scenes.SHAPES)
# The classes of the contrastive losses: every pair that training shows, every shape, every colour.
_PAIR_NAMES = [scenes.name_of(pair) for pair in scenes.SEEN]
_SHAPE_NAMES = _SHAPES
_COLOUR_NAMES = [f"{colour} object" for colour in _COLOURS]


def place_in_phases(phases: tuple[Phase, ...], index: int) -> tuple[Phase, float]:
    """The phase of a step, and how hard its scenes are."""
    for phase in phases:
        if index < phase.steps:
            easy, hard = phase.level
            return phase, easy + (hard - easy) * index / max(1, phase.steps - 1)
        index -= phase.steps
    raise IndexError(index)


def window(image: np.ndarray, thing: scenes.Thing, side: int, rng: np.random.Generator) -> np.ndarray:
    """A square of the picture that holds the object, which lies anywhere in it. (side, side, 3)"""
    corner = []
    for centre in (thing.y, thing.x):
        low, high = max(0.0, centre + thing.size / 2 - side), min(scenes.SIZE - side, centre - thing.size / 2)
        middle = min(max(centre - side / 2, 0.0), scenes.SIZE - side)  # for an object larger than the window
        corner.append(round(rng.uniform(low, high) if low < high else middle))
    top, left = corner
    return image[top : top + side, left : left + side]


class Batches(Dataset[dict[str, Any]]):
    """Item i is the batch of step i, made from the seed and i alone: the sampler's position is the step itself."""

    def __init__(self, config: ClipTraining, start: int) -> None:
        self.phases, self.seed, self.start, self.steps = config.phases, split_seed("train", config.seed), start, config.steps

    def __len__(self) -> int:
        return self.steps - self.start

    def __getitem__(self, offset: int) -> dict[str, Any]:
        index = self.start + offset
        phase, level = place_in_phases(self.phases, index)
        rng = np.random.default_rng([self.seed, index, 2])
        difficulty = scenes.Difficulty(level)
        first = index * 1000  # batches are smaller than that, so no scene comes twice
        crowded = int(phase.batch * phase.several)
        images, pairs, captions = [], [], []
        for i in range(phase.batch - crowded):
            pair = int(rng.integers(len(scenes.SEEN)))
            scene = scenes.single(self.seed, first + i, scenes.SEEN[pair], difficulty)
            images.append(window(scenes.render(scene), scene.objects[0], phase.canvas, rng))
            pairs.append(pair)
        for i in range(phase.batch - crowded, phase.batch):
            scene = scenes.several(self.seed, first + i, scenes.SEEN, difficulty=difficulty)
            images.append(scenes.render(scene))
            captions.append(caption(scene))
        spare = scenes.SIZE // 8 - phase.canvas // 8
        corner = (int(rng.integers(spare + 1)), int(rng.integers(spare + 1)))
        templates = [TEMPLATES[i] for i in rng.integers(len(TEMPLATES), size=3)]
        return {
            "images": torch.from_numpy(as_batch(images)),  # (B, 3, canvas, canvas) uint8, those with several objects last
            "pairs": torch.tensor(pairs),  # (single,)
            "captions": captions,
            "corner": corner,
            "templates": templates,
        }


def encode_window(visual: nn.Module, pixels: Tensor, corner: tuple[int, int]) -> Tensor:
    """Image features of a window, whose patches have the positions they would have with `corner` as their first."""
    position: Tensor = visual.positional_embedding  # type: ignore[assignment]
    high, wide = visual.grid_size  # type: ignore[misc]
    rows, columns = pixels.shape[-2] // 8, pixels.shape[-1] // 8
    if (rows, columns) == (high, wide):
        return visual(pixels)
    top, left = corner
    table = position[1:].view(high, wide, -1)[top : top + rows, left : left + columns]
    cut = torch.cat([position[:1], table.reshape(rows * columns, -1)])
    return torch.func.functional_call(visual, {"positional_embedding": cut}, (pixels,))


def encode_words(model: nn.Module, tokens: Tensor) -> Tensor:
    """Normalised text features, without the padding all texts share: it comes last and attention is causal."""
    longest = int((tokens != 0).sum(1).max())
    short = {
        "positional_embedding": model.positional_embedding[:longest],  # type: ignore[index]
        "attn_mask": model.attn_mask[:longest, :longest],  # type: ignore[index]
    }
    return torch.func.functional_call(model, short, (None, tokens[:, :longest]))[1]


def contrast(logits: Tensor, target: Tensor) -> Tensor:
    """InfoNCE both ways between images (B) and captions (C), where several images may share a caption (target (B))."""
    to_text = F.cross_entropy(logits, target)
    shared = F.one_hot(target, logits.shape[1]).T.to(logits.dtype)  # (C, B)
    present = shared.sum(1) > 0
    to_image = -(shared * logits.T.log_softmax(1)).sum(1)[present] / shared.sum(1)[present]
    return (to_text + to_image.mean()) / 2


def in_block(name: str) -> bool:
    """Whether a parameter of an open_clip model belongs to a transformer block."""
    return "resblocks" in name or "cross_attn" in name


class ClipLearner:
    """The model, its optimizers and its batches, driven by training.loop."""

    def __init__(self, config: ClipTraining) -> None:
        import open_clip

        torch.manual_seed(config.seed)
        embedded.register()
        self.config = config
        self.model = open_clip.create_model(config.model)
        self.tokenizer = open_clip.get_tokenizer(config.model)
        preprocess = self.model.visual.preprocess_cfg
        self.mean = torch.tensor(preprocess["mean"]).view(3, 1, 1) * 255
        self.std = torch.tensor(preprocess["std"]).view(3, 1, 1) * 255
        self.optimizers = TwoOptimizers(self.model, config.optimizer, in_block)
        self.seconds = 0.0
        self._done = 0
        self._batches: Iterator[dict[str, Any]] | None = None

    def step(self, index: int) -> dict[str, float]:
        began = time.perf_counter()
        if self._batches is None:
            self._batches = self._loader(index)
        batch = next(self._batches)
        rate = self.config.optimizer.rate(index, self.config.steps)
        self.optimizers.start_step(rate)
        loss, values = self._loss(batch)
        loss.backward()
        self.optimizers.step()
        with torch.no_grad():
            self.model.logit_scale.clamp_(0, math.log(100))
        self._done = index + 1
        self.seconds += time.perf_counter() - began
        return values

    def _loss(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
        pairs: Tensor = batch["pairs"]
        singles = len(pairs)
        pixels = (batch["images"].float() - self.mean) / self.std
        images = F.normalize(encode_window(self.model.visual, pixels, batch["corner"]), dim=-1)  # (B, D)
        of_pair, of_shape, of_colour = batch["templates"]
        texts = [of_pair.format(c=name) for name in _PAIR_NAMES] + batch["captions"]
        texts += [of_shape.format(c=name) for name in _SHAPE_NAMES] + [of_colour.format(c=name) for name in _COLOUR_NAMES]
        words = encode_words(self.model, self.tokenizer(texts))  # (C, D)
        logits = self.model.logit_scale.exp() * images @ words.T  # (B, C)
        whole, by_shape, by_colour = logits.split([len(words) - 18, len(_SHAPES), len(_COLOURS)], dim=1)
        captions = torch.cat([pairs, len(_PAIR_NAMES) + torch.arange(len(batch["captions"]))])
        shape = torch.tensor([_SHAPES.index(scenes.SEEN[pair][1]) for pair in pairs])
        colour = torch.tensor([_COLOURS.index(scenes.SEEN[pair][0]) for pair in pairs])
        losses = {
            "pair": contrast(whole, captions),
            "shape": contrast(by_shape[:singles], shape),
            "colour": contrast(by_colour[:singles], colour),
        }
        right = (whole[:singles, : len(_PAIR_NAMES)].argmax(1) == pairs).float().mean()
        loss = losses["pair"] + losses["shape"] + losses["colour"]
        return loss, {name: float(value.detach()) for name, value in losses.items()} | {"acc": float(right)}

    def _loader(self, start: int) -> Iterator[dict[str, Any]]:
        return read_ahead(Batches(self.config, start), self.config.workers, each=4)

    def state(self) -> dict[str, Any]:
        return {
            "recipe": recipe.recipe(self.config),
            "model": self.model.state_dict(),
            **self.optimizers.state(),
            "done": self._done,
            "seconds": self.seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        recipe.check_recipe(recipe.recipe(self.config), state["recipe"])
        self.model.load_state_dict(state["model"])
        self.optimizers.restore(state)
        self._done, self.seconds = state["done"], state["seconds"]
        self._batches = None


# ------------------------------------------------------------------------------------------------------ after the last step


@torch.no_grad()
def accuracy(learner: ClipLearner, split: str, pairs: str) -> dict[str, Any]:
    """Zero-shot acc1 among all 80 pairs, every template's text averaged; with its standard error."""
    data = EmbeddedScenes(split, pairs)
    model = learner.model.eval()
    texts = [template.format(c=name) for name in data.classes for template in data.templates]
    words = model.encode_text(learner.tokenizer(texts), normalize=True).view(len(data.classes), len(data.templates), -1)
    words = F.normalize(words.mean(1), dim=-1)  # (classes, D)
    right = 0
    for start in range(0, len(data), 100):
        chunk = [data.scene(i) for i in range(start, min(start + 100, len(data)))]
        labels = torch.tensor([scenes.PAIRS.index(scene.objects[0].pair) for scene in chunk])
        pixels = torch.from_numpy(as_batch([scenes.render(scene) for scene in chunk])).float()
        images = model.encode_image((pixels - learner.mean) / learner.std)
        right += int(((images @ words.T).argmax(1) == labels).sum())
    model.train()
    acc1 = right / len(data)
    return {"acc1": round(acc1, 4), "stderr": round(math.sqrt(acc1 * (1 - acc1) / len(data)), 4), "n": len(data)}


def export(learner: ClipLearner, run: Path) -> dict[str, Any]:
    """Write what ships, weights and card, and the loss curve as a table. Returns the card."""
    config = learner.config
    weights = {name: value.contiguous() for name, value in learner.model.state_dict().items()}
    files.write_bytes(run / f"{embedded.PRETRAINED}.safetensors", safetensors.torch.save(weights))
    curve = loss_curve(run)
    measured = {}
    if config.evaluate:
        for split, pairs in (("val", "seen"), ("val", "heldout"), ("test", "seen"), ("test", "heldout")):
            measured[f"{split}/{pairs}"] = accuracy(learner, split, pairs)
    card = {
        "model": config.model,
        "weights": embedded.PRETRAINED,
        "data": "tokensieve.embedded.scenes, drawn by code; 68 pairs of colour and shape seen, 12 held out of training",
        "objective": "InfoNCE both ways between pictures and captions of three grains (pair, shape, colour)",
        "tokens": "the last phase sees all 196 patches; no patch dropout, nothing in training knows of token reduction",
        "recipe": json.loads(config.model_dump_json(exclude={"output"})),
        "seed": config.seed,
        "steps": config.steps,
        "pictures": sum(phase.steps * phase.batch for phase in config.phases),
        "seconds": round(learner.seconds),
        "parameters": {
            "vision": sum(p.numel() for p in learner.model.visual.parameters()),
            "all": sum(p.numel() for p in learner.model.parameters()),
        },
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
        "accuracy": measured,
        "loss_curve": curve,
    }
    files.write_json(run / "card.json", card)
    return card
