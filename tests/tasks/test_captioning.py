"""Captioning: open_clip's own search word for word, clip_benchmark's numbers, and what is told when something is missing."""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import subprocess
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.caption_tasks import context_of, noise, run, run_shared, sentence, stock_generate, tiny_coca
from tests.support.paired import assert_paired
from tokensieve.cutting.handle import apply
from tokensieve.errors import UserError
from tokensieve.tasks.captioning import beam_search, metrics
from tokensieve.tasks.captioning.beam_search import CaptionTokenizer, write
from tokensieve.tasks.captioning.task import CaptioningTask, CaptionRecord

needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="there is no Java")


@pytest.fixture(scope="module")
def coca(tmp_path_factory):
    return tiny_coca(tmp_path_factory.mktemp("coca"))


def captioned(sizes=(5, 5, 2)):
    batches, number = [], 0
    for size in sizes:
        images = torch.stack([noise(number + i, 3, 32, 32) for i in range(size)])
        texts = [[sentence(100 * (number + i) + j) for j in range(1 + (number + i) % 3)] for i in range(size)]
        batches.append((images, texts))
        number += size
    return batches


def upstream_text(ids):
    from open_clip.tokenizer import _tokenizer

    return _tokenizer.decode(ids).split("<end_of_text>")[0].replace("<start_of_text>", "").strip()


@torch.inference_mode()
def test_captions_are_those_of_open_clips_own_search(coca):
    images, words, lengths = noise(0, 3, 3, 32, 32), CaptionTokenizer.of(coca.tokenizer), set()
    end = coca.model.text_decoder.text_projection[:, words.end]
    likely = end.clone()
    for share in (0.3, 1.0):  # how much the end is liked
        end.copy_(likely * share)
        with stock_generate():
            theirs = [upstream_text(ids) for ids in coca.model.generate(images).numpy()]
        written = write(coca.model, images, words)
        assert [words.text(ids) for ids in written] == theirs
        assert len(set(theirs)) == 3
        lengths |= {len(ids) for ids in written}
    assert {beam_search.SHORTEST, beam_search.LONGEST} <= lengths  # all ways to end occur


@torch.inference_mode()
def test_a_caption_does_not_depend_on_the_batch(coca):
    images, words = noise(0, 6, 3, 32, 32), CaptionTokenizer.of(coca.tokenizer)
    alone = [write(coca.model, image[None], words)[0] for image in images]
    assert write(coca.model, images, words) == alone


@torch.inference_mode()
def test_every_image_is_encoded_once_with_the_plan_that_is_on(coca):
    images, words, seen = noise(0, 4, 3, 32, 32), CaptionTokenizer.of(coca.tokenizer), []
    hook = coca.model.visual.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    with apply(coca.model, "random@1:4") as sieve:
        write(coca.model, images, words)
    hook.remove()
    assert seen == [4]
    assert (sieve.ledger[0].tokens_in, sieve.ledger[0].tokens_out) == (16, 4)


def test_start_and_end_are_the_tokenizers_own(coca):
    words = CaptionTokenizer.of(coca.tokenizer)
    assert (words.start, words.end) == (49406, 49407)
    ids = coca.tokenizer(["two dogs near a tree"])[0].tolist()
    assert words.text(ids) == "two dogs near a tree" == upstream_text(ids)
    with pytest.raises(UserError, match="start and end"):
        CaptionTokenizer.of(SimpleNamespace())


@needs_java
def test_words_are_split_as_pycocoevalcap_does():
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    texts = [
        "A dog, on the (green) grass!",
        "",
        "it's a caf\u00e9 \u4e2d\u6587",
        "two\nlines",
        "  spaces  ",
        "'quoted' -- dash.",
    ]
    theirs = PTBTokenizer().tokenize({i: [{"caption": text}] for i, text in enumerate(texts)})
    assert metrics._tokenize(texts) == [theirs[i][0] for i in range(len(texts))]


