"""`tokensieve eval` as a user runs it: what it measures, what it writes, and what it says when something is wrong."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import open_clip
import pytest
import torch

from tests.support.pictures import CLASSES, many_hot, picture, png, write_shards
from tokensieve import embedded
from tokensieve.cli import main
from tokensieve.cutting.handle import Handle, apply
from tokensieve.data.source import Batch
from tokensieve.evaluation import passes, planned_model, results
from tokensieve.models import loading
from tokensieve.models.loading import fingerprints, hub, load_errors
from tokensieve.plan import Plan
from tokensieve.tasks.base import Task

Run = Callable[..., SimpleNamespace]


@pytest.fixture
def run(
    tiny_clip: SimpleNamespace,
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> Run:
    """run(*flags) -> .code .out .err .results (by file name); the tiny model on the colour shards unless flags say else."""
    monkeypatch.chdir(tmp_path)

    def go(*flags: object, quiet: bool = True, expect: int = 0) -> SimpleNamespace:
        given = [str(flag) for flag in flags]
        defaults = {
            "--model": tiny_clip.name,
            "--pretrained": tiny_clip.weights,
            "--dataset": "wds/colours",
            "--dataset_root": str(shards),
            "--num_workers": "0",
            "--batch_size": "8",
        }
        if "--pretrained_model" in given:
            defaults.pop("--model")
            defaults.pop("--pretrained")
        rest = [word for flag, value in defaults.items() if flag not in given for word in (flag, value)]
        code = main(["eval", *given, *rest, *(["--quiet"] if quiet else [])])
        said = capsys.readouterr()
        assert code == expect, said.err
        files = {str(p.relative_to(tmp_path)): p for p in sorted(tmp_path.rglob("*.json*"))}
        read = {
            name: json.loads(path.read_text())
            for name, path in files.items()
            if path.name.startswith("colours") and path.suffix == ".json"
        }
        return SimpleNamespace(code=code, out=said.out, err=said.err, files=list(files), results=read)

    return go


def only(done: SimpleNamespace) -> dict:
    (result,) = done.results.values()
    return result


NAME = "colours_tiny.safetensors_tiny-clip_en_zeroshot_classification"


# ------------------------------------------------------------------------------------------------------ the default job


@pytest.fixture
def untrained(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model with random weights, so that nothing here depends on how far its training is."""
    from safetensors.torch import save_model

    embedded.register()
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    save_model(open_clip.create_model(embedded.MODEL), str(path))
    monkeypatch.setattr(embedded, "weights_path", lambda tag: path)


def test_without_arguments_the_embedded_model_meets_the_controls(
    untrained: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "--limit", "6", "--batch_size", "2", "--num_workers", "0"]) == 0
    said = capsys.readouterr()
    assert "in the folder results" in said.out and "6/6" in said.err
    made = [json.loads(path.read_text()) for path in (tmp_path / "results").iterdir()]
    assert {result["reduction"]["plan"]: result["reduction"]["tokens_out"] for result in made} == {
        "none": 196,
        "anchor(k=10,m=50,alpha=0.5)": 60,
        "random:60": 60,
        "grid:60": 60,
    }
    assert {(r["dataset"], r["model"], r["pretrained"]) for r in made} == {("embedded", "sieve-vit-8", "scenes-v1")}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_plan_or_a_name_makes_it_an_ordinary_run(untrained: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["--limit", "2", "--num_workers", "0", "--quiet"]
    assert main(["eval", "--dataset", "embedded-heldout", *few]) == 0
    assert main(["eval", "--enable_pruning", *few]) == 0
    name = "scenes-v1_sieve-vit-8_en_zeroshot_classification.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"embedded-heldout_{name}", f"embedded_{name}"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--language", "de"], "'en' only"),
        (["--split", "tset"], "Did you mean 'test'"),
        (["--pretrained", "scenes-v2"], "scenes-v1"),
    ],
)
def test_mistakes_about_the_embedded_job(
    untrained: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, flags: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *flags]) == 2
    assert says in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- the result


