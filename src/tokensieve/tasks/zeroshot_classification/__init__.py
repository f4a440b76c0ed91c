"""Zero-shot classification: the declaration. `task.py` implements it, `classifier.py` makes classifiers of class names."""

from __future__ import annotations

from tokensieve import embedded
from tokensieve.flags import Flag
from tokensieve.tasks.registry import TASKS, TaskSpec

TEXTS = "class names and prompts"
METRICS = ("acc1", "acc5", "mean_per_class_recall", "mean_average_precision")

TASKS.add(
    TaskSpec(
        "zeroshot_classification",
        "the class whose prompts are nearest to the image",
        implementation="tokensieve.tasks.zeroshot_classification.task:ClassificationTask",
        contents="labels",
        dataset=embedded.DATASET,
        metrics=METRICS,
        main_metrics=("acc1", "mean_average_precision"),
        shown_metrics=("acc5",),
        percent=METRICS,
        flags=(
            Flag("save_clf", "save the classifier that the text tower makes", options={"metavar": "FILE"}, group=TEXTS),
            Flag(
                "load_clfs",
                "use the mean of saved classifiers",
                default=[],
                options={"nargs": "+", "metavar": "FILE"},
                group=TEXTS,
                repeats=True,
            ),
        ),
        needs_class_names=True,
        order=10,
    ),
    origin=__name__,
)
