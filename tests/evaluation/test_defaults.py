"""Data set, model and weights where they are not given: clip_benchmark's, or the embedded ones."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokensieve import embedded
from tokensieve.cli.parser import parse
from tokensieve.data.registry import dataset_names
from tokensieve.errors import UserError
from tokensieve.evaluation import run
from tokensieve.evaluation.arguments import resolve_task_and_model_type
from tokensieve.evaluation.jobs import Job
from tokensieve.models import loading

THEIRS = ("ViT-B-32-quickgelu", "laion400m_e32")
OURS = (embedded.MODEL, embedded.PRETRAINED)
EIGHT = [
    *("none", "cover@2:56", "cover:32", "resize(size=80)"),
    *("anchor(k=10,m=50,alpha=0.5)", "anchor:60(rest=merge)", "random:60", "grid:60"),
]


def resolved(*flags: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The data sets of a run, and its models with their weights."""
    args = resolve_task_and_model_type(parse(["eval", *flags]))
    return dataset_names(args.dataset), loading.model_pairs(args.model, args.pretrained, args.pretrained_model, args.model_type)


@pytest.mark.parametrize(
    ("flags", "datasets", "models"),
    [
        # nothing is named
        ("", "embedded", [OURS]),
        ("--plan anchor:60", "embedded", [OURS]),
        ("--enable_pruning", "embedded", [OURS]),
        ("--task linear_probe", "embedded", [OURS]),
        ("--task zeroshot_retrieval", "embedded-captions", [OURS]),
        ("--dataset embedded-clips", "embedded-clips", [(embedded.LLAVA_VIDEO, "")]),
        ("--dataset embedded-clips --task vqa --model some/model", "embedded-clips", [("some/model", "")]),
        # one of the three
        ("--dataset cifar10", "cifar10", [THEIRS]),
        ("--dataset wds/imagenet1k", "wds/imagenet1k", [THEIRS]),
        ("--dataset flickr8k", "flickr8k", [THEIRS]),
        ("--model ViT-B-32", "cifar10", [("ViT-B-32", "laion400m_e32")]),
        ("--pretrained openai", "cifar10", [("ViT-B-32-quickgelu", "openai")]),
        ("--pretrained weights.pt", "cifar10", [("ViT-B-32-quickgelu", "weights.pt")]),
        # two of them
        ("--dataset imagenet1k --model ViT-B-16", "imagenet1k", [("ViT-B-16", "laion400m_e32")]),
        ("--dataset imagenet1k --pretrained openai", "imagenet1k", [("ViT-B-32-quickgelu", "openai")]),
        ("--model ViT-B-32 --pretrained openai", "cifar10", [("ViT-B-32", "openai")]),
        # clip_benchmark's other names
        ("--pretrained_model ViT-B-32,openai", "cifar10", [("ViT-B-32", "openai")]),
        ("--dataset mnist --pretrained_model ViT-B-32,openai", "mnist", [("ViT-B-32", "openai")]),
        ("--model hf-hub:some/where", "cifar10", [("hf-hub:some/where", "")]),
        ("--model_type hf --model openai/clip-vit-base-patch16", "cifar10", [("openai/clip-vit-base-patch16", "")]),
        ("--model_type timm --model vit_base --task linear_probe", "cifar10", [("vit_base", "")]),
        ("--model_type ja_clip --dataset cifar10", "cifar10", [("japanese-clip", "")]),
        # embedded data goes with its embedded model
        ("--dataset embedded", "embedded", [OURS]),
        ("--dataset embedded embedded-heldout", "embedded embedded-heldout", [OURS]),
        ("--dataset embedded-captions", "embedded-captions", [OURS]),
        ("--dataset embedded --model ViT-B-32", "embedded", [("ViT-B-32", "laion400m_e32")]),
        ("--dataset embedded cifar10", "embedded cifar10", [THEIRS]),
        # and an embedded model with its embedded data
        ("--model sieve-vit-8", "embedded", [OURS]),
        ("--model sieve-coca-8", "embedded", [("sieve-coca-8", "captions-v1")]),
        ("--pretrained scenes-v1", "embedded", [OURS]),
        ("--pretrained captions-v1", "embedded", [("sieve-coca-8", "captions-v1")]),
        ("--pretrained_model sieve-vit-8,scenes-v1", "embedded", [OURS]),
        ("--model sieve-vit-8 --task zeroshot_retrieval", "embedded-captions", [OURS]),
        ("--model sieve-vit-8 --dataset cifar10", "cifar10", [OURS]),
        ("--pretrained scenes-v1 --dataset cifar10", "cifar10", [OURS]),
        ("--model sieve-vit-8 ViT-B-32", "cifar10", [OURS, ("ViT-B-32", "laion400m_e32")]),
        # tasks with models of their own keep their rule
        ("--task vqa", "embedded-questions", [(embedded.LLAVA, "")]),
        ("--dataset vqav2", "vqav2", [(embedded.LLAVA, "")]),
        ("--task reid", "embedded-reid", [(embedded.REID, "")]),
        ("--dataset RGBNT201", "RGBNT201", [(embedded.REID, "")]),
    ],
)
def test_data_model_and_weights_where_they_are_not_given(flags: str, datasets: str, models: list[tuple[str, str]]) -> None:
    assert resolved(*flags.split()) == (datasets.split(), models)


