"""Re-identification: a built-in plug-in. What it adds to the registries is declared here, without importing torch."""

from tokensieve.config.registry import TRAININGS, TrainingSpec
from tokensieve.drawing.registry import SHOW_INPUTS, ShowInput
from tokensieve.flags import Flag, integer_in

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
        "of re-identification queries of data sets (embedded-reid:N, RGBNT201:N, ...), or the files of an object: RGB=FILE "
        "NI=FILE TI=FILE",
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
