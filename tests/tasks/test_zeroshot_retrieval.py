"""Retrieval: clip_benchmark's numbers on the same model and data, whatever the blocks and however batches are shared."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from clip_benchmark.metrics import zeroshot_retrieval

from tests.support.caption_tasks import context_of, noise, run, run_shared, sentence
from tests.support.paired import assert_paired
from tokensieve.errors import UserError
from tokensieve.tasks.zeroshot_retrieval import task as retrieval
from tokensieve.tasks.zeroshot_retrieval.task import RetrievalTask, find_hits, recalls

KS = [1, 3, 5]


def captioned(sizes=(7, 7, 4), most=4):
    """Batches of images with one to `most` captions each."""
    batches, number = [], 0
    for size in sizes:
        images = torch.stack([noise(number + i, 3, 48, 32) for i in range(size)])
        texts = [[sentence(100 * (number + i) + j) for j in range(1 + (number + i) % most)] for i in range(size)]
        batches.append((images, texts))
        number += size
    return batches


def test_numbers_are_clip_benchmarks(tiny_clip):
    model, _, tokenizer = tiny_clip.make()
    batches = captioned()
    theirs = zeroshot_retrieval.evaluate(model, batches, tokenizer, "cpu", amp=False, recall_k_list=KS)
    task = RetrievalTask(context_of(model, tokenizer, recall_k=KS))
    ours = run(task, batches, model.encode_image)
    assert {name for name in ours if not name.endswith("_stderr")} == set(theirs)
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, abs=1e-6)
        assert ours[f"{name}_stderr"] >= 0
    assert 0 < ours["image_retrieval_recall@5"] < 1  # the test tells something
    assert task.metric == "image_retrieval_recall@1" and task.settings() == {"recall_k": KS}
    assert run_shared(task, batches, model.encode_image) == ours


def test_equal_scores_are_chosen_as_clip_benchmark_does(tiny_clip, monkeypatch):
    """Features of 16 numbers +1 or -1, of length 4: all products are exact, so what is equal is so in every kernel."""
    model, _, tokenizer = tiny_clip.make()
    place = torch.arange(1, 17)

    def signs(yes):
        return yes.float() * 2 - 1

    monkeypatch.setattr(model, "encode_image", lambda images, normalize=False: signs(images.flatten(1)[:, :16] > 0))
    monkeypatch.setattr(
        model, "encode_text", lambda tokens, normalize=False: signs(tokens.sum(1, keepdim=True) * place % 7 > 3)
    )
    batches = [(images[:1].repeat(len(images), 1, 1, 1), texts) for images, texts in captioned(most=1)]  # many images alike
    theirs = zeroshot_retrieval.evaluate(model, batches, tokenizer, "cpu", amp=False, recall_k_list=KS)
    ours = run(RetrievalTask(context_of(model, tokenizer, recall_k=KS)), batches, model.encode_image)
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs, abs=1e-6)


def test_one_batch_serves_several_plans(tiny_clip):
    model, _, tokenizer = tiny_clip.make()
    task = RetrievalTask(context_of(model, tokenizer))
    images, texts = captioned()[0]
    plain, turned = task.batch("test", images, texts, [model.encode_image, lambda x: model.encode_image(x.flip(-1))])
    assert plain.texts is turned.texts
    assert not torch.equal(plain.images, turned.images)
    with torch.inference_mode():
        assert torch.equal(plain.images, F.normalize(model.encode_image(images), dim=-1))


@pytest.mark.parametrize("held", [1, 50, 2**24])
def test_recall_by_sorting_everything_whatever_the_blocks(monkeypatch, held):
    monkeypatch.setattr(retrieval, "_SCORES", held)
    images, texts = F.normalize(noise(0, 20, 6), dim=1), F.normalize(noise(1, 45, 6), dim=1)
    owner = torch.cat([torch.arange(20), torch.arange(20), torch.arange(5)]).sort().values
    found = recalls(find_hits(images, texts, owner, [1, 2, 7]))
    for k in (1, 2, 7):
        of_text, of_image = [], []
        for j, text in enumerate(texts):
            ranked = sorted(range(20), key=lambda i: -float(text @ images[i]))
            of_text.append(int(owner[j]) in ranked[:k])
        for i, image in enumerate(images):
            ranked = sorted(range(45), key=lambda j: -float(image @ texts[j]))
            of_image.append(i in owner[ranked[:k]])
        assert found[f"image_retrieval_recall@{k}"] == pytest.approx(sum(of_text) / 45)
        p = sum(of_image) / 20
        assert found[f"text_retrieval_recall@{k}"] == pytest.approx(p)
        assert found[f"text_retrieval_recall@{k}_stderr"] == pytest.approx(math.sqrt(p * (1 - p) / 20))


def test_captions_of_one_image_are_no_independent_evidence():
    images, texts = F.normalize(noise(0, 30, 6), dim=1), F.normalize(noise(1, 30, 6), dim=1)
    owner = torch.arange(30)
    once = recalls(find_hits(images, texts, owner, [5]))
    thrice = recalls(find_hits(images, texts.repeat_interleave(3, 0), owner.repeat_interleave(3), [5]))
    for name in ("image_retrieval_recall@5", "image_retrieval_recall@5_stderr"):
        assert thrice[name] == pytest.approx(once[name])


def test_what_a_plan_loses_is_counted_caption_by_caption(tiny_clip):
    model, _, tokenizer = tiny_clip.make()
    task, batches = RetrievalTask(context_of(model, tokenizer, recall_k=[5, 1])), captioned()
    encoders = [model.encode_image, lambda images: model.encode_image(images.flip(-1))]
    made = [task.batch("test", images, texts, encoders) for images, texts in batches]
    records = tuple({"test": [batch[plan] for batch in made]} for plan in (0, 1))
    owner = [number for number, captions in enumerate(text for _, texts in batches for text in texts) for _ in captions]
    expected = []
    for plan in (0, 1):
        images, texts = (torch.cat([getattr(batch[plan], name) for batch in made]).double() for name in ("images", "texts"))
        ranked = [sorted(range(len(images)), key=lambda i, text=text: -float(text @ images[i])) for text in texts]
        expected.append([float(mine in nearest[:5]) for mine, nearest in zip(owner, ranked, strict=True)])
    assert_paired(task, records, tuple(expected), owner)


def test_a_k_that_is_too_large_is_told_at_once_or_at_the_end(tiny_clip):
    model, _, tokenizer = tiny_clip.make()
    with pytest.raises(UserError, match=r"recall_k 21.*20 images.*20 at most"):
        RetrievalTask(context_of(model, tokenizer, size=20, recall_k=[5, 21]))
    task = RetrievalTask(context_of(model, tokenizer, recall_k=[8]))
    with pytest.raises(UserError, match="only 7 images"):
        run(task, captioned()[:1], model.encode_image)


def test_several_images_a_sample_are_for_another_task(tiny_clip):
    model, _, tokenizer = tiny_clip.make()
    task = RetrievalTask(context_of(model, tokenizer))
    with pytest.raises(UserError, match=r"this data has 2.*image_caption_selection"):
        task.batch("test", noise(0, 1, 2, 3, 48, 32), [["a", "b"]], [model.encode_image])


def test_features_that_are_no_numbers_are_told(tiny_clip):
    model, _, tokenizer = tiny_clip.make()
    task = RetrievalTask(context_of(model, tokenizer))
    with pytest.raises(UserError, match="NaN"):
        run(task, captioned(), lambda images: model.encode_image(images) * torch.nan)