def test_a_named_model_type_still_needs_its_model() -> None:
    with pytest.raises(UserError, match="--model_type hf needs --model"):
        resolved("--model_type", "hf", "--dataset", "cifar10")


def test_the_defaults_are_those_of_clip_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    from clip_benchmark import cli as theirs

    monkeypatch.setattr(sys, "argv", ["clip_benchmark", "eval"])
    args = theirs.get_parser_args()[1]
    assert resolved("--dataset", args.dataset) == ([args.dataset], [(args.model[0], args.pretrained[0])])
    assert resolved("--model", *args.model) == ([args.dataset], [(args.model[0], args.pretrained[0])])


def test_the_rule_is_in_the_help(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse(["eval", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "As soon as one of --dataset, --model and --pretrained is given, the others default to cifar10, ViT-B-32-quickgelu and "
        "laion400m_e32 as in clip_benchmark; only embedded data goes with its embedded model, and an embedded model with its "
        "embedded data."
    ) in text


def test_python_m_tokensieve_cli_is_the_command(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tokensieve.cli", *words], capture_output=True, text=True, cwd=tmp_path, env={**os.environ}
        )

    done = run("--version")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("tokensieve ")
    done = run("eval", "--dataset", "cifar1")
    assert done.returncode == 2 and "Did you mean 'cifar10'" in done.stderr


@pytest.mark.slow
def test_python_m_tokensieve_cli_eval_writes_the_result(tmp_path: Path) -> None:
    flags = ["--plan", "none", "--limit", "2", "--batch_size", "2", "--num_workers", "0", "--output", "made.json"]
    command = [sys.executable, "-m", "tokensieve.cli", "eval", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "sieve-vit-8" in done.stdout and (tmp_path / "made.json").is_file(), done.stderr


@pytest.mark.parametrize(
    ("flags", "plans", "limit"),
    [
        ("", EIGHT, 2000),
        ("--limit 50", EIGHT, 50),
        ("--split val --quiet", EIGHT, 2000),
        ("--plan cover:32", ["cover:32"], None),
        ("--enable_pruning", ["anchor(k=10,m=50,alpha=0.5)"], None),
        ("--dataset embedded", ["none"], None),
    ],
)
def test_the_bare_command_compares_eight_plans(
    flags: str, plans: list[str], limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the first 2,000 images; with a plan or data of the user's, it is that alone."""
    ran: list[tuple[list[str], int | None]] = []

    def record(job: Job, loaded: object, args: argparse.Namespace, *rest: object) -> list[Path]:
        ran.append(([str(plan) for plan in job.plans], args.limit))
        return []

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "run_job", record)
    monkeypatch.setattr(run.ModelCache, "get", lambda self, model, pretrained: SimpleNamespace(model=None, tokenizer=None))
    run.run(parse(["eval", *flags.split()]))
    assert ran == [(plans, limit)]


def test_data_sets_that_go_with_different_models_are_told() -> None:
    with pytest.raises(
        UserError, match=r"different models: embedded-clips \(sieve-llava-video-8\), embedded-questions \(the def"
    ):
        resolved("--dataset", "embedded-clips", "embedded-questions")
    assert resolved("--dataset", "embedded-clips", "embedded-questions", "--model", "some/model")[1] == [("some/model", "")]
