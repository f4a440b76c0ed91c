"""Passes of `tokensieve eval`: which samples are read, broken ones, and what is timed and shown."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.evaluation import NAME, Run, damaged, only
from tests.support.pictures import many_hot, picture, png, write_shards
from tokensieve.data.source import Batch
from tokensieve.evaluation import passes, planned_model
from tokensieve.plan import Plan
from tokensieve.tasks.base import Task


def test_a_planned_model_leaves_the_model_as_it_was_when_encoding_fails(tiny_clip: SimpleNamespace) -> None:
    model, _, _ = tiny_clip.make()
    images = torch.randn(2, 3, 48, 32)
    before = model.encode_image(images)
    arm = planned_model.PlannedModel(model, Plan.parse("random:6"), 0, torch.no_grad)
    with pytest.raises(RuntimeError):
        arm(torch.randn(2, 1, 48, 32))  # one channel
    assert torch.equal(model.encode_image(images), before)
    assert not torch.equal(arm(images), before)


def timed(*batches: tuple[int, float]) -> list[planned_model.Timed]:
    return [planned_model.Timed(images, seconds, number) for number, (images, seconds) in enumerate(batches)]


def test_a_speed_up_is_of_the_same_batches_and_has_its_quartiles() -> None:
    full, arm = (planned_model.PlannedModel(None, Plan.parse("none"), 0, torch.no_grad) for _ in range(2))
    full.times = timed((8, 99.0), (8, 4.0), (8, 6.0), (8, 8.0), (8, 10.0), (8, 3.0), (2, 9.0))
    arm.times = timed((8, 1.0), (8, 2.0), (8, 2.0), (8, 2.0), (8, 2.0), (8, 3.0), (2, 1.0))
    ratio, batches = arm.speed_up(full)
    assert batches == 5 and ratio == pytest.approx((3.0, 2.0, 4.0))  # of 2, 3, 4, 5, 1
    full.times = [full.times[3]]  # the full model is timed on a few batches, where it is not a plan of the run
    assert arm.speed_up(full) == ((4.0, 4.0, 4.0), 1)
    full.times = []
    assert arm.speed_up(full) is None


def test_speed_leaves_out_the_warm_up_and_the_short_last_batch() -> None:
    arm = planned_model.PlannedModel(None, Plan.parse("none"), 0, torch.no_grad)
    arm.times = timed((8, 100.0), (8, 2.0), (8, 4.0), (8, 3.0), (1, 50.0))
    assert arm.images_per_second() == pytest.approx(8 / 3)
    arm.times = timed((8, 4.0))
    assert arm.images_per_second() == pytest.approx(2)
    arm.times = timed((64, 6.4), (16, 4.0))  # one whole batch and a short one: never the short one
    assert arm.images_per_second() == pytest.approx(10)


def test_timing_the_unreduced_model_costs_little() -> None:
    class Fake:
        def __init__(self, cost: float) -> None:
            self.cost, self.calls = cost, 0

        def __call__(self, images: object, samples: object = None) -> None:
            self.calls += 1

        @property
        def seconds(self) -> float:
            return self.cost * self.calls

    def timed(batches: int) -> int:
        full, arm = Fake(1.5), Fake(1.0)
        some = Batch(torch.zeros(1, 3, 2, 2), torch.zeros(1), [], 0, torch.zeros(1))
        for batch in passes._timing_full(iter([some] * batches), full, [arm], Task()):  # type: ignore[arg-type, list-item]
            arm(batch.images)
        return full.calls

    assert timed(1) == 1
    assert timed(20) == 1
    assert 2 <= timed(100) <= 5


def test_limit_takes_the_first_samples(run: Run, faces: Path) -> None:
    assert only(run("--limit", 7, "--num_workers", 2))["run"]["n_samples"] == 7
    done = run("--dataset", "fer2013", "--dataset_root", faces, "--limit", 5, "--output", "colours_faces.json")
    assert done.results["colours_faces.json"]["run"]["n_samples"] == 5
    assert done.results["colours_faces.json"]["metrics"]["mean_per_class_recall"] in (
        0,
        0.125,
        0.5,
        0.25,
        0.375,
        0.625,
        0.75,
        1,
    )


def test_workers_read_every_sample_once(run: Run) -> None:
    alone = only(run("--num_workers", 0))
    many = only(run("--num_workers", 4))
    assert many["run"]["n_samples"] == 30
    assert many["metrics"] == alone["metrics"]


def test_broken_images_are_counted_and_listed(run: Run, tmp_path: Path) -> None:
    folder = damaged(tmp_path / "some", 30, 3)
    done = run("--dataset_root", folder, "--max_broken", 0.2)
    assert (only(done)["run"]["n_samples"], only(done)["run"]["n_skipped"]) == (27, 3)
    assert done.err.count("cannot read s00") == 3


def test_too_many_broken_images_end_the_run(run: Run, tmp_path: Path) -> None:
    folder = damaged(tmp_path / "some", 30, 3)
    done = run("--dataset_root", folder, expect=2)
    assert "3 of 30 images" in done.err and done.files == []


def test_broken_images_in_a_folder(run: Run, faces: Path, tmp_path: Path) -> None:
    shutil.copytree(faces, tmp_path / "f")
    (tmp_path / "f/test/3/1.png").write_bytes(b"junk")
    flags = ["--dataset", "fer2013", "--dataset_root", "f", "--output", "colours_f.json"]
    assert "f/test/3/1.png" in run(*flags, expect=2).err
    assert only(run(*flags, "--max_broken", 0.1))["run"]["n_skipped"] == 1


def test_a_damaged_shard_ends_the_run(run: Run, shards: Path, tmp_path: Path) -> None:
    shutil.copytree(shards, tmp_path / "d")
    shard = tmp_path / "d/test/1.tar"
    whole = shard.read_bytes()
    for content in (b"no archive at all " * 100, whole[:20_000], b""):
        shard.write_bytes(content)
        assert "1.tar is damaged or cut off" in run("--dataset_root", "d", expect=2).err
    shard.write_bytes(b"no archive at all " * 100 + bytes(1024))
    for workers in (0, 2):
        done = run("--dataset_root", "d", "--num_workers", workers, expect=2)
        assert "cannot read" in done.err and "1.tar" in done.err
        assert done.err.count("\n") == 1 and done.files == []
    shard.unlink()
    assert "1.tar is missing" in run("--dataset_root", "d", expect=2).err


def test_empty_data(run: Run, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "none", [])
    assert "is empty" in run("--dataset_root", folder, expect=2).err
    (folder / "classnames.txt").unlink()
    assert "has no class names" in run("--dataset_root", folder, expect=2).err


def test_labels_of_the_wrong_width(run: Run, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "many", [{"png": png(picture(0, 0)), "npy": many_hot([1])}], shards=1, kind="multilabel")
    (folder / "classnames.txt").write_text("red\ngreen")
    assert "6 labels an image, but 2" in run("--dataset_root", folder, expect=2).err


def test_quiet_is_silent(run: Run) -> None:
    done = run("--plan", "random:6")
    assert (done.out, done.err) == ("", "")


def test_progress_goes_to_stderr_and_the_table_to_stdout(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # there are no bars elsewhere
    done = run(quiet=False)
    assert "30img" in done.err and "speed-up" in done.out and f"result: {NAME}.json" in done.out
