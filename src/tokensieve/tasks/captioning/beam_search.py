"""Captions of a CoCa by open_clip's default beam search, with every image encoded once.

open_clip's own `CoCa.generate` needs a class that transformers 5 no longer has. Its default is a beam search of three
groups of two beams. Nothing makes the groups differ, so this is one group of two. As there, a beam's score is the sum of its
logits (not of log-probabilities) over its length, the end token is not allowed before five tokens, and captions have at most
30 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokensieve.errors import UserError

BEAMS = 2
SHORTEST, LONGEST = 5, 30  # tokens, the start included; an end may come once there are so many


@dataclass(frozen=True)
class CaptionTokenizer:
    """The ids a search must know, and the way from ids to text."""

    start: int
    end: int
    decode: Callable[[list[int]], str]

    @classmethod
    def of(cls, tokenizer: Any) -> CaptionTokenizer:
        """Those of an open_clip tokenizer: its own kind, or one of transformers inside."""
        if hasattr(tokenizer, "sot_token_id"):
            return cls(tokenizer.sot_token_id, tokenizer.eot_token_id, tokenizer.decode)
        inner = getattr(tokenizer, "tokenizer", None)
        if inner is None or inner.bos_token_id is None or inner.eos_token_id is None:
            raise UserError(f"{type(tokenizer).__name__} names no start and end tokens, so no caption can be written with it.")
        return cls(inner.bos_token_id, inner.eos_token_id, inner.decode)

    def text(self, ids: Sequence[int]) -> str:
        """What stands between start and end."""
        words = list(ids)
        words = words[: words.index(self.end)] if self.end in words else words
        return self.decode([word for word in words if word != self.start]).strip()


@dataclass(frozen=True)
class _Finished:
    score: float
    ids: list[int]


def write(model: Any, images: Tensor, words: CaptionTokenizer) -> list[list[int]]:
    """The ids of one caption an image, without the end. `model` is an open_clip CoCa; images (B,3,h,w)."""
    outputs = model(images)
    latents, tokens = outputs["image_features"], outputs["image_embs"]  # (B,E), (B,N,D)
    longest = min(LONGEST, model.context_length)
    finished: list[list[_Finished]] = [[] for _ in images]
    alive = list(range(len(images)))  # images whose search goes on
    ids = torch.full((len(images), BEAMS, 1), words.start, device=images.device)
    total = torch.tensor([0.0] + [-1e9] * (BEAMS - 1), device=images.device).repeat(len(images), 1)  # (B, beams)
    while alive:
        length = ids.shape[2]
        if length >= longest:
            for image, beams, scores in zip(alive, ids.tolist(), total.tolist(), strict=True):
                for beam, score in zip(beams, scores, strict=True):
                    _keep(finished[image], _Finished(score / length, beam))
            break
        best, beam, token = _next(model, latents[alive], tokens[alive], ids, total, words.end)
        rows = zip(ids.tolist(), best.tolist(), beam.tolist(), token.tolist(), strict=True)
        going: list[int] = []  # places in `alive`
        chosen: list[list[int]] = []  # of each: the candidates that go on
        for place, (written, scores, beams, added) in enumerate(rows):
            hypotheses, on = finished[alive[place]], []
            for rank, (score, which, word) in enumerate(zip(scores, beams, added, strict=True)):
                if word != words.end:
                    on.append(rank)
                elif rank < BEAMS:
                    _keep(hypotheses, _Finished(score / length, written[which]))
                if len(on) == BEAMS:
                    break
            if len(hypotheses) < BEAMS or min(h.score for h in hypotheses) < scores[0] / (length + 1):
                going.append(place)
                chosen.append(on)
        if not going:
            break
        picked = torch.tensor(chosen, device=images.device)  # (A, beams)
        here = torch.tensor(going, device=images.device)
        from_beam, new = beam[here].gather(1, picked), token[here].gather(1, picked)
        total = best[here].gather(1, picked)
        ids = torch.cat([ids[here[:, None], from_beam], new[:, :, None]], dim=2)
        alive = [alive[place] for place in going]
    return [max(hypotheses, key=lambda h: h.score).ids for hypotheses in finished]


def _next(model: Any, latents: Tensor, tokens: Tensor, ids: Tensor, total: Tensor, end: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best ways to go on for each image: scores, the beams they go on from, and the words they add, (A, 2 beams) each."""
    out = model(
        None,
        ids.flatten(0, 1),
        image_latent=latents.repeat_interleave(BEAMS, dim=0),
        image_embs=tokens.repeat_interleave(BEAMS, dim=0),
        output_labels=False,
    )
    logits = out["logits"][:, -1].float()  # (A beams, V)
    if ids.shape[2] < SHORTEST:
        logits[:, end] = -torch.inf
    scores = (logits.view(len(ids), BEAMS, -1) + total[:, :, None]).flatten(1)
    best, place = scores.topk(2 * BEAMS, dim=1)
    return best, place // logits.shape[1], place % logits.shape[1]


def _keep(hypotheses: list[_Finished], new: _Finished) -> None:
    """Add to the best so far, of which there are at most as many as beams."""
    if len(hypotheses) < BEAMS or new.score > min(h.score for h in hypotheses):
        hypotheses.append(new)
        if len(hypotheses) > BEAMS:
            hypotheses.remove(min(hypotheses, key=lambda h: h.score))
