"""Arguments of `tokensieve eval`: what the flags mean, and errors of one line before anything runs."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support import toy_plugin
from tests.support.evaluation import Run, only
from tokensieve import embedded
from tokensieve.cli import main
from tokensieve.cli.parser import parse
from tokensieve.errors import UserError
from tokensieve.evaluation import arguments, results
from tokensieve.models.loading import hub
from tokensieve.models.loading.registry import MODEL_TYPES, ModelType
from tokensieve.plan import Plan
from tokensieve.tasks.registry import TASKS, TaskSpec


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--language", "de"], "'en' only"),
        (["--split", "tset"], "Did you mean 'test'"),
        (["--dataset", "embedded", "--pretrained", "scenes-v2"], "scenes-v1"),
    ],
)
def test_mistakes_about_the_embedded_job(
    untrained: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, flags: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        (["--enable_pruning"], "anchor(k=10,m=50,alpha=0.5)"),
        (["--enable_pruning", "--k_anchors", 2, "--top_m", 4, "--alpha", 0.25], "anchor(k=2,m=4,alpha=0.25)"),
        (["--enable_pruning", "--k_anchors", 2, "--top_m", 4, "--prune_layer", 1], "anchor@1(k=2,m=4,alpha=0.5)"),
        (["--enable_pruning", "--k_anchors", 2, "--top_m", 4, "--prune_layer", -2], "anchor@-2(k=2,m=4,alpha=0.5)"),
        (["--enable_pruning", "--prune_rest", "drop"], "anchor(k=10,m=50,alpha=0.5)"),
        (["--enable_pruning", "--k_anchors", 2, "--top_m", 4, "--prune_rest", "merge"], "anchor(k=2,m=4,alpha=0.5,rest=merge)"),
        (["--enable_pruning", "--k_anchors", 2, "--top_m", 4, "--prune_rest", "fuse"], "anchor(k=2,m=4,alpha=0.5,rest=fuse)"),
        (["--enable_token_selection"], "anchor@out(k=10,m=50,alpha=0.5,rest=zero)"),
        (
            ["--enable_token_selection", "--token_selection_k", 2, "--token_selection_m", 4, "--token_selection_alpha", 1],
            "anchor@out(k=2,m=4,alpha=1.0,rest=zero)",
        ),
    ],
)
def test_the_switches_of_selection_and_pruning_are_plans(run: Run, flags: list, plan: str) -> None:
    assert Plan.parse(only(run(*flags))["reduction"]["plan"]) == Plan.parse(plan)


def test_pruning_cuts_after_half_the_depth_by_default(run: Run) -> None:
    reduction = only(run("--enable_pruning", "--k_anchors", 2, "--top_m", 4))["reduction"]
    assert reduction["layers"] == [{"layer": "2", "tokens_in": 24, "tokens_out": 6}]


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
        (["--plan", "anchr(k=2,m=4)"], "Did you mean 'anchor"),
        (["--plan", "anchor@9(k=2,m=4)"], "9"),
        (["--plan", "anchor(k=0,m=4)"], "k=0"),
        (["--enable_pruning", "--alpha", 2], "alpha"),
        (["--compare", "random:6", "random@@"], "@@"),
        (["--plan", "none", "--enable_pruning"], "exclude each other"),
        (["--enable_token_selection", "--enable_pruning"], "exclude each other"),
        (["--device", "tpu0"], "--device"),
        (["--device", "cuda:77"], "this machine has cpu"),
        (["--task", "zeroshot_retrieval"], "needs captions"),
        (["--task", "captioning", "--dataset", "embedded"], "captions"),
        (["--dataset", "flickr8k"], "--dataset embedded-captions"),
        (["--dataset", "sugar_crepe"], "--dataset embedded-selection"),
        (["--skip_load"], "--skip_load works with --task linear_probe only"),
        (["--train_split", "a", "b"], "--train_split has 2 values for 1 data sets"),
        (["--token_fusion", "wieghted"], "weighted"),
        (["--token_fusion", "weighted", "--token_fusion_temperature", 0], "not a finite number above 0"),
        (["--enable_pruning", "--prune_rest", "zero"], "not one of drop, merge, fuse"),
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
    first, *others = done.err.splitlines()
    assert first.startswith("tokensieve: error: ")
    assert not others or (len(others) == 2 and others[1].strip() == "^")  # a plan that cannot be read is shown, with a caret
    assert done.files == []


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--k_anchors", 5], "--k_anchors: no effect without --enable_pruning"),
        (["--prune_layer", 3, "--alpha", 0.3, "--plan", "none"], "--alpha, --prune_layer: no effect without --enable_pruning"),
        (["--prune_rest", "merge"], "--prune_rest: no effect without --enable_pruning"),
        (["--token_selection_m", 3], "--token_selection_m: no effect without --enable_token_selection"),
        (["--token_fusion_weight", 0.5], "--token_fusion_weight: no effect without --token_fusion weighted"),
        (["--token_fusion_temperature", 2], "--token_fusion_temperature: no effect without --token_fusion weighted"),
    ],
)
def test_settings_without_their_switch_are_a_remark(run: Run, flags: list, says: str) -> None:
    """Scripts toggle the switch alone."""
    done = run(*flags)
    assert done.err.count(f"tokensieve: {says}\n") == 1
    assert only(done)["reduction"]["plan"] == "none"


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


def test_every_flag_of_clip_benchmark_is_ours_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    from clip_benchmark import cli as theirs

    from tokensieve.cli.parser import parse

    monkeypatch.setattr(sys, "argv", ["clip_benchmark", "eval"])
    expected = vars(theirs.get_parser_args()[1])
    expected.pop("which")
    ours = vars(parse(["eval"]))
    assert ours["quiet"] is not expected.pop("verbose")  # theirs is set by --quiet too
    embedded = {"dataset", "model", "pretrained", "pretrained_model", "output", "amp"}  # decided by evaluate
    for name, value in expected.items():
        assert name in ours, name
        if name not in embedded:
            same = ours[name] == value or ours[name] == [value]
            assert same, (name, ours[name], value)
    assert expected["output"] == results.DEFAULT_OUTPUT


@pytest.mark.parametrize(
    ("flags", "dataset", "model_type"),
    [
        ([], None, "open_clip"),
        (["--task", "linear_probe"], ["embedded"], "open_clip"),
        (["--task", "zeroshot_retrieval"], ["embedded-captions"], "open_clip"),
        (["--task", "zeroshot_retrieval", "--model", "ViT-B-32"], ["embedded-captions"], "open_clip"),
        (["--task", "captioning", "--model", "coca_ViT-B-32"], ["embedded-captions"], "open_clip"),
        (["--task", "linear_probe", "--model", "ViT-B-32"], ["cifar10"], "open_clip"),
        (["--model_type", "hf", "--model", "openai/clip-vit-base-patch16"], ["cifar10"], "hf"),
        (["--model_type", "vlm", "--model", "llava-hf/llava-1.5-7b-hf"], ["embedded-questions"], "vlm"),
        (["--model_type", "reid", "--model", "runs/reid"], ["embedded-reid"], "reid"),
        (["--task", "vqa"], ["embedded-questions"], "vlm"),
        (["--model_type", "vlm"], ["embedded-questions"], "vlm"),
        (["--model", embedded.LLAVA], ["embedded-questions"], "vlm"),
        (["--model", embedded.REID], ["embedded-reid"], "reid"),
        (["--dataset", "RGBNT201"], ["RGBNT201"], "reid"),
        (["--model_type", "timm", "--dataset", "cifar10"], ["cifar10"], "timm"),
    ],
)
def test_task_model_and_data_decide_each_other(flags: list[str], dataset: list[str] | None, model_type: str) -> None:
    resolved = arguments.resolve_task_and_model_type(parse(["eval", *flags]))
    assert (resolved.dataset, resolved.model_type) == (dataset, model_type)


def test_a_task_of_a_plugin_with_models_of_its_own_is_validated_the_same_way() -> None:
    spec = TaskSpec(
        "depth",
        "depth of every pixel",
        implementation="somewhere:DepthTask",
        contents="depths",
        dataset="embedded",
        metrics=("rmse",),
        main_metrics=("rmse",),
        model_type="depth_model",
        model_description="a depth model predicts depths",
    )
    model_type = ModelType("depth_model", "depth models", check="x:y", load="x:y", is_model_name="builtins:callable")
    with toy_plugin.loaded_plugins_are_forgotten():
        TASKS.add(spec)
        MODEL_TYPES.add(model_type)
        for flags, message in (
            (["--task", "depth"], "embedded has labels, but the task depth needs depths"),
            (["--task", "depth", "--dataset", "wds/x"], "wds/x has labels or captions, but the task depth needs depths"),
            (["--model_type", "depth_model", "--dataset", "cifar10"], "a depth model predicts depths: give --dataset embedded"),
        ):
            with pytest.raises(UserError, match=message):
                arguments.resolve_task_and_model_type(parse(["eval", *flags]))
