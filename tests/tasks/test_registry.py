"""Declarations of tasks: complete, free of torch, and in agreement with what implements them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import toy_plugin
from tokensieve import tasks
from tokensieve.data.registry import contents_of
from tokensieve.errors import UserError
from tokensieve.evaluation import csv_table
from tokensieve.evaluation.flags import eval_flags, repeated_flags
from tokensieve.flags import Flag
from tokensieve.models.loading.registry import MODEL_TYPES
from tokensieve.registry import resolve
from tokensieve.tasks.base import Task
from tokensieve.tasks.registry import TASKS, TaskSpec, all_tasks, is_percent, task_flags

NAMES = [task.name for task in all_tasks()]


def test_every_folder_is_a_task() -> None:
    folders = {path.parent.name for path in Path(tasks.__file__).parent.glob("*/__init__.py")}
    assert folders == set(NAMES) - {"reid"}


@pytest.mark.parametrize("name", NAMES)
def test_a_declaration_agrees_with_its_implementation(name: str) -> None:
    spec = TASKS[name]
    implementation = resolve(spec.implementation)
    assert issubclass(implementation, Task) and implementation.name == name
    assert contents_of(spec.dataset) == (spec.contents if spec.contents != "images" else "labels")  # labels are left aside
    assert spec.summary and spec.main_metrics and spec.metrics
    assert spec.model_type is None or (spec.model_type in MODEL_TYPES and spec.model_description)
    assert spec.main_metric(spec.metrics) is not None
    if spec.default_plans:
        assert callable(resolve(spec.default_plans))


def test_the_csv_has_clip_benchmarks_metrics_first_and_in_its_order() -> None:
    expected = (
        "acc1 acc5 mean_per_class_recall mean_average_precision image_retrieval_recall@1 text_retrieval_recall@1 "
        "image_retrieval_recall@5 text_retrieval_recall@5 image_retrieval_recall@10 text_retrieval_recall@10 "
        "image_acc text_acc acc lp_acc1 lp_acc5 lp_mean_per_class_recall weight_decay epochs seed fewshot_k normalized "
        "vqa_score exact_match mAP rank_1 rank_5 rank_10 cmc Bleu_1 Bleu_2 Bleu_3 Bleu_4 METEOR ROUGE_L CIDEr SPICE"
    )
    rows = [dict.fromkeys(["zebra", *reversed(expected.split()), "plan", "acc1_stderr", "dataset"])]
    wanted = ["dataset", *expected.replace("acc1 ", "acc1 acc1_stderr ", 1).split(), "plan", "zebra"]
    assert csv_table.columns(rows) == wanted


def test_main_metrics_and_shares() -> None:
    retrieval = TASKS["zeroshot_retrieval"]
    found = ["text_retrieval_recall@5", "image_retrieval_recall@1_stderr", "image_retrieval_recall@1"]
    assert retrieval.main_metric(found) == "image_retrieval_recall@1"
    assert retrieval.main_metric(["acc1"]) is None
    for metric in ("acc1", "lp_acc5", "text_retrieval_recall@7", "vqa_score_yes_no", "mAP_RGB+NI", "rank_1_plain"):
        assert is_percent(metric, None), metric
    assert not any(is_percent(metric, None) for metric in ("CIDEr", "weight_decay", "epochs"))
    assert is_percent("acc1", "a task of another version") and not is_percent("acc1", "vqa")


def test_flags_that_repeat_a_result() -> None:
    assert {flag.dest for flag in repeated_flags()} == {
        *("dataset_root", "weights", "custom_classname_file", "custom_template_file", "load_clfs", "annotation_file"),
        *("questions", "annotations", "images", "classnames", "max_broken", "plugin"),
    }
    _, users = task_flags()["annotation_file"]
    assert [task.name for task in users] == ["zeroshot_retrieval", "image_caption_selection", "captioning"]
    assert [flag.name for flag in eval_flags()["files"]][-1] == "annotation_file"


def test_two_tasks_cannot_declare_one_flag_differently() -> None:
    spec = TASKS["vqa"]
    with toy_plugin.loaded_plugins_are_forgotten():
        TASKS.add(TaskSpec("other", "", spec.implementation, "labels", "embedded", (), (), flags=(Flag("blind", "else"),)))
        with pytest.raises(UserError, match="vqa and other declare different flags --blind"):
            task_flags()


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        (Flag("k", ""), 3, ["--k", "3"]),
        (Flag("k", "", [5]), 5, []),
        (Flag("k", "", [5]), [1, 5], ["--k", "1", "5"]),
        (Flag("k", ""), None, []),
        (Flag("on", "", False, {"action": "store_true"}), True, ["--on"]),
        (Flag("on", "", False, {"action": "store_true"}), False, []),
        (Flag("no_amp", "", None, {"action": "store_false", "dest": "amp"}), False, ["--no_amp"]),
        (Flag("plugin", "", None, {"action": "append"}), ["a", "b"], ["--plugin", "a", "--plugin", "b"]),
    ],
)
def test_words_of_a_flag(flag: Flag, value: object, words: list[str]) -> None:
    assert flag.words(value) == words