def test_the_result_has_clip_benchmarks_keys_and_ours(run: Run, tiny_clip: SimpleNamespace) -> None:
    done = run("--plan", "random@2:6")
    assert done.files == [f"{NAME}.json"]
    result = only(done)
    assert list(result) == ["dataset", "model", "pretrained", "task", "metrics", "language", "reduction", "run"]
    assert (result["dataset"], result["model"], result["pretrained"]) == ("wds/colours", tiny_clip.name, tiny_clip.weights)
    assert (result["task"], result["language"]) == ("zeroshot_classification", "en")
    assert set(result["metrics"]) == {
        f"{metric}{stderr}" for metric in ("acc1", "acc5", "mean_per_class_recall") for stderr in ("", "_stderr")
    }
    reduction = result["reduction"]
    assert (reduction["plan"], reduction["applied"], reduction["reason"]) == ("random@2:6", True, None)
    assert reduction["layers"] == [{"layer": "2", "tokens_in": 24, "tokens_out": 6}]
    assert (reduction["tokens_in"], reduction["tokens_out"], reduction["notes"]) == (24, 6, [])
    assert 0 < reduction["gflops"] < reduction["gflops_full"]
    assert reduction["images_per_second"] > 0 and reduction["images_per_second_full"] > 0
    about = result["run"]
    versions = {"tokensieve": "0.1.0", "torch": torch.__version__, "open_clip": open_clip.__version__}
    assert about["versions"].items() >= versions.items() and {"timm", "transformers"} <= set(about["versions"])
    assert (about["seed"], about["n_samples"], about["n_skipped"], about["batch_size"]) == (0, 30, 0, 8)
    assert (about["dtype"], about["amp"]) == ("float32", False)
    assert about["seconds"] > 0 and about["key"] and about["weights"] and about["device"] == "cpu"


def test_numbers_equal_clip_benchmark_on_the_same_shards(run: Run, tiny_clip: SimpleNamespace, shards: Path) -> None:
    """Their data pipeline, classifier and loop, our command."""
    from clip_benchmark.datasets.builder import build_dataset
    from clip_benchmark.metrics import zeroshot_classification as theirs

    model, transform, tokenizer = tiny_clip.make()
    data = build_dataset("wds/colours", root=str(shards), transform=transform, split="test")
    loader = torch.utils.data.DataLoader(data.batched(8), batch_size=None)
    classifier = theirs.zero_shot_classifier(model, tokenizer, data.classes, data.templates, "cpu", amp=False)
    logits, target = theirs.run_classification(model, classifier, loader, "cpu", amp=False)
    acc1 = (logits.argmax(1) == target).float().mean().item()
    assert only(run())["metrics"]["acc1"] == pytest.approx(acc1, abs=1e-6)


def test_several_labels(run: Run, tiny_clip: SimpleNamespace, multilabel_shards: Path) -> None:
    from clip_benchmark.datasets.builder import build_dataset
    from clip_benchmark.metrics import zeroshot_classification as theirs

    done = run("--dataset_root", multilabel_shards, "--compare", "random:6", quiet=False)
    metrics = done.results[f"{NAME}_none.json"]["metrics"]
    assert list(metrics) == ["mean_average_precision", "mean_average_precision_stderr"]
    assert all(word in done.out for word in ("mean", "average", "precision", "±"))
    model, transform, tokenizer = tiny_clip.make()
    data = build_dataset("wds/colours", root=str(multilabel_shards), transform=transform, split="test")
    loader = torch.utils.data.DataLoader(data.batched(8), batch_size=None)
    loader.dataset.classes = data.classes
    expected = theirs.evaluate(model, loader, tokenizer, data.classes, data.templates, device="cpu", amp=False)
    assert metrics["mean_average_precision"] == pytest.approx(expected["mean_average_precision"], abs=1e-6)


def test_too_few_classes_for_acc5_is_null(run: Run, tmp_path: Path) -> None:
    samples = [{"png": png(picture(i % 2, i)), "cls": str(i % 2).encode()} for i in range(4)]
    folder = write_shards(tmp_path / "two", samples)
    (folder / "classnames.txt").write_text("red\ngreen")
    metrics = only(run("--dataset_root", folder))["metrics"]
    assert metrics["acc5"] is None and metrics["acc5_stderr"] is None


# ------------------------------------------------------------------------------------------------------------- the plans


def test_compare_puts_every_plan_into_its_own_file(run: Run) -> None:
    done = run("--plan", "anchor(k=2,m=4)", "--compare", "none", "random:6", "random:6", quiet=False)
    assert done.files == [f"{NAME}_{slug}.json" for slug in ("anchor_k2_m4", "none", "random-6")]
    by_plan = {result["reduction"]["plan"]: result for result in done.results.values()}
    none = by_plan["none"]["reduction"]
    assert (none["applied"], none["reason"], none["layers"]) == (False, "the plan is none", [])
    assert none["tokens_in"] == none["tokens_out"] == 24
    assert none["gflops"] == none["gflops_full"] == by_plan["random:6"]["reduction"]["gflops_full"]
    assert none["images_per_second"] == by_plan["random:6"]["reduction"]["images_per_second_full"]
    for text in ("24 -> 24", "24 -> 6", "GFLOPs", "images/s", "speed-up", "acc1", "±", "anchor(k=2,m=4)"):
        assert text in done.out


