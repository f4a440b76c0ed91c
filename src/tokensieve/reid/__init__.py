"""Re-identification: a built-in plug-in. What it adds to the registries is declared here, without importing torch."""

from tokensieve.config.registry import TRAININGS, TrainingSpec

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
