"""Training of the method `learned`: a small network learns which tokens a frozen model needs. Imports no torch."""

from tokensieve.config.registry import TRAININGS, TrainingSpec

TRAININGS.add(
    TrainingSpec(
        "learned_selector",
        "a small network learns which tokens a frozen model needs",
        schema="tokensieve.config.learned_selector:SelectorTraining",
        learner=f"{__name__}.learner:SelectorLearner",
        export=f"{__name__}.export:export",
        parts=f"{__name__}.export:part_files",
    ),
    origin=__name__,
)
