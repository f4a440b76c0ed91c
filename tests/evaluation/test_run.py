"""`tokensieve eval` as a user runs it: what it measures and what it writes."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import open_clip
import pytest
import torch

from tests.support.evaluation import NAME, Run, only, small_resnet
from tests.support.pictures import CLASSES, picture, png, write_shards
from tokensieve.cli import main
from tokensieve.cutting.handle import Handle, apply
from tokensieve.evaluation import planned_model
from tokensieve.evaluation.planned_model import PlannedModel
from tokensieve.models import loading
from tokensieve.models.loading import fingerprints, load_errors
from tokensieve.plan import Plan


def test_without_arguments_the_embedded_model_meets_the_controls(
    untrained: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["eval", "--limit", "6", "--batch_size", "2", "--num_workers", "0"]) == 0
    said = capsys.readouterr()
    assert "in the folder results" in said.out and "6/6" in said.err
    made = [json.loads(path.read_text()) for path in (tmp_path / "results").iterdir()]
    assert {result["reduction"]["plan"]: result["reduction"]["tokens_out"] for result in made} == {
        "none": 196,
        "cover@2:56": 56,
        "cover:32": 32,
        "resize(size=80)": 100,
        "anchor(k=10,m=50,alpha=0.5)": 60,
        "anchor:60(rest=merge)": 60,
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
    made = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json"))
    assert made == [f"embedded-heldout_{name}", f"results/embedded_{name}"]  # results/ where neither data nor model is named


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


def test_compare_puts_every_plan_into_its_own_file(run: Run) -> None:
    done = run("--plan", "anchor(k=2,m=4)", "--compare", "none", "random:6", "random:6", quiet=False)
    assert done.files == [f"{NAME}_{slug}.json" for slug in ("anchor_k2_m4", "none", "random-6")]
    by_plan = {result["reduction"]["plan"]: result for result in done.results.values()}
    none = by_plan["none"]["reduction"]
    assert (none["applied"], none["reason"], none["layers"]) == (False, "the plan is none", [])
    assert none["tokens_in"] == none["tokens_out"] == 24
    assert none["gflops"] == none["gflops_full"] == by_plan["random:6"]["reduction"]["gflops_full"]
    assert none["images_per_second"] == by_plan["random:6"]["reduction"]["images_per_second_full"]
    for text in ("24 -> 24", "24 -> 6", "GFLOPs", "lost", "speed-up", "acc1", "±", "anchor(k=2,m=4)"):
        assert text in done.out
    for plan in ("random:6", "anchor(k=2,m=4)"):
        lost = by_plan["none"]["metrics"]["acc1"] - by_plan[plan]["metrics"]["acc1"]
        assert by_plan[plan]["reduction"]["lost"] == pytest.approx(lost, abs=1e-12)
    assert "lost" not in none and all(len(line) <= 80 for line in done.out.splitlines() if "->" in line)
    assert "images/s" in run("--plan", "random:6", quiet=False).out  # there is nothing to compare with


def test_a_plan_alone_gives_the_numbers_it_gives_beside_others(run: Run) -> None:
    """Interleaving leaves no trace: neither other plans nor the batches between change a plan's numbers."""
    together = run("--compare", "random:6", "anchor(k=2,m=4)", "grid:6").results
    for plan, slug in (("none", "none"), ("random:6", "random-6"), ("anchor(k=2,m=4)", "anchor_k2_m4"), ("grid:6", "grid-6")):
        run("--plan", plan, "--output", f"colours_{slug}.json")
        alone = json.loads(Path(f"colours_{slug}.json").read_text())
        assert alone["metrics"] == together[f"{NAME}_{slug}.json"]["metrics"]


def test_token_selection_leaves_the_cls_feature(run: Run) -> None:
    """S1 zeroes output tokens; the image feature is CLS, so the metrics are those of the full model."""
    done = run("--enable_token_selection", "--token_selection_k", 2, "--token_selection_m", 4, "--compare", "none")
    selected, full = done.results.values()
    assert selected["reduction"]["tokens_out"] == 6
    assert selected["metrics"] == full["metrics"]
    assert selected["reduction"]["changed"] is False and "CLS feature" in selected["reduction"]["reason"]


def test_keeping_more_than_there_is_keeps_all_and_says_so(run: Run) -> None:
    done = run("--enable_pruning")
    reduction = only(done)["reduction"]
    assert reduction["tokens_out"] == 24
    assert "everything is kept" in reduction["notes"][0]
    assert done.err.count("everything is kept") == 1
    assert reduction["applied"] is True and reduction["changed"] is False


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("cover@2:500", "no token was removed"),
        ("random@2:100%", "no token was removed"),
        ("tome:-0", "no token was removed"),
        ("resize(scale=1.0)", "no token was removed"),
        ("random@out:1", "the image feature is the CLS feature"),
        ("random@4.attn:1(rest=merge)", "the image feature is the CLS feature"),
        ("anchor@out:5(k=2,rest=zero)", "the image feature is the CLS feature"),
        ("random@3:5", None),
        ("grid@3:5 + random@out:1", None),
    ],
)
def test_a_plan_that_changes_nothing_says_so(run: Run, plan: str, reason: str | None) -> None:
    """On the terminal, also with --quiet, and in the result; plans that change something are not accused."""
    silent, loud = run("--plan", plan), run("--plan", plan, quiet=False)
    reduction = only(silent)["reduction"]
    assert reduction["applied"] is True and reduction["changed"] is (reason is None)
    if reason is None:
        assert reduction["reason"] is None and "changed nothing" not in silent.err + loud.out + loud.err
        return
    assert reason in reduction["reason"] and reduction["notes"]
    sentence = f"{plan} changed nothing: {reduction['reason']}. Its numbers are those of the full model."
    assert sentence in silent.err and sentence in loud.out
    assert "(changed" in loud.out