def test_a_plan_alone_gives_the_numbers_it_gives_beside_others(run: Run) -> None:
    """Interleaving leaves no trace: neither other plans nor the batches between change a plan's numbers."""
    together = run("--compare", "random:6", "anchor(k=2,m=4)", "grid:6").results
    for plan, slug in (("none", "none"), ("random:6", "random-6"), ("anchor(k=2,m=4)", "anchor_k2_m4"), ("grid:6", "grid-6")):
        run("--plan", plan, "--output", f"colours_{slug}.json")
        alone = json.loads(Path(f"colours_{slug}.json").read_text())
        assert alone["metrics"] == together[f"{NAME}_{slug}.json"]["metrics"]


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        (["--enable_pruning"], "anchor(k=10,m=50,alpha=0.5)"),
        (["--enable_pruning", "--k_anchors", 2, "--top_m", 4, "--alpha", 0.25], "anchor(k=2,m=4,alpha=0.25)"),
        (["--enable_pruning", "--k_anchors", 2, "--top_m", 4, "--prune_layer", 1], "anchor@1(k=2,m=4,alpha=0.5)"),
        (["--enable_pruning", "--k_anchors", 2, "--top_m", 4, "--prune_layer", -2], "anchor@-2(k=2,m=4,alpha=0.5)"),
        (["--enable_token_selection"], "anchor@out(k=10,m=50,alpha=0.5,rest=zero)"),
        (
            ["--enable_token_selection", "--token_selection_k", 2, "--token_selection_m", 4, "--token_selection_alpha", 1],
            "anchor@out(k=2,m=4,alpha=1.0,rest=zero)",
        ),
    ],
)
def test_the_switches_of_s1_and_s2_are_plans(run: Run, flags: list, plan: str) -> None:
    assert Plan.parse(only(run(*flags))["reduction"]["plan"]) == Plan.parse(plan)


def test_pruning_cuts_after_half_the_depth_by_default(run: Run) -> None:
    reduction = only(run("--enable_pruning", "--k_anchors", 2, "--top_m", 4))["reduction"]
    assert reduction["layers"] == [{"layer": "2", "tokens_in": 24, "tokens_out": 6}]


def test_token_selection_leaves_the_cls_feature(run: Run) -> None:
    """S1 zeroes output tokens; the image feature is CLS, so the metrics are those of the full model."""
    done = run("--enable_token_selection", "--token_selection_k", 2, "--token_selection_m", 4, "--compare", "none")
    selected, full = done.results.values()
    assert selected["reduction"]["tokens_out"] == 6
    assert selected["metrics"] == full["metrics"]


def test_keeping_more_than_there_is_keeps_all_and_says_so(run: Run) -> None:
    done = run("--enable_pruning")
    reduction = only(done)["reduction"]
    assert reduction["tokens_out"] == 24
    assert "everything is kept" in reduction["notes"][0]
    assert done.err.count("everything is kept") == 1


def test_a_tower_that_cannot_be_cut_runs_in_full_and_says_why(run: Run, tmp_path: Path) -> None:
    name = _small_resnet(tmp_path)
    done = run("--model", name, "--pretrained", "", "--enable_pruning", quiet=False)
    reduction = only(done)["reduction"]
    assert reduction["applied"] is False and reduction["reason"] and reduction["layers"] == []
    assert reduction["reason"] in done.err and "applied)" in done.out
    before = set(done.files)
    strict = run("--model", name, "--pretrained", "", "--enable_pruning", "--strict", "--output", "x.json", expect=2)
    assert reduction["reason"] in strict.err
    assert set(strict.files) == before


def _small_resnet(folder: Path) -> str:
    vision = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
    text = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    (folder / "tiny-resnet.json").write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}))
    open_clip.add_model_config(folder / "tiny-resnet.json")
    (folder / "tiny-resnet.json").unlink()
    return "tiny-resnet"


def test_an_arm_leaves_the_model_as_it_was_when_encoding_fails(tiny_clip: SimpleNamespace) -> None:
    model, _, _ = tiny_clip.make()
    images = torch.randn(2, 3, 48, 32)
    before = model.encode_image(images)
    arm = planned_model.PlannedModel(model, Plan.parse("random:6"), 0, torch.no_grad)
    with pytest.raises(RuntimeError):
        arm(torch.randn(2, 1, 48, 32))  # one channel
    assert torch.equal(model.encode_image(images), before)
    assert not torch.equal(arm(images), before)


