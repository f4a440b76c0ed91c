"""Declarations of tasks. Each task declares itself in the `__init__.py` of its package; this module imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tokensieve.errors import UserError
from tokensieve.flags import Flag
from tokensieve.registry import Registry


@dataclass(frozen=True)
class TaskSpec:
    """What the command line, validation, results, CSV, report and docs have to know of a task.

    Names of metrics may be patterns: "recall@*" stands for every recall@k.
    """

    name: str
    summary: str  # one line, for help and docs
    implementation: str  # "module:Class", a subclass of tasks.base.Task
    contents: str  # what its samples hold: "labels", "captions", "questions", "objects"; data sets declare the same word
    dataset: str  # the embedded data set that it runs on by default
    metrics: tuple[str, ...]  # columns of the CSV, in order
    main_metrics: tuple[str, ...]  # the headline: the first of these that a result has
    shown_metrics: tuple[str, ...] = ()  # that the table of `eval` shows beside the headline
    percent: tuple[str, ...] = ()  # metrics that are shares, shown in percent
    flags: tuple[Flag, ...] = ()  # several tasks may declare the same Flag
    flags_title: str = ""  # heading of the flags in the help; default: the name
    model_type: str | None = None  # the only type of model that it can use; None: any model that encodes images
    model_description: str = ""  # of such models, for messages: "a vision-language model answers questions"
    needs_class_names: bool = False  # its data must have class names and prompts; --custom_classname_file replaces them
    own_precision: bool = False  # runs in the precision of the model's weights; autocast only with --amp
    runs_without_model: bool = False  # with --skip_load, from what an earlier run stored
    default_plans: str | None = None  # "module:function", (model) -> (plans, notes): what is compared where no plan is given
    show_input: str = "IMAGE"  # what `tokensieve show` draws of its data; may hold {dataset}
    order: int = 1000  # place among the tasks in lists, in the help and in the CSV

    def main_metric(self, metrics: Iterable[str]) -> str | None:
        """The headline among these metrics; None if they have none of this task."""
        return next(iter(_matching(self.main_metrics, metrics)), None)

    def more_metrics(self, metrics: Iterable[str]) -> list[str]:
        """Those of these metrics that the table of `eval` shows beside the headline."""
        return _matching(self.shown_metrics, metrics)


def _matching(patterns: Iterable[str], metrics: Iterable[str]) -> list[str]:
    """The metrics that match, each once, in the order of the patterns."""
    names = [name for name in metrics if not name.endswith("_stderr")]
    return list(dict.fromkeys(name for pattern in patterns for name in names if fnmatchcase(name, pattern)))


TASKS: Registry[TaskSpec] = Registry("task")


def all_tasks() -> list[TaskSpec]:
    """The tasks in the order of lists, help and CSV."""
    return sorted(TASKS.values(), key=lambda task: task.order)


def task_flags() -> dict[str, tuple[Flag, list[TaskSpec]]]:
    """The flags of all tasks by name, each with the tasks that declare it."""
    found: dict[str, tuple[Flag, list[TaskSpec]]] = {}
    for task in all_tasks():
        for flag in task.flags:
            known, users = found.setdefault(flag.name, (flag, []))
            if known != flag:
                raise UserError(f"the tasks {users[0].name} and {task.name} declare different flags --{flag.name}")
            users.append(task)
    return found


def is_percent(metric: str, task: str | None) -> bool:
    """Whether a metric is a share: as its task declares it, or, if the task is not known, any task."""
    tasks: Iterable[TaskSpec] = [TASKS[task]] if task is not None and task in TASKS else TASKS.values()
    return any(fnmatchcase(metric, pattern) for spec in tasks for pattern in spec.percent)
