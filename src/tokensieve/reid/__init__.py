"""Re-identification: recognising an object (a person, a vehicle) that another camera took, from one or several modalities.

The package plugs in through the registries: importing it declares what it adds, and imports no torch.
"""

from __future__ import annotations

from tokensieve import embedded
from tokensieve.flags import Flag, integer_in
from tokensieve.models.loading.registry import MODEL_TYPES, ModelType
from tokensieve.tasks.registry import TASKS, TaskSpec

MODEL_TYPES.add(
    ModelType(
        "reid",
        f"{embedded.REID} or the folder of a training; its weights are in the folder, so leave --pretrained out",
        check="tokensieve.reid.loading:check_model",
        load="tokensieve.reid.loading:load",
        default_model=embedded.REID,
        is_model_name="tokensieve.reid.loading:is_model",
    ),
    origin=__name__,
)

TASKS.add(
    TaskSpec(
        "reid",
        "queries compared with a gallery by a re-identification model",
        implementation="tokensieve.reid.task:ReidTask",
        contents="objects",
        dataset="embedded-reid",
        metrics=("mAP", "rank_1", "rank_5", "rank_10", "cmc"),
        main_metrics=("mAP",),
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
