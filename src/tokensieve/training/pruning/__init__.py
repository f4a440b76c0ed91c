"""Two-stage VLM pruning: a merger and pruner heads learn to serve a frozen vision-language model. Imports no torch."""

from tokensieve.config.registry import TRAININGS, TrainingSpec

TRAININGS.add(
    TrainingSpec(
        "pruning",
        "a merger and pruner heads learn to serve a frozen LLaVA",
        schema="tokensieve.config.pruning:PruningTraining",
        learner=f"{__name__}.learner:PruningLearner",
        export=f"{__name__}.export:export",
        parts=f"{__name__}.export:part_files",
        sections=("method_settings", "trainer_settings", "dataset_settings", "backbone_settings"),
    ),
    origin=__name__,
)
