"""The flags of `tokensieve eval` as data: those that all tasks share, by their heading in the help, and those of the tasks.

The parser, the result's `run.arguments`, the report's sections and its commands read these declarations. `eval` takes every
flag of `clip_benchmark eval` (1.6.2) under the same name. This module imports no torch.
"""

from __future__ import annotations

import argparse
import warnings
from typing import NoReturn

from tokensieve import plugins
from tokensieve.data.registry import DATASETS, OF_IMAGES, OWN
from tokensieve.errors import UserError, one_line
from tokensieve.flags import COMMAND, COMMON, PLUGIN, Flag, fraction, integer_in, one_of, positive
from tokensieve.models.loading.registry import BENCHMARK_PRETRAINED, MODEL_TYPES
from tokensieve.tasks.registry import TASKS, TaskSpec, all_tasks, task_flags

AUTO = "auto"  # --task: that of the data set
DEFAULT_MODEL_TYPE = "open_clip"
BENCHMARK_DATASET, BENCHMARK_MODEL = "cifar10", "ViT-B-32-quickgelu"  # clip_benchmark's defaults
FUSIONS = ("cls", "weighted", "mean")
PRUNE_RESTS = ("drop", "merge", "fuse")
DEFAULTS_RULE = (
    f"As soon as one of --dataset, --model and --pretrained is given, the others default to {BENCHMARK_DATASET}, "
    f"{BENCHMARK_MODEL} and {BENCHMARK_PRETRAINED} as in clip_benchmark; only embedded data goes with its embedded model, and "
    "an embedded model with its embedded data."
)

WHAT = "what to evaluate"
REDUCTION = "token reduction (at most one of --plan, --enable_pruning, --enable_token_selection)"
HOW = "how to run"
TEXTS = "class names and prompts"
FILES = "files"
ON = {"action": "store_true"}  # options of a switch

WEIGHTS = Flag(
    "weights",
    "trained weights of methods in the plan, such as learned: files, folders of runs or checkpoints, ids on the Hub",
    options={"nargs": "+", "metavar": "FILE"},
    group=REDUCTION,
    repeats=True,
)


def model_type_flag() -> Flag:
    """--model_type, with what --model and --pretrained mean for each."""
    meanings = ", ".join(f"{kind.name} ({kind.summary})" for kind in MODEL_TYPES.values())
    return Flag(
        "model_type",
        f"the library that the model comes from (default: {DEFAULT_MODEL_TYPE}), and what --model and --pretrained mean: "
        f"{meanings}",
        default=DEFAULT_MODEL_TYPE,
        options={"type": one_of(*MODEL_TYPES), "metavar": "{" + ",".join(MODEL_TYPES) + "}"},
        group=WHAT,
        separates_results=True,
    )


def eval_flags() -> dict[str, list[Flag]]:
    """All flags of `eval` by their heading in the help.

    A task whose flags cannot be added is a UserError. If it is of an installed package, it is removed with a warning, because
    the package is loaded by every command.
    """
    groups: dict[str, list[Flag]] = {}
    shared = _shared_flags()
    if _check_task_flags(shared):
        shared = _shared_flags()  # they list the tasks
    for flag in shared:
        groups.setdefault(flag.group, []).append(flag)
    for flag, users in task_flags().values():
        groups.setdefault(flag.group or users[0].flags_title or users[0].name, []).append(flag)
    return groups


class _Trial(argparse.ArgumentParser):
    """A parser to try a flag with."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _check_task_flags(shared: list[Flag]) -> bool:
    """Whether tasks of installed packages were removed because of their flags."""
    is_removed = False
    reserved = {"help", COMMAND}
    for flag in (*COMMON, *shared):
        reserved |= {flag.name, *flag.aliases, flag.dest}
    declared: dict[str, tuple[Flag, str]] = {}  # by each of its names, with the task that came first
    for task in list(TASKS.values()):  # in the order of declarations, so that a plug-in cannot take a name of ours
        origin = TASKS.origin(task.name)
        problem = _flag_problem(task, reserved, declared, is_tried=not plugins.is_built_in(origin))
        if problem is None:
            declared |= {name: (flag, task.name) for flag in task.flags for name in (flag.name, *flag.aliases)}
            continue
        message = f"the task {task.name} of {plugins.describe_origin(origin)} {problem}"
        if not plugins.is_installed(origin):
            raise UserError(message)
        TASKS.remove(task.name)
        is_removed = True
        warnings.warn(f"{message}; the task is left out", stacklevel=3)
    return is_removed


def _flag_problem(task: TaskSpec, reserved: set[str], declared: dict[str, tuple[Flag, str]], is_tried: bool) -> str | None:
    """What is wrong with the flags of a task; None if nothing is."""
    declared = dict(declared)
    for flag in task.flags:
        for name in (flag.name, *flag.aliases):
            known, user = declared.setdefault(name, (flag, task.name))
            if name in reserved:
                return f"declares --{name}, which is a flag of all tasks; use another name"
            if known != flag:
                return f"declares --{name}, which is another flag of the task {user}; use another name"
        if flag.dest in reserved:
            return f"declares --{flag.name} with dest={flag.dest!r}, which holds the value of another flag; use another name"
        try:
            if is_tried:
                trial = _Trial()
                flag.add_to(trial)
                trial.parse_args([])  # must work without the flag, for the other tasks
        except Exception as error:
            return f"declares --{flag.name}, which cannot be added: {one_line(error, 200)}"
    return None


def repeated_flags() -> list[Flag]:
    """The flags that are not part of a result's key, but are needed to make the result again."""
    return [flag for flags in eval_flags().values() for flag in flags if flag.repeats] + [PLUGIN]