@pytest.mark.slow
@needs_java
def test_numbers_are_clip_benchmarks(coca, monkeypatch):
    from clip_benchmark.metrics import captioning as upstream

    class NoSpice:  # its models would be downloaded
        def compute_score(self, gts, res):
            return 0.0, [0.0] * len(gts)

        def method(self):
            return "SPICE"

    monkeypatch.setattr(upstream, "Spice", NoSpice)
    monkeypatch.setattr(metrics, "reachable", lambda *hosts: False)
    batches = captioned()
    # The tiny model's captions share hardly a word with the references: let some references be what it writes.
    task = CaptioningTask(context_of(coca.model, coca.tokenizer))
    for number, (images, texts) in enumerate(batches):
        for told, text in zip(texts[number::2], task.run(coca.model, images)[number::2], strict=True):
            told.append(" ".join(text.split()[:-2]) + ", (a dog)!")
    with stock_generate(), torch.inference_mode(), contextlib.redirect_stdout(io.StringIO()):
        theirs = upstream.evaluate(coca.model, batches, 5, "cpu", None)
    ours = run(task, batches, lambda images: task.run(coca.model, images))
    assert set(theirs) == {"Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "METEOR", "ROUGE_L", "CIDEr", "SPICE"}
    for name in set(theirs) - {"SPICE"}:
        assert ours[name] == pytest.approx(float(theirs[name]), abs=1e-6)
        assert ours[name] > 0 and 0 < ours[f"{name}_stderr"] < 1.5
    assert "SPICE" not in ours
    (told,) = task.context.warn.__self__
    assert told.startswith("SPICE is left out") and "nlp.stanford.edu" in told


def test_shared_batches_give_the_captions_in_order(coca, monkeypatch):
    monkeypatch.setattr(metrics, "check_java", lambda: None)
    told = lambda written, references, say: metrics.CaptionScores({"told": (written, references)}, [])  # noqa: E731
    monkeypatch.setattr(metrics, "score", told)
    task = CaptioningTask(context_of(coca.model, coca.tokenizer))
    batches = captioned()

    def encode(images):
        return task.run(coca.model, images)

    told = run(task, batches, encode)
    assert told == run_shared(task, batches, encode)
    assert told["told"][1] == [texts for _, batch in batches for texts in batch]
    assert task.metric == "CIDEr" and task.name == "captioning"


def slow_cider(written, references):
    """CIDEr-D of each image: clipped cosines of n-gram counts weighted by rarity, less where lengths differ."""

    def grams(text, n):
        words = text.split()
        return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))

    scores = []
    for caption, captions in zip(written, references, strict=True):
        total = 0.0
        for n in (1, 2, 3, 4):
            among = [{gram for text in texts for gram in grams(text, n)} for texts in references]

            def weigh(text, n=n, among=among):
                rarity = {
                    g: math.log(len(references)) - math.log(max(1, sum(g in have for have in among))) for g in grams(text, n)
                }
                return {gram: count * rarity[gram] for gram, count in grams(text, n).items()}

            mine = weigh(caption)
            for text in captions:
                theirs = weigh(text)
                product = sum(min(value, theirs[gram]) * theirs[gram] for gram, value in mine.items() if gram in theirs)
                lengths = math.sqrt(sum(v**2 for v in mine.values())) * math.sqrt(sum(v**2 for v in theirs.values()))
                apart = len(caption.split()) - len(text.split())
                total += (product / lengths if lengths else 0.0) * math.exp(-(apart**2) / (2 * 6**2)) / (4 * len(captions))
        scores.append(10 * total)
    return scores