def test_a_fused_feature_is_changed_by_a_cut_at_the_output(run: Run) -> None:
    reduction = only(run("--plan", "random@out:5", "--token_fusion", "weighted"))["reduction"]
    assert reduction["changed"] is True and reduction["reason"] is None


def test_what_other_processes_saw_counts(tiny_clip: SimpleNamespace) -> None:
    """Here nothing was cut, but in another process it was."""
    model = tiny_clip.make()[0]
    planned = PlannedModel(model, Plan.parse("random@2:5"), 0, nullcontext)
    assert planned.observed == (False, []) and planned.unchanged_reason is not None
    planned.join((False, ["a note"]))
    assert planned.unchanged_reason is not None
    planned.join((True, ["a note", "another"]))
    assert planned.unchanged_reason is None and planned.notes == ["a note", "another"]


def test_a_tower_that_cannot_be_cut_runs_in_full_and_says_why(run: Run, tmp_path: Path) -> None:
    name = small_resnet(tmp_path)
    done = run("--model", name, "--pretrained", "", "--enable_pruning", quiet=False)
    reduction = only(done)["reduction"]
    assert reduction["applied"] is False and reduction["reason"] and reduction["layers"] == []
    assert reduction["reason"] in done.err and "applied)" in done.out
    assert reduction["changed"] is False and f"was not applied: {reduction['reason']}. Its numbers" in done.out
    before = set(done.files)
    strict = run("--model", name, "--pretrained", "", "--enable_pruning", "--strict", "--output", "x.json", expect=2)
    assert reduction["reason"] in strict.err
    assert set(strict.files) == before


def test_an_image_folder_through_clip_benchmark(run: Run, faces: Path) -> None:
    done = run("--dataset", "fer2013", "--dataset_root", faces, "--output", "colours_{dataset}.json")
    assert only(done)["run"]["n_samples"] == 28


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


def test_class_names_of_data_without_classes_are_no_key(run: Run, tmp_path: Path) -> None:
    """--dump_classnames with retrieval, as in clip_benchmark."""
    samples = [{"png": png(picture(i % 6, i)), "txt": f"a {CLASSES[i % 6]} picture {i}".encode()} for i in range(6)]
    folder = write_shards(tmp_path / "texts", samples, kind="retrieval")
    for name in ("classnames", "zeroshot_classification_templates"):
        (folder / f"{name}.txt").unlink()
    done = run("--dataset_root", folder, "--task", "zeroshot_retrieval", "--dump_classnames", "--dump_templates")
    (row,) = [json.loads(Path(name).read_text()) for name in done.files if name.endswith(".json")]
    assert row["task"] == "zeroshot_retrieval" and not {"classnames", "templates"} & set(row)


def test_classifiers_are_saved_and_loaded(run: Run, tmp_path: Path) -> None:
    first = only(run("--save_clf", "{dataset}.pt"))
    assert torch.load("colours.pt", weights_only=True).shape == (16, 6)
    again = only(run("--load_clfs", "colours.pt", "colours.pt"))
    assert again["metrics"] == first["metrics"]
    run("--save_clf", "colours.pt")  # the same content: nothing to keep
    assert not Path("colours.pt.1").exists()
    Path("colours.pt").write_text("mine")
    run("--save_clf", "colours.pt")
    assert Path("colours.pt.1").read_text() == "mine"
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
    """With selection and with pruning; cls is the model's own feature, so its numbers are those without the flag."""
    selection = ["--enable_token_selection", "--token_selection_k", 2, "--token_selection_m", 4]
    for flags in (selection, ["--enable_pruning", "--k_anchors", 2, "--top_m", 4]):
        plain = only(run(*flags))
        stock = only(run(*flags, "--token_fusion", "cls"))
        assert stock["metrics"] == plain["metrics"] and stock["run"]["key"] == plain["run"]["key"]
        found = {}
        temperature = only(run(*flags, "--token_fusion", "weighted", "--token_fusion_temperature", 0.1))
        assert temperature["reduction"]["token_fusion_temperature"] == 0.1
        found[temperature["run"]["key"]] = temperature
        for fusion in (["weighted"], ["weighted", "--token_fusion_weight", 0.3], ["mean"]):
            row = only(run(*flags, "--token_fusion", *fusion))
            assert row["reduction"]["token_fusion"] == fusion[0]
            assert row["reduction"].get("token_fusion_weight") == (
                None if fusion == ["mean"] else fusion[-1] if fusion[1:] else 0.8
            )
            settings = {name: row["reduction"].get(name) for name in ("token_fusion_temperature", "token_fusion_anchors")}
            assert list(settings.values()) == ([None, None] if fusion == ["mean"] else [1.0, "score 1"])
            found[row["run"]["key"]] = row
        assert len(found) == 4 and plain["run"]["key"] not in found


def test_token_fusion_on_a_tower_without_tokens_is_said(run: Run, tmp_path: Path) -> None:
    done = run("--model", small_resnet(tmp_path), "--pretrained", "", "--token_fusion", "mean")
    assert "is not applied" in done.err
    row = only(done)
    assert row["reduction"]["token_fusion"] == "cls" and "ResNet" in row["reduction"]["reason"]


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