def _shared_flags() -> list[Flag]:
    return [*_what(), *_reduction(), *_how(), *_texts(), *_files()]


def _what() -> list[Flag]:
    tasks = [*(task.name for task in all_tasks()), AUTO]
    by_dataset: dict[str, list[str]] = {}
    for task in all_tasks():
        by_dataset.setdefault(task.dataset, []).append(task.name)
    usual, *others = by_dataset.items()
    datasets = "; ".join([usual[0], *(f"for {' and '.join(users)} {name}" for name, users in others)])
    by_contents: dict[str, list[str]] = {}
    for spec in DATASETS.values():
        if spec.contents not in OF_IMAGES and spec.group != OWN:
            by_contents.setdefault(spec.contents, []).append(spec.usage)
    others_by_contents = [f"with {contents}: {', '.join(names)}" for contents, names in by_contents.items()]
    first, *rest = [(kind.name, kind.default_model) for kind in MODEL_TYPES.values() if kind.default_model]
    models = "; ".join([str(first[1]), *(f"of {kind} {model}" for kind, model in rest)])
    return [
        Flag(
            "dataset",
            "data sets: names, collections (vtab, vtab+, imagenet_robustness, retrieval), or text files with one name a "
            f"line; your own images as folder:DIR (a folder for each class), csv:FILE (image and label, caption, or question "
            f"and answer) or images:DIR (no labels), see docs/own-data.md; wds/NAME reads webdataset shards under "
            f"--dataset_root; {'; '.join(others_by_contents)} "
            f"(default, where nothing else is named: {datasets})",
            options={"nargs": "+", "metavar": "NAME"},
            group=WHAT,
        ),
        Flag(
            "images",
            "without --dataset: image files and folders; the nearest of --classnames are printed for each of them under each "
            "plan. Of questions: the folder of the images (default: the usual one in --dataset_root, or beside the questions)",
            options={"nargs": "+", "metavar": "PATH"},
            group=WHAT,
            repeats=True,
        ),
        Flag(
            "dataset_root",
            "folder of the data; may hold {dataset} and {dataset_cleaned}",
            default="root",
            options={"metavar": "DIR"},
            group=WHAT,
            repeats=True,
        ),
        Flag(
            "split",
            "split to evaluate on (default: test)",
            default="test",
            aliases=("test_split",),
            group=WHAT,
            separates_results=True,
        ),
        Flag(
            "model",
            f"models: names, folders or Hub ids, see --model_type (default, where nothing else is named: {models})",
            options={"nargs": "+", "metavar": "NAME"},
            group=WHAT,
        ),
        Flag(
            "pretrained",
            "weights for --model, see --model_type; every model is run with every one (default: as stated above)",
            options={"nargs": "+", "metavar": "TAG"},
            group=WHAT,
        ),
        Flag(
            "pretrained_model",
            "instead of --model and --pretrained: pairs, collections (openai, openclip_base, openclip_multilingual, "
            "openclip_all), or text files with one pair a line",
            options={"nargs": "+", "metavar": "MODEL,TAG"},
            group=WHAT,
        ),
        model_type_flag(),
        Flag(
            "task",
            f"one of {', '.join(tasks)}; auto takes the data set's own (default)",
            default=AUTO,
            options={"type": one_of(*tasks), "metavar": "TASK"},
            group=WHAT,
        ),
        Flag(
            "language",
            "languages of class names and prompts (default: en)",
            default=["en"],
            options={"nargs": "+"},
            group=WHAT,
        ),
        Flag(
            "limit",
            "only the first N samples",
            options={"type": integer_in(1), "metavar": "N"},
            group=WHAT,
            separates_results=True,
        ),
    ]