def test_speed_leaves_out_the_warm_up_and_the_short_last_batch() -> None:
    arm = planned_model.PlannedModel(None, Plan.parse("none"), 0, torch.no_grad)
    arm.times = [(8, 100.0), (8, 2.0), (8, 4.0), (8, 3.0), (1, 50.0)]
    assert arm.images_per_second() == pytest.approx(8 / 3)
    arm.times = [(8, 4.0)]
    assert arm.images_per_second() == pytest.approx(2)
    arm.times = [(64, 6.4), (16, 4.0)]  # one whole batch and a short one: never the short one
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


# ------------------------------------------------------------------------------------------------ models, data, languages


def test_several_models_data_sets_and_languages(run: Run, tiny_clip: SimpleNamespace, shards: Path, tmp_path: Path) -> None:
    for name in ("colours", "colours2"):
        shutil.copytree(shards, tmp_path / "data" / name)
    other = tmp_path / "other.safetensors"
    shutil.copy(tiny_clip.weights, other)
    flags = ["--dataset", "wds/colours", "wds/colours2", "--dataset_root", f"{tmp_path}/data/{{dataset}}"]
    done = run(*flags, "--pretrained", tiny_clip.weights, other, "--language", "en", "de")
    assert len(done.results) == 8
    assert "colours2_other.safetensors_tiny-clip_de_zeroshot_classification.json" in done.results


def test_lists_in_files(run: Run, tiny_clip: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "models.txt").write_text(f"{tiny_clip.name},{tiny_clip.weights}\n\n")
    (tmp_path / "sets.txt").write_text("wds/colours\n")
    done = run("--pretrained_model", "models.txt", "--dataset", "sets.txt")
    assert list(done.results) == [f"{NAME}.json"]


