"""Selection: clip_benchmark's numbers for one image and for several, and for the pairs that ship."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from clip_benchmark.metrics import image_caption_selection

from tests.support.caption_tasks import context_of, noise, run, run_shared, sentence
from tokensieve.errors import UserError
from tokensieve.tasks.image_caption_selection.task import CaptionSelectionTask, right


def instances(images, captions, sizes=(9, 9, 6)):
    batches, number = [], 0
    for size in sizes:
        shape = (3, 48, 32) if images is None else (images, 3, 48, 32)
        pictures = torch.stack([noise(number + i, *shape) for i in range(size)])
        batches.append((pictures, [[sentence(100 * (number + i) + j) for j in range(captions)] for i in range(size)]))
        number += size
    return batches


@pytest.mark.parametrize(("images", "captions"), [(None, 2), (1, 2), (2, 2), (3, 2), (2, 3)])
def test_numbers_are_clip_benchmarks(tiny_clip, images, captions):
    model, _, tokenizer = tiny_clip.make()
    batches = instances(images, captions)
    theirs = image_caption_selection.evaluate(model, batches, tokenizer, "cpu", amp=False)
    task = CaptionSelectionTask(context_of(model, tokenizer))
    ours = run(task, batches, model.encode_image)
    assert {name for name in ours if not name.endswith("_stderr")} == set(theirs)
    for name, p in theirs.items():
        assert ours[name] == pytest.approx(p, abs=1e-6)
        assert ours[f"{name}_stderr"] == pytest.approx(math.sqrt(p * (1 - p) / 24), abs=1e-6)
    assert 0 < ours["text_acc"] < 1
    assert run_shared(task, batches, model.encode_image) == ours


def test_every_image_and_every_caption_must_be_right():
    images, texts = F.normalize(noise(0, 200, 2, 3), dim=2), F.normalize(noise(1, 200, 2, 3), dim=2)
    found = right(images @ texts.mT)
    for instance in range(200):
        scores = images[instance] @ texts[instance].T  # (image, caption)
        image_found = bool(scores[0, 0] > scores[1, 0]) and bool(scores[1, 1] > scores[0, 1])
        text_found = bool(scores[0, 0] > scores[0, 1]) and bool(scores[1, 1] > scores[1, 0])
        assert found[instance].tolist() == [image_found, text_found]
    assert {tuple(row) for row in found.tolist()} == {(a, b) for a in (True, False) for b in (True, False)}


def test_as_many_captions_are_needed_for_every_image(tiny_clip):
    model, _, tokenizer = tiny_clip.make()
    task = CaptionSelectionTask(context_of(model, tokenizer))
    with pytest.raises(UserError, match=r"2 to 3.*zeroshot_retrieval"):
        task.batch("test", noise(0, 2, 3, 48, 32), [["a", "b"], ["a", "b", "c"]], [model.encode_image])
