"""`eval --save_predictions`: what the model says of every sample, beside the result."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.evaluation import NAME, Run, damaged, only
from tests.support.processes import one_process, two_processes
from tokensieve.cli import main

FILE = f"{NAME}.predictions.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def evaluated(tmp_path: Path, *flags: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The results of an evaluation, each with its predictions."""
    words = ["eval", *flags, "--save_predictions", "--quiet", "--num_workers", "0", "--output", str(tmp_path / "r.json")]
    assert main(words) == 0
    results = sorted(path for path in tmp_path.glob("r*.json"))
    return [(json.loads(path.read_text()), lines(path.with_name(f"{path.stem}.predictions.jsonl"))) for path in results]


def test_every_image_has_a_line_with_its_label_and_the_nearest_classes(run: Run, tmp_path: Path) -> None:
    made = only(run("--plan", "random:6", "--save_predictions"))
    said = lines(tmp_path / FILE)
    assert len({line["sample"] for line in said}) == len(said) == 30 and len({line["label"] for line in said}) == 6
    assert sum(line["correct"] for line in said) / 30 == pytest.approx(made["metrics"]["acc1"])
    for line in said:
        shares = [share for _, share in line["nearest"]]
        assert line["nearest"][0] == [line["prediction"], line["score"]] and shares == sorted(shares, reverse=True)
        assert line["correct"] == (line["prediction"] == line["label"]) and 0 < sum(shares) <= 1 + 1e-6


def test_a_run_without_its_predictions_is_not_skipped_and_nothing_is_overwritten(run: Run, tmp_path: Path) -> None:
    run("--plan", "random:6")
    again = run("--plan", "random:6", "--skip_existing", "--save_predictions")
    assert "skipped" not in again.err
    (first,) = tmp_path.glob("*.predictions.jsonl")
    assert first.name.startswith(NAME) and first.name != FILE  # beside the second result
    before = first.read_bytes()
    assert "skipped" in run("--plan", "random:6", "--skip_existing", "--save_predictions").err
    first.unlink()
    assert "skipped" not in run("--plan", "random:6", "--skip_existing", "--save_predictions").err
    (second,) = tmp_path.glob("*.predictions.jsonl")
    assert second.read_bytes() == before
    for path in tmp_path.glob("*.json"):
        path.unlink()
    run("--plan", "random:6", "--save_predictions")
    run("--plan", "random:6", "--save_predictions")
    assert second.read_bytes() == before and len(list(tmp_path.glob("*.predictions.jsonl"))) == 3


def test_broken_images_keep_the_numbers_of_the_others(run: Run, tmp_path: Path) -> None:
    run("--save_predictions")
    run("--dataset_root", damaged(tmp_path / "broken", 30, 2), "--max_broken", "0.2", "--save_predictions")
    whole, left = (
        [line["sample"] for line in lines(path)]
        for path in sorted(tmp_path.glob("*.jsonl"), key=lambda p: p.stat().st_mtime_ns)
    )
    assert len(left) == 28 and left == [number for number in whole if number in left]


def test_a_pipe_has_no_place_beside_it(run: Run) -> None:
    assert "--save_predictions writes beside the result" in run("--save_predictions", "--output", "/dev/null", expect=2).err


@pytest.mark.slow
def test_several_processes_write_the_lines_of_one(tiny_clip: SimpleNamespace, shards: Path, tmp_path: Path) -> None:
    words = f"-m tokensieve eval --model {tiny_clip.name} --plan random:6 --save_predictions --quiet --batch_size 4".split()
    words += ["--dataset", "embedded", "--limit", "19", "--num_workers", "0"]
    words[words.index(tiny_clip.name)] = "sieve-vit-8"
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, start in ((one, one_process), (two, two_processes)):
        folder.mkdir()
        done = start([*words, "--output", "r.json"], folder)
        assert done.returncode == 0, done.stderr
    assert (one / "r.predictions.jsonl").read_bytes() == (two / "r.predictions.jsonl").read_bytes()
    assert [line["sample"] for line in lines(one / "r.predictions.jsonl")] == list(range(19))


def test_questions_have_the_models_answer_under_each_plan(tmp_path: Path) -> None:
    flags = [
        "--dataset",
        "embedded-questions",
        "--limit",
        "6",
        "--plan",
        "none",
        "--compare",
        "anchor@out:64",
        "--batch_size",
        "4",
    ]
    for result, said in evaluated(tmp_path, *flags):
        assert [line["sample"] for line in said] == list(range(6))
        assert sum(line["score"] for line in said) / 6 == pytest.approx(result["metrics"]["vqa_score"])
        assert all(line["question"].endswith("?") and line["label"] and isinstance(line["answer"], str) for line in said)


def test_captions_and_images_have_their_best_matches(tmp_path: Path) -> None:
    ((result, said),) = evaluated(
        tmp_path, *["--dataset", "embedded-captions", "--limit", "8", "--recall_k", "1", "--batch_size", "8"]
    )
    captions, images = ([line for line in said if line["of"] == kind] for kind in ("caption", "image"))
    assert [line["sample"] for line in images] == list(range(8)) and len(captions) > 8
    for found, side in ((captions, "image"), (images, "text")):
        hits = [line["correct"] for line in found]
        assert sum(hits) / len(hits) == pytest.approx(result["metrics"][f"{side}_retrieval_recall@1"])
    for line in captions:
        assert line["matches"][0] == [line["prediction"], line["score"]] and len(line["matches"]) == 5
        assert line["correct"] == (line["prediction"] == line["label"])
        assert line["caption"] in images[line["sample"]]["label"]


def test_queries_have_their_nearest_of_the_gallery(tmp_path: Path) -> None:
    flags = ["--dataset", "embedded-reid", "--limit", "40", "--plan", "none", "--modalities", "RGB", "--batch_size", "20"]
    ((result, said),) = evaluated(tmp_path, *flags)
    answered = [line for line in said if line["rank"]]
    assert len(said) == 40
    assert sum(line["correct"] for line in answered) / len(answered) == pytest.approx(result["metrics"]["rank_1"])
    assert sum(line["score"] for line in answered) / len(answered) == pytest.approx(result["metrics"]["mAP"])
    for line in answered:
        assert line["matches"][0][:2] == [line["nearest"], line["prediction"]] and line["nearest"] != line["query"]
        assert [far for *_, far in line["matches"]] == sorted(far for *_, far in line["matches"])
