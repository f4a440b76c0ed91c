"""Re-identification of objects seen by several cameras in several modalities: a built-in plug-in.

What it adds to the registries is declared here, without importing torch.
"""

from __future__ import annotations

from tokensieve import embedded
from tokensieve.config.registry import TRAININGS, TrainingSpec
from tokensieve.data.registry import DATASETS, OWN, DatasetSpec
from tokensieve.drawing.registry import SHOW_INPUTS, ShowInput
from tokensieve.flags import Flag, integer_in
from tokensieve.models.families import FAMILIES, Family
from tokensieve.models.loading.registry import MODEL_TYPES, ModelType
from tokensieve.reid.layouts import LAYOUTS
from tokensieve.tasks.registry import TASKS, TaskSpec

# --- data sets

for _name, _layout in LAYOUTS.items():
    _load = "tokensieve.reid.data:load"
    DATASETS.add(DatasetSpec(_name, _layout.summary, _load, "objects", "reid", "re-identification"), origin=__name__)

for _prefix, _holds, _argument in (("folder:", "is_folder", "DIR"), ("csv:", "is_table", "FILE")):
    DATASETS.add(
        DatasetSpec(
            f"objects in {_prefix}",
            "objects of your own, in a folder for each modality or in a table",
            _load,
            "objects",
            "reid",
            group=OWN,
            argument=_argument,
            shares=_prefix,
            holds=f"tokensieve.reid.own:{_holds}",
            check=f"tokensieve.data.own.{'folders' if _prefix == 'folder:' else 'tables'}:check",
        ),
        origin=__name__,
    )

# --- models

MODEL_TYPES.add(
    ModelType(
        "reid",
        f"{embedded.REID}, or the folder of a training, which holds the weights; --pretrained is not used",
        check="tokensieve.reid.loading:check_model",
        load="tokensieve.reid.loading:load",
        bench="tokensieve.reid.bench:bench",
        bench_model=embedded.REID,
        tune="tokensieve.reid.tuning:ObjectFeatures",
        demo="tokensieve.reid.demo:People",
        default_model=embedded.REID,
        is_model_name="tokensieve.reid.loading:is_model_name",
    ),
    origin=__name__,
)
FAMILIES.add(Family("reid", "re-identification models", open_tower="tokensieve.reid.tower:open_tower"), origin=__name__)

# --- task

TASKS.add(
    TaskSpec(
        "reid",
        "queries compared with a gallery by a re-identification model",
        implementation="tokensieve.reid.task:ReidTask",
        contents="objects",
        dataset="embedded-reid",
        metrics=("mAP", "rank_1", "rank_5", "rank_10", "cmc"),
        main_metrics=("mAP",),
        shown_metrics=("rank_1",),
        percent=("mAP*", "rank_*"),
        flags=(
            Flag(
                "modalities",
                "modalities to compare objects by, for example RGB,NI,TI RGB,NI RGB; the first is the headline "
                "(default: every combination of the model's, all first)",
                options={"nargs": "+", "metavar": "A,B"},
                separates_results=True,
            ),
            Flag(
                "val_identities",
                "with --split val: how many identities of the training set are for validation (default: the training's)",
                options={"type": integer_in(1), "metavar": "N"},
                separates_results=True,
            ),
        ),
        flags_title="reid (--split test is query and gallery, val validation identities; its plans by default: the model's "
        "own, none, random, grid and anchor)",
        model_type="reid",
        model_description="a re-identification model recognises objects",
        default_plans="tokensieve.reid.task:default_plans",
        show_input="{dataset}:0",
        order=60,
    ),
    origin=__name__,
)

# --- training

TRAININGS.add(
    TrainingSpec(
        "reid",
        "a vision transformer learns to re-identify by several modalities",
        schema="tokensieve.reid.config:ReidTraining",
        learner="tokensieve.reid.training:ReidLearner",
        export="tokensieve.reid.export:export",
        sections=("MODEL", "INPUT", "DATASETS", "DATALOADER", "SOLVER", "TEST"),
    ),
    origin=__name__,
)

# --- input of `show`

SHOW_INPUTS.add(
    ShowInput(
        "reid",
        "of re-identification queries of data sets (embedded-reid:N, RGBNT201:N, folder:DIR:N, ...), or files of an object: "
        "RGB=FILE NI=FILE TI=FILE",
        accepts="tokensieve.reid.show:accepts",
        run="tokensieve.reid.show:run",
        datasets="tokensieve.reid.layouts:NAMES",
        flags=(
            Flag("gallery", "of re-identification: what a query finds in the gallery", False, {"action": "store_true"}),
            Flag(
                "ranks",
                "with --gallery: how many objects, at most 50 (default: 10)",
                10,
                {"type": integer_in(1), "metavar": "N"},
            ),
            Flag(
                "modalities",
                "of re-identification: only these (default: all of the model)",
                options={"metavar": "RGB,TI"},
            ),
            Flag("dataset_root", "folder of a re-identification data set", "root", {"metavar": "DIR"}),
        ),
    ),
    origin=__name__,
)
