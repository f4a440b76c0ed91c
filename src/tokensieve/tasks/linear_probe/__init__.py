"""Linear probe: the declaration. `task.py` implements it, `probe.py` trains the layer, `feature_store.py` keeps features."""

from __future__ import annotations

from tokensieve import embedded
from tokensieve.flags import Flag, boolean, fraction, integer_in
from tokensieve.tasks.registry import TASKS, TaskSpec

TASKS.add(
    TaskSpec(
        "linear_probe",
        "a linear layer trained on the frozen features",
        implementation="tokensieve.tasks.linear_probe.task:LinearProbeTask",
        contents="labels",
        dataset=embedded.DATASET,
        metrics=(
            *("lp_acc1", "lp_acc5", "lp_mean_per_class_recall"),
            *("weight_decay", "epochs", "seed", "fewshot_k", "normalized"),
        ),
        main_metrics=("lp_acc1",),
        shown_metrics=("lp_acc5",),
        percent=("lp_acc1", "lp_acc5", "lp_mean_per_class_recall"),
        flags=(
            Flag(
                "train_split",
                "training split of each data set (default: train)",
                default=["train"],
                options={"nargs": "+"},
                separates_results=True,
                per_dataset=True,
            ),
            Flag(
                "val_split",
                "validation split of each data set, to choose the weight decay",
                options={"nargs": "+"},
                separates_results=True,
                per_dataset=True,
                excludes="held out",
            ),
            Flag(
                "val_proportion",
                "share of the training split held out for that instead",
                options={"nargs": "+", "type": fraction},
                separates_results=True,
                per_dataset=True,
                excludes="held out",
            ),
            Flag(
                "fewshot_k",
                "images of each class (default: -1, all)",
                default=-1,
                options={"type": int, "metavar": "K"},
                separates_results=True,
            ),
            Flag(
                "fewshot_epochs",
                "default: 10",
                default=10,
                options={"type": integer_in(1), "metavar": "N"},
                separates_results=True,
            ),
            Flag("fewshot_lr", "default: 0.1", default=0.1, options={"type": float, "metavar": "LR"}, separates_results=True),
            Flag(
                "normalize",
                "unit features (default: True)",
                default=True,
                options={"type": boolean, "metavar": "True|False"},
                separates_results=True,
            ),
            Flag("feature_root", "where features are kept (default: features)", "features", {"metavar": "DIR"}),
        ),
        runs_without_model=True,
        order=40,
    ),
    origin=__name__,
)
