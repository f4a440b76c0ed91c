"""What the tests of the caption tasks share: a task's surroundings, sets of captioned noise, and a tiny CoCa."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tokensieve.tasks.base import Task, TaskContext

WORDS = ["red", "blue", "green", "small", "dog", "cat", "bird", "tree", "house", "on", "under", "near", "a", "the", "two"]


def sentence(number: int) -> str:
    """Some words, other ones for another number."""
    generator = torch.Generator().manual_seed(number)
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (3 + number % 5,), generator=generator))


def noise(number: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def context_of(model: Any, tokenizer: Any, size: int | None = None, **args: Any) -> TaskContext:
    """A context with what a caption task uses."""
    messages: list[str] = []
    source = SimpleNamespace(size=size)
    made = {
        "model": "tiny",
        "pretrained": "",
        "dataset": "noise",
        "language": "en",
        "args": argparse.Namespace(**({"split": "test", "recall_k": [5]} | args)),
        "loaded": SimpleNamespace(model=model, tokenizer=tokenizer),
        "device": torch.device("cpu"),
        "precision": contextlib.nullcontext,
        "show": False,
        "warn": messages.append,
        "source": lambda split: source,
    }
    return TaskContext(**made)


Batches = Sequence[tuple[Tensor, list[list[str]]]]


def run(task: Task, batches: Batches, encode: Callable[[Tensor], Any]) -> dict[str, Any]:
    """The task's numbers from all batches in order, by way of one encoder."""
    return task.metrics({"test": [task.batch("test", images, texts, [encode])[0] for images, texts in batches]})


def run_shared(task: Task, batches: Batches, encode: Callable[[Tensor], Any]) -> dict[str, Any]:
    """The same, as two processes would: each does every other batch, and the records are put in order at the end."""
    records: dict[int, Any] = {}
    for rank in (1, 0):
        for number in range(rank, len(batches), 2):
            records[number] = task.batch("test", *batches[number], [encode])[0]
    return task.metrics({"test": [records[number] for number in sorted(records)]})


def tiny_coca(folder: Path) -> SimpleNamespace:
    """An open_clip CoCa with the default tokenizer and random weights that writes captions of many lengths."""
    import open_clip

    text = {"context_length": 32, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    vision = {"image_size": 32, "patch_size": 8, "width": 16, "layers": 2, "head_width": 8, "output_tokens": True}
    config = {
        "embed_dim": 16,
        "vision_cfg": vision | {"attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 9},
        "text_cfg": text | {"embed_cls": True, "output_tokens": True},
        "multimodal_cfg": text,
        "custom_text": True,
    }
    (folder / "tiny-coca.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / "tiny-coca.json")
    torch.manual_seed(0)
    model = open_clip.create_model("tiny-coca").eval()
    with torch.no_grad():
        for parameter in model.visual.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
        model.text_decoder.text_projection.normal_()
        model.text_decoder.text_projection[:, 49407] *= 2.5  # the end is often among the best words
    return SimpleNamespace(model=model, tokenizer=open_clip.get_tokenizer("tiny-coca"))


class Scorer:
    """What open_clip's beam search asks of the class that transformers 4 had, written slowly: groups of beams, sums of
    scores over lengths, as many finished captions kept as a group has beams."""

    def __init__(self, batch_size: int, num_beams: int, device: Any, num_beam_groups: int) -> None:
        self.num_beams, self.num_beam_groups, self.group = num_beams, num_beam_groups, num_beams // num_beam_groups
        self._beam_hyps: list[list[tuple[float, list[int]]]] = [[] for _ in range(batch_size * num_beam_groups)]
        self.done = [False] * len(self._beam_hyps)

    @property
    def is_done(self) -> bool:
        return all(self.done)

    def _add(self, which: int, ids: list[int], total: float) -> None:
        kept = self._beam_hyps[which]
        kept.append((total / len(ids), ids))
        if len(kept) > self.group:
            kept.remove(min(kept, key=lambda one: one[0]))

    def process(self, ids: Tensor, scores: Tensor, tokens: Tensor, beams: Tensor, **how: Any) -> dict[str, Tensor]:
        images = len(self.done) // self.num_beam_groups
        on: list[list[tuple[float, int, int]]] = []
        for image in range(images):
            which = image * self.num_beam_groups + how["group_index"]
            if self.done[which]:
                on.append([(0.0, how["pad_token_id"], 0)] * self.group)
                continue
            going: list[tuple[float, int, int]] = []
            for rank in range(2 * self.group):
                row = image * self.group + int(beams[image, rank])
                score, token = float(scores[image, rank]), int(tokens[image, rank])
                if token != int(how["eos_token_id"][0]):
                    going.append((score, token, row))
                elif rank < self.group:
                    self._add(which, ids[row].tolist(), score)
                if len(going) == self.group:
                    break
            on.append(going)
            kept = self._beam_hyps[which]
            if len(kept) == self.group and min(kept)[0] >= float(scores[image].max()) / (ids.shape[1] + 1):
                self.done[which] = True
        flat = [one for going in on for one in going]
        names = ("next_beam_scores", "next_beam_tokens", "next_beam_indices")
        return {name: torch.tensor(values) for name, values in zip(names, zip(*flat, strict=True), strict=True)}

    def finalize(self, ids: Tensor, scores: Tensor, *_: Any, max_length: int, **how: Any) -> dict[str, Tensor]:
        for which, done in enumerate(self.done):
            for row in range(which * self.group, (which + 1) * self.group):
                if not done:
                    self._add(which, ids[row].tolist(), float(scores[row]))
        step = self.num_beam_groups
        best = [max(itertools.chain(*self._beam_hyps[i : i + step]))[1] for i in range(0, len(self.done), step)]
        out = torch.full((len(best), min(max(map(len, best)) + 1, max_length)), how["pad_token_id"])
        for row, written in zip(out, best, strict=True):
            row[: len(written)] = torch.tensor(written)
            if len(written) < len(row):
                row[len(written)] = how["eos_token_id"][0]
        return {"sequences": out}


@contextlib.contextmanager
def stock_generate() -> Iterator[None]:
    """Let open_clip's own CoCa.generate run, whatever transformers is installed."""
    import transformers
    from open_clip import coca_model

    lent = {
        "BeamSearchScorer": Scorer,
        "GENERATION_TYPES": {"top_k": transformers.TopKLogitsWarper, "beam_search": "beam_search"},
        "_has_transformers": True,
    }
    before = {name: getattr(coca_model, name, None) for name in lent}
    for name, value in lent.items():
        setattr(coca_model, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(coca_model, name, value)