def _reduction() -> list[Flag]:
    def flag(name: str, help: str, default: object = None, **options: object) -> Flag:
        return Flag(name, help, default, options, group=REDUCTION)

    return [
        flag("plan", "for example 'anchor@6(k=10,m=50,alpha=0.5)', 'random:60', 'none'", metavar="PLAN"),
        flag("compare", "more plans for the same run", [], nargs="+", metavar="PLAN"),
        flag("enable_pruning", "cut tokens inside the tower: CLS, k anchors, m more go on", False, **ON),
        flag("k_anchors", "with --enable_pruning: anchors (default: 10)", type=int, metavar="K"),
        flag("top_m", "with --enable_pruning: tokens besides the anchors (default: 50)", type=int, metavar="M"),
        flag("alpha", "with --enable_pruning: importance against diversity (default: 0.5)", type=float),
        flag("prune_layer", "with --enable_pruning: cut after L blocks (default: half of them)", type=int, metavar="L"),
        flag(
            "prune_rest",
            "with --enable_pruning: the tokens that do not go on are dropped (default), each merged into the most similar kept "
            "token, or fused into one extra token",
            type=one_of(*PRUNE_RESTS),
            metavar="{" + ",".join(PRUNE_RESTS) + "}",
        ),
        flag("enable_token_selection", "zero the output tokens that are not selected", False, **ON),
        flag("token_selection_k", "with it: anchors (default: 10)", type=int, metavar="K"),
        flag("token_selection_m", "with it: tokens besides the anchors (default: 50)", type=int, metavar="M"),
        flag("token_selection_alpha", "with it: default 0.5", type=float, metavar="ALPHA"),
        flag(
            "token_fusion",
            "the image feature: the model's own (default), mixed with the selected patches, or their mean (a control)",
            "cls",
            type=one_of(*FUSIONS),
            metavar="{" + ",".join(FUSIONS) + "}",
        ),
        flag(
            "token_fusion_weight",
            "with --token_fusion weighted: share of the model's own feature (default: 0.8)",
            type=fraction,
            metavar="W",
        ),
        flag(
            "token_fusion_temperature",
            "with --token_fusion weighted: patches are weighted by softmax(score / T), anchors have the score 1 (default: 1)",
            type=positive,
            metavar="T",
        ),
        WEIGHTS,
        flag("strict", "a tower that cannot be cut is an error, not a warning", False, **ON),
    ]


def _how() -> list[Flag]:
    stored = " or ".join(task.name for task in all_tasks() if task.runs_without_model)
    return [
        Flag("batch_size", "default: 64", 64, {"type": integer_in(1), "metavar": "N"}, group=HOW),
        Flag("num_workers", "processes that read data (default: 4)", 4, {"type": integer_in(0), "metavar": "N"}, group=HOW),
        Flag("device", "cpu, cuda, cuda:1, mps (default: the best there is)", group=HOW),
        Flag("amp", "mixed precision (default on CUDA, off elsewhere)", None, ON, group=HOW),
        Flag("no_amp", "full precision everywhere", None, {"action": "store_false", "dest": "amp"}, group=HOW),
        Flag("seed", "default: 0", 0, {"type": integer_in(0, 2**32 - 1)}, group=HOW, separates_results=True),
        Flag(
            "distributed",
            "share the data among the processes that SLURM or MPI started (torchrun and srun are noticed without it)",
            False,
            ON,
            group=HOW,
        ),
        Flag(
            "timeout",
            "with several processes: how long one may wait for another's part of the data (default: 1800)",
            1800,
            {"type": integer_in(1), "metavar": "SECONDS"},
            group=HOW,
        ),
        Flag(
            "max_broken",
            "share of images that may be unreadable (default: 0.01)",
            0.01,
            {"type": fraction},
            group=HOW,
            repeats=True,
        ),
        Flag("skip_load", f"with {stored}: use the features of an earlier run and load no model", False, ON, group=HOW),
    ]


def _texts() -> list[Flag]:
    return [
        Flag(
            "classnames",
            "the class names; of your own data they are matched by the names of its folders or labels, or name them in order",
            [],
            {"nargs": "+", "metavar": "NAME"},
            group=TEXTS,
            repeats=True,
        ),
        Flag("custom_classname_file", "class names by data set", None, {"metavar": "JSON"}, group=TEXTS, repeats=True),
        Flag(
            "custom_template_file",
            "prompts by data set, e.g. cupl_prompts.json",
            None,
            {"metavar": "JSON"},
            group=TEXTS,
            repeats=True,
        ),
        Flag("dump_classnames", "put the class names into the result", False, ON, group=TEXTS),
        Flag("dump_templates", "put the prompts into the result", False, ON, group=TEXTS),
    ]


def _files() -> list[Flag]:
    return [
        Flag(
            "output",
            "result file; may hold {dataset} {pretrained} {pretrained_full_path} {model} {language} {task} {plan} "
            "(default: {dataset}_{pretrained}_{model}_{language}_{task}.json); if it is taken, the key of the run is added",
            None,
            {"metavar": "TEMPLATE"},
            group=FILES,
        ),
        Flag(
            "run_folder",
            "folder for all of the run: the results under their usual names, arguments.yaml, and log.txt",
            None,
            {"metavar": "DIR"},
            group=FILES,
        ),
        Flag(
            "save_predictions",
            "also write what the model says of every sample, as JSON lines beside the result: NAME.predictions.jsonl",
            False,
            ON,
            group=FILES,
        ),
        Flag("skip_existing", "skip a run whose result is there, made by the same settings", False, ON, group=FILES),
        Flag("model_cache_dir", "where downloaded weights are kept", None, {"metavar": "DIR"}, group=FILES),
        Flag("wds_cache_dir", "where downloaded webdataset shards are kept", None, {"metavar": "DIR"}, group=FILES),
    ]
