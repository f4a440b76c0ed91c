"""Declarations of tasks. Each task declares itself in the `__init__.py` of its package; this module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from tokensieve.flags import Flag
from tokensieve.registry import Registry


@dataclass(frozen=True)
class TaskSpec:
    """What the command line, validation, results, CSV, report and docs have to know of a task."""

    name: str
    summary: str  # one line, for help and docs
    implementation: str  # "module:Class", a subclass of tasks.base.Task
    contents: str  # what its samples hold: "labels", "captions", "questions", "objects"; data sets declare the same word
    dataset: str  # the embedded data set that it runs on by default
    metrics: tuple[str, ...]  # columns of the CSV, in order
    main_metrics: tuple[str, ...]  # the headline: the first that a result has; one that ends in @ is a prefix
    percent: tuple[str, ...] = ()  # metrics that are shares, shown in percent; one that ends in @ is a prefix
    flags: tuple[Flag, ...] = ()  # several tasks may declare the same Flag
    flags_title: str = ""  # heading of the flags in the help; default: the name
    model_type: str | None = None  # the only type of model that it can use; None: any model that encodes images
    model_description: str = ""  # of such models, for messages: "a vision-language model answers questions"
    default_plans: str | None = None  # "module:function", (model) -> (plans, notes): what is compared where no plan is given


TASKS: Registry[TaskSpec] = Registry("task")