def test_pretrained_model_pairs_and_collections(run: Run, tiny_clip: SimpleNamespace) -> None:
    assert run("--pretrained_model", f"{tiny_clip.name},{tiny_clip.weights}").results
    assert loading.model_pairs(None, None, ["openai"])[0] == ("ViT-B-32", "openai")
    assert loading.model_pairs(["a", "b"], ["c", "d"], None) == [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")]
    error = run("--pretrained_model", "openia", expect=2).err
    assert "MODEL,WEIGHTS" in error and "Did you mean 'openai'" in error


def test_an_image_folder_through_clip_benchmark(run: Run, faces: Path) -> None:
    done = run("--dataset", "fer2013", "--dataset_root", faces, "--output", "colours_{dataset}.json")
    assert only(done)["run"]["n_samples"] == 28


def test_split_and_test_split_are_one(run: Run, shards: Path, tmp_path: Path) -> None:
    shutil.copytree(shards, tmp_path / "d")
    (tmp_path / "d" / "test").rename(tmp_path / "d" / "held")
    for flag in ("--split", "--test_split"):
        assert only(run("--dataset_root", "d", flag, "held"))["run"]["split"] == "held"
    assert "nshards.txt" in run("--dataset_root", "d", expect=2).err


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


def test_custom_class_names_and_templates(run: Run, tmp_path: Path) -> None:
    names = ["one", "two", "three", "four", "five", "six"]
    (tmp_path / "names.json").write_text(json.dumps({"colours": names}))
    (tmp_path / "prompts.json").write_text(json.dumps({"imagenet1k": ["it is {c}"]}))
    flags = ["--custom_classname_file", "names.json", "--custom_template_file", "prompts.json"]
    done = run(*flags, "--dump_classnames", "--dump_templates", "--output", "colours_{plan}.json")
    assert only(done)["classnames"] == names
    assert only(done)["templates"] == ["it is {c}"]
    (tmp_path / "names.json").write_text(json.dumps({"colours": names[:3]}))
    assert "a label is" in run(*flags, expect=2).err
    (tmp_path / "names.json").write_text(json.dumps({"other": names}))
    assert "no entry for 'wds/colours'" in run(*flags, expect=2).err
    assert "No such file" in run("--custom_template_file", "nowhere.json", expect=2).err


def test_names_and_templates_are_dumped_only_if_asked(run: Run) -> None:
    assert not {"classnames", "templates"} & set(only(run()))
    assert only(run("--dump_classnames"))["classnames"] == CLASSES


def test_classifiers_are_saved_and_loaded(run: Run, tmp_path: Path) -> None:
    first = only(run("--save_clf", "{dataset}.pt"))
    assert torch.load("colours.pt", weights_only=True).shape == (16, 6)
    again = only(run("--load_clfs", "colours.pt", "colours.pt"))
    assert again["metrics"] == first["metrics"]
    run("--save_clf", "colours.pt")
    assert Path("colours.pt.1").exists()
    torch.save(torch.rand(16, 4), "four.pt")
    assert "for 4 classes" in run("--load_clfs", "four.pt", expect=2).err
    assert "missing.pt" in run("--load_clfs", "missing.pt", expect=2).err


def test_mixed_precision_only_when_asked_on_the_cpu(run: Run) -> None:
    assert only(run())["run"]["dtype"] == "float32"
    assert only(run("--no_amp"))["run"]["dtype"] == "float32"
    mixed = only(run("--amp", "--plan", "anchor(k=2,m=4)"))
    assert (mixed["run"]["dtype"], mixed["run"]["amp"]) == ("bfloat16", True)
    assert mixed["reduction"]["tokens_out"] == 6


def test_the_seed_reaches_the_plan(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    handles: list[Handle] = []

    def watched(*args: Any, **kwargs: Any) -> Handle:
        handles.append(apply(*args, **kwargs))
        return handles[-1]

    monkeypatch.setattr(planned_model, "apply", watched)
    for seed in (3, 3, 4):
        assert only(run("--plan", "random:6", "--output", "colours_{plan}.json", "--seed", seed))["run"]["seed"] == seed
    first, again, other = (handle.kept for handle in handles)
    assert first is not None and again is not None and other is not None
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_weights_from_another_folder_are_the_same_weights(tiny_clip: SimpleNamespace) -> None:
    one, two = (loading.load(tiny_clip.name, tiny_clip.weights) for _ in range(2))
    assert one.fingerprint == two.fingerprint
    with torch.no_grad():
        next(two.model.parameters())[0] += 1e-3
    assert fingerprints.identity(two.model, two.transform) != one.fingerprint


def test_what_libraries_warn_about_in_loading_is_passed_on_once_without_their_log() -> None:
    with load_errors.collect_warnings() as notes:
        for _ in range(2):
            warnings.warn("QuickGELU mismatch", UserWarning, stacklevel=1)
        assert not logging.getLogger().isEnabledFor(logging.WARNING)
    assert notes == ["QuickGELU mismatch"]
    assert logging.getLogger().isEnabledFor(logging.WARNING)


# ----------------------------------------------------------------------------------------------------------- result files


def test_output_templates(run: Run, tmp_path: Path) -> None:
    run("--output", "deep/{model}/{pretrained}-{language}-{task}-{dataset}.json")
    assert (tmp_path / "deep/tiny-clip/tiny.safetensors-en-zeroshot_classification-colours.json").exists()
    (tmp_path / "folder").mkdir()
    run("--output", "folder")
    assert (tmp_path / "folder" / f"{NAME}.json").exists()
    run("--output", "full/{pretrained_full_path}.json")
    assert len(list((tmp_path / "full").iterdir())) == 1
    assert "{plan}" in run("--output", "{nothing}.json", expect=2).err


def test_two_runs_cannot_share_a_file(run: Run, tiny_clip: SimpleNamespace) -> None:
    error = run("--language", "en", "de", "--output", "x.json", expect=2).err
    assert "x.json both for" in error


def test_skip_existing_skips_only_the_same_run(run: Run, shards: Path, tmp_path: Path) -> None:
    run("--plan", "random:6", "--skip_existing")
    before = (tmp_path / f"{NAME}.json").stat().st_mtime_ns
    done = run("--plan", "random:6", "--skip_existing")
    assert "skipped" in done.err and (tmp_path / f"{NAME}.json").stat().st_mtime_ns == before
    for flags in (["--plan", "random:7"], ["--limit", 9], ["--seed", 1], ["--amp"], ["--batch_size", 4]):
        changed = run(*flags, "--skip_existing")
        assert "skipped" not in changed.err, flags
    assert (tmp_path / f"{NAME}.json.5").exists()


def test_skip_existing_sees_changed_weights_and_data(
    run: Run, tiny_clip: SimpleNamespace, shards: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    weights, data = tmp_path / "w.safetensors", tmp_path / "data"
    shutil.copy(tiny_clip.weights, weights)
    shutil.copytree(shards, data)
    flags = ["--pretrained", weights, "--dataset_root", data, "--skip_existing"]
    run(*flags)
    assert "skipped" in run(*flags).err
    (data / "classnames.txt").write_text("\n".join(reversed(CLASSES)))
    assert "skipped" not in run(*flags).err
    state = load_file(weights)
    state["visual.proj"] += 1
    save_file(state, weights)
    assert "skipped" not in run(*flags).err


def test_part_of_a_run_can_be_skipped(run: Run) -> None:
    run("--plan", "random:6", "--output", "colours_{plan}.json")
    done = run("--plan", "random:6", "--compare", "none", "--output", "colours_{plan}.json", "--skip_existing")
    assert done.files == ["colours_none.json", "colours_random-6.json"]
    assert done.err.count("skipped") == 1


def test_another_run_is_moved_aside(run: Run, tmp_path: Path) -> None:
    (tmp_path / "colours.json").write_text('"a file of mine"')
    done = run("--output", "colours.json")
    assert (tmp_path / "colours.json.1").read_text() == '"a file of mine"'
    assert "colours.json.1" in done.err
    run("--output", "colours.json")
    assert not (tmp_path / "colours.json.2").exists()


def test_unwritable_output_is_found_before_anything_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(loading, "load", never)
    (tmp_path / "file").write_text("")
    assert "cannot write" in run("--output", "file/x.json", expect=2).err
    (tmp_path / "x.json").mkdir()
    assert "x.json" in run("--output", "x.json/../x.json/a/../../file/y.json", expect=2).err


# -------------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "ViT-B-23"], "Did you mean 'ViT-B-32'"),
        (["--model", "ViT-B-32", "--pretrained", "opneai"], "Did you mean 'openai'"),
        (["--model", "ViT-B-32", "--pretrained", "scenes-v1"], "openai"),
        (["--pretrained", "nowhere/weights.pt"], "there is no such file"),
        (["--model", "local-dir:nowhere"], "open_clip_config.json"),
        (["--dataset", "cifar1"], "Did you mean 'cifar10'"),
        (["--dataset", "wds/colours", "--dataset_root", "{name}"], "{dataset_cleaned}"),
        (["--plan", "anchr(k=2,m=4)"], "Did you mean 'anchor'"),
        (["--plan", "anchor@9(k=2,m=4)"], "9"),
        (["--plan", "anchor(k=0,m=4)"], "k=0"),
        (["--enable_pruning", "--alpha", 2], "alpha"),
        (["--compare", "random:6", "random@@"], "@@"),
        (["--plan", "none", "--enable_pruning"], "exclude each other"),
        (["--enable_token_selection", "--enable_pruning"], "exclude each other"),
        (["--k_anchors", 3], "add --enable_pruning"),
        (["--prune_layer", 3, "--plan", "none"], "add --enable_pruning"),
        (["--token_selection_m", 3], "add --enable_token_selection"),
        (["--device", "tpu0"], "--device"),
        (["--device", "cuda:77"], "this machine has cpu"),
        (["--task", "zeroshot_retrieval"], "needs captions"),
        (["--task", "captioning", "--dataset", "embedded"], "captions"),
        (["--dataset", "flickr8k"], "--dataset embedded-captions"),
        (["--dataset", "sugar_crepe"], "--dataset embedded-selection"),
        (["--skip_load"], "--skip_load works with --task linear_probe only"),
        (["--train_split", "a", "b"], "--train_split has 2 values for 1 data sets"),
        (["--token_fusion", "wieghted"], "weighted"),
        (["--token_fusion_weight", 0.5], "--token_fusion weighted"),
        (["--token_fusion", "weighted", "--token_fusion_weight", 1.5], "not from 0 to 1"),
        (["--weights", "some.safetensors"], "no method of the plan is a trained one"),
        (["--dataset", "fer2013", "--language", "xx"], "prompts in ar, cn, en"),
        (["--dataset", "vtab/dtd", "--dataset_root", "."], "pip install"),
        (["--model_type", "ja_clip"], "japanese_clip"),
    ],
)
def test_mistakes_are_one_line(run: Run, flags: list, says: str) -> None:
    done = run(*flags, expect=2)
    assert says in done.err
    assert done.err.startswith("tokensieve: error: ") and done.err.count("\n") == 1
    assert done.files == []


def test_weights_that_do_not_fit(run: Run, tiny_clip: SimpleNamespace, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    state = load_file(tiny_clip.weights)
    save_file({**state, "visual.proj": torch.rand(32, 5)}, tmp_path / "shape.safetensors")
    save_file({"nothing": torch.rand(2)}, tmp_path / "keys.safetensors")
    torch.save({"w": argparse.Namespace()}, tmp_path / "pickle.pt")
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "empty.safetensors").write_text("")
    (tmp_path / "cut.safetensors").write_bytes(Path(tiny_clip.weights).read_bytes()[:5000])
    says = {
        "shape.safetensors": "do not fit",
        "keys.safetensors": "do not fit",
        "pickle.pt": "more than tensors",
        "text.pt": "is not a file of weights",
        "empty.safetensors": "is not a file of weights",
        "cut.safetensors": "damaged",
    }
    for name, words in says.items():
        error = run("--pretrained", name, expect=2).err
        assert words in error and name in error and error.count("\n") == 1


@pytest.mark.slow
def test_offline_with_weights_not_cached_answers_at_once(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "reachable", lambda *hosts: False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)  # a miss that is retried waits in between, however busy the machine
    done = run("--model", "ViT-B-32", "--pretrained", "openai", "--model_cache_dir", tmp_path / "none", expect=2)
    assert "not on this machine" in done.err and "--pretrained /path" in done.err
    assert constants.HF_HUB_OFFLINE is True
    done = run("--model", "hf-hub:some/where", "--model_cache_dir", tmp_path / "none", expect=2)
    assert "hf-hub:some/where is not on this machine" in done.err
    assert "cannot load ViT-B-16-SigLIP" in run("--model", "ViT-B-16-SigLIP", "--pretrained", "", expect=2).err
    assert not waited


def test_offline_without_the_data_answers_at_once(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub, "reachable", lambda *hosts: False)
    done = run("--dataset", "cifar10", "--dataset_root", "not_there", expect=2)
    assert "no network" in done.err and not (tmp_path / "not_there").exists()
    (tmp_path / "there").mkdir()
    for name in ("cifar10", "mnist", "voc2007", "pets"):
        done = run("--dataset", name, "--dataset_root", "there", expect=2)
        assert "no network" in done.err and done.err.count("\n") == 1
        assert list((tmp_path / "there").iterdir()) == []


def test_a_proxy_is_asked_instead_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def connect(address: tuple[str, int], timeout: float) -> None:
        asked.append(address)
        raise OSError

    monkeypatch.setattr(hub.socket, "create_connection", connect)
    monkeypatch.delenv("https_proxy", raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    assert not hub.reachable("huggingface.co")
    monkeypatch.delenv("HTTPS_PROXY")
    assert not hub.reachable("huggingface.co", "github.com")
    assert asked == [("proxy.example", 3128), ("huggingface.co", 443), ("github.com", 443)]


def _damaged(folder: Path, total: int, broken: int) -> Path:
    samples = [{"png": png(picture(i % 6, i)), "cls": str(i % 6).encode()} for i in range(total)]
    for i in range(broken):
        samples[i * 7]["png"] = [b"", b"no image", samples[i * 7]["png"][:60]][i % 3]
    return write_shards(folder, samples)


def test_broken_images_are_counted_and_listed(run: Run, tmp_path: Path) -> None:
    folder = _damaged(tmp_path / "some", 30, 3)
    done = run("--dataset_root", folder, "--max_broken", 0.2)
    assert (only(done)["run"]["n_samples"], only(done)["run"]["n_skipped"]) == (27, 3)
    assert done.err.count("cannot read s00") == 3


def test_too_many_broken_images_end_the_run(run: Run, tmp_path: Path) -> None:
    folder = _damaged(tmp_path / "some", 30, 3)
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
        assert "cannot read a shard" in done.err and "1.tar" in done.err
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


# -------------------------------------------------------------------------------------- flags of other tasks, noise


@pytest.mark.parametrize(
    "flags",
    [
        ["--train_split", "a"],
        ["--val_split", "v"],
        ["--val_proportion", 0.5],
        ["--recall_k", 1, 5],
        ["--fewshot_k", 4],
        ["--fewshot_epochs", 2],
        ["--fewshot_lr", 0.5],
        ["--normalize", "False"],
        ["--feature_root", "elsewhere"],
        ["--annotation_file", "f.txt"],
    ],
)
def test_flags_of_other_tasks_are_taken_and_said_to_be_idle(run: Run, flags: list) -> None:
    done = run(*flags)
    assert f"{flags[0]} has no effect" in done.err
    assert only(done)["metrics"]


@pytest.mark.parametrize("flags", [["--wds_cache_dir", "cache"], ["--model_cache_dir", "cache"], ["--model_type", "open_clip"]])
def test_the_other_flags_of_clip_benchmark(run: Run, flags: list) -> None:
    assert only(run(*flags))["run"]["n_samples"] == 30


def test_a_probe_from_kept_features_forgets_nothing(run: Run, tmp_path: Path) -> None:
    """Broken images stay counted and judged, and what the first run measured is not overwritten by nothing."""
    samples = [{"png": png(picture(i % 6, i)), "cls": str(i % 6).encode()} for i in range(24)]
    samples[5]["png"] = samples[5]["png"][:60]
    folder = write_shards(tmp_path / "some", samples)
    flags = [
        "--task",
        "linear_probe",
        "--train_split",
        "test",
        "--fewshot_epochs",
        1,
        "--dataset_root",
        folder,
        "--plan",
        "random:6",
    ]
    first = only(run(*flags, "--max_broken", 0.2))
    assert (first["run"]["n_samples"], first["run"]["n_skipped"]) == (23, 2)  # of each of two passes
    assert first["run"]["arguments"] == {"dataset_root": str(folder), "max_broken": 0.2}
    for more in ([], ["--skip_load"]):
        again = only(run(*flags, "--max_broken", 0.2, *more))
        assert again["metrics"] == first["metrics"] and again["run"]["key"] == first["run"]["key"]
        assert (again["run"]["n_samples"], again["run"]["n_skipped"]) == (23, 2)
        assert again["reduction"] == first["reduction"]
    assert "--max_broken 0.0" in run(*flags, "--max_broken", 0.0, expect=2).err


def test_a_classifier_of_another_width_or_with_nan(run: Run, tmp_path: Path) -> None:
    torch.save(torch.randn(5, 6), tmp_path / "narrow.pt")
    assert "width 5, tiny-clip has 16" in run("--load_clfs", tmp_path / "narrow.pt", expect=2).err
    torch.save(torch.full((16, 6), float("nan")), tmp_path / "nan.pt")
    assert "finite numbers" in run("--load_clfs", tmp_path / "nan.pt", expect=2).err


def test_token_fusion_changes_the_feature_and_is_in_the_result(run: Run, tiny_clip: SimpleNamespace) -> None:
    """S3 beside S1 and S2; cls is the model's own feature, so its numbers are those without the flag."""
    plans = {"S1": ["--enable_token_selection", "--token_selection_k", 2, "--token_selection_m", 4]}
    plans |= {"S2": ["--enable_pruning", "--k_anchors", 2, "--top_m", 4]}
    for flags in plans.values():
        plain = only(run(*flags))
        stock = only(run(*flags, "--token_fusion", "cls"))
        assert stock["metrics"] == plain["metrics"] and stock["run"]["key"] == plain["run"]["key"]
        found = {}
        for fusion in (["weighted"], ["weighted", "--token_fusion_weight", 0.3], ["mean"]):
            row = only(run(*flags, "--token_fusion", *fusion))
            assert row["reduction"]["token_fusion"] == fusion[0]
            assert row["reduction"].get("token_fusion_weight") == (
                None if fusion == ["mean"] else fusion[-1] if fusion[1:] else 0.8
            )
            found[row["run"]["key"]] = row
        assert len(found) == 3 and plain["run"]["key"] not in found


def test_token_fusion_on_a_tower_without_tokens_is_said(run: Run, tmp_path: Path) -> None:
    done = run("--model", _small_resnet(tmp_path), "--pretrained", "", "--token_fusion", "mean")
    assert "is not applied" in done.err
    row = only(done)
    assert row["reduction"]["token_fusion"] == "cls" and "ResNet" in row["reduction"]["reason"]


def test_quiet_is_silent(run: Run) -> None:
    done = run("--plan", "random:6")
    assert (done.out, done.err) == ("", "")


def test_progress_goes_to_stderr_and_the_table_to_stdout(run: Run) -> None:
    done = run(quiet=False)
    assert "30img" in done.err and "speed-up" in done.out and f"result: {NAME}.json" in done.out


def test_every_flag_of_clip_benchmark_is_ours_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    from clip_benchmark import cli as theirs

    from tokensieve.cli import parse

    monkeypatch.setattr(sys, "argv", ["clip_benchmark", "eval"])
    expected = vars(theirs.get_parser_args()[1])
    expected.pop("which")
    ours = vars(parse(["eval"]))
    embedded = {"dataset", "model", "pretrained", "pretrained_model", "output", "amp"}  # decided by evaluate
    for name, value in expected.items():
        assert name in ours, name
        if name not in embedded:
            same = ours[name] == value or ours[name] == [value]
            assert same, (name, ours[name], value)
    assert expected["output"] == results.DEFAULT_OUTPUT


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_run_with_their_code(
    tiny_clip: SimpleNamespace, shards: Path, tmp_path: Path, number: int, code: int
) -> None:
    (tmp_path / "run.py").write_text(
        "import sys, time, open_clip\n"
        "from tokensieve.evaluation import run\n"
        "from tokensieve.cli import main\n"
        "def slow(*a, **k):\n    print('ready', flush=True)\n    time.sleep(600)\n"
        "run.run_job = slow\n"
        f"open_clip.add_model_config({str(Path(tiny_clip.weights).parent / 'tiny-clip.json')!r})\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    flags = ["--model", tiny_clip.name, "--pretrained", tiny_clip.weights, "--dataset", "wds/c", "--dataset_root", str(shards)]
    command = [sys.executable, str(tmp_path / "run.py"), "eval", *flags]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, error = process.communicate(timeout=300)
    assert process.returncode == code
    assert "Traceback" not in error
    assert not list(tmp_path.glob("*.json"))