def test_what_a_plan_loses_is_cider_image_by_image(coca, monkeypatch):
    def fails(gts, res):
        raise metrics._LeftOut("no Java is needed here")

    monkeypatch.setattr(metrics, "check_java", lambda: None)
    monkeypatch.setattr(metrics, "_tokenize", lambda texts: list(texts))
    monkeypatch.setattr(metrics, "_meteor", fails)
    monkeypatch.setattr(metrics, "_spice", fails)
    references = [[sentence(100 * i + j) for j in range(1 + i % 3)] for i in range(12)]
    full = [" ".join([*texts[0].split()[1:], "dog"]) for texts in references]
    plan = [sentence(i) if i % 3 else text for i, text in enumerate(full)]
    records = tuple(
        {"test": [CaptionRecord(written[:5], references[:5]), CaptionRecord(written[5:], references[5:])]}
        for written in (full, plan)
    )
    task = CaptioningTask(context_of(coca.model, coca.tokenizer))
    expected = tuple(slow_cider(written, references) for written in (full, plan))
    assert_paired(task, records, expected, range(12))


def test_a_model_that_does_not_write_is_told_which_do(tiny_clip):
    model, _, tokenizer = tiny_clip.make()
    with pytest.raises(UserError, match=r"cannot write captions.*--model sieve-coca-8 --pretrained captions-v1.*coca_ViT-B-32"):
        CaptioningTask(context_of(model, tokenizer))


def test_without_java_nothing_is_run(coca, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"needs Java.*apt install"):
        CaptioningTask(context_of(coca.model, coca.tokenizer))


@pytest.mark.parametrize("program", ["exit 3", "exec sleep 5"])
def test_a_java_that_fails_or_hangs_is_told(tmp_path, monkeypatch, program):
    java = tmp_path / "java"
    java.write_text(f"#!/bin/sh\nexec 2>&1\n{program}\n")
    java.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(metrics, "SECONDS", 0.3)
    with pytest.raises(UserError, match="tokenizing the captions failed"):
        metrics.score(["a dog"], [["a cat"]], print)
    with pytest.raises(metrics._LeftOut, match="Java program failed"):
        metrics._meteor({0: ["a cat"]}, {0: ["a dog"]})


def test_a_metric_that_fails_is_left_out_and_the_others_stay(monkeypatch):
    def fails(gts, res):
        raise metrics._LeftOut("no wish to")

    monkeypatch.setattr(metrics, "_tokenize", lambda texts: list(texts))
    monkeypatch.setattr(metrics, "_meteor", fails)
    monkeypatch.setattr(metrics, "reachable", lambda *hosts: False)
    messages: list[str] = []
    found, _ = metrics.score(["a red dog", "a blue cat"], [["a red dog", "dog"], ["the blue cat"]], messages.append)
    assert {"Bleu_4", "ROUGE_L", "CIDEr"} <= set(found) and not {"METEOR", "SPICE"} & set(found)
    assert messages[0] == "METEOR is left out: no wish to" and messages[1].startswith("SPICE")


def test_a_spice_that_cannot_run_is_left_out(monkeypatch, tmp_path):
    from pycocoevalcap.spice import spice

    class Refuses:
        def compute_score(self, gts, res):
            raise subprocess.CalledProcessError(1, "java")

    monkeypatch.setattr(metrics, "reachable", lambda *hosts: True)
    monkeypatch.setattr(spice, "Spice", Refuses)
    with pytest.raises(metrics._LeftOut, match="Java 8"):
        metrics._spice({0: ["a"]}, {0: ["a"]})


def test_bleu_of_sums_is_pycocoevalcaps(monkeypatch):
    gts = {i: [sentence(i), sentence(i + 50)] for i in range(20)}
    res = {i: [" ".join(reversed(sentence(i).split())) if i % 2 else sentence(i)[:-1]] for i in range(20)}
    values, errors = metrics._bleu(gts, res)
    kept = {}
    monkeypatch.setattr(metrics, "_DRAWS", 2)
    monkeypatch.setattr(metrics, "corpus_bleu", lambda counts: kept.setdefault("counts", counts)[:, :4])
    monkeypatch.setattr(np.random, "default_rng", lambda seed: SimpleNamespace(integers=lambda n, size: np.arange(n)))
    metrics._bleu(gts, res)  # each draw is every image once
    monkeypatch.undo()
    assert metrics.corpus_bleu(kept["counts"])[0] == pytest.approx(list(values.values()), abs=1e-9)
    assert all(0 < error < 0.2 for error in errors.values())
