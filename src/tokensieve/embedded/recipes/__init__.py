"""The trainings that made the embedded models, so that anybody can make them again. Declared here; imports no torch."""

from tokensieve.config.registry import TRAININGS, TrainingSpec

RECIPES = "tokensieve.embedded.recipes"

TRAININGS.add(
    TrainingSpec(
        "clip",
        "a CLIP learns scenes and their captions",
        schema="tokensieve.config.clip:ClipTraining",
        learner=f"{RECIPES}.clip:ClipLearner",
        export=f"{RECIPES}.clip:export",
    ),
    origin=__name__,
)
TRAININGS.add(
    TrainingSpec(
        "captions",
        "a CoCa learns captions on top of a CLIP's frozen vision tower",
        schema="tokensieve.config.captions:CaptionTraining",
        learner=f"{RECIPES}.captions:CaptionLearner",
        export=f"{RECIPES}.captions:export",
    ),
    origin=__name__,
)
TRAININGS.add(
    TrainingSpec(
        "llava",
        "a LLaVA learns to answer questions on a CLIP's vision tower",
        schema="tokensieve.config.llava:LlavaTraining",
        learner=f"{RECIPES}.llava:LlavaLearner",
        export=f"{RECIPES}.llava:export",
    ),
    origin=__name__,
)
TRAININGS.add(
    TrainingSpec(
        "llava_video",
        "a LLaVA-OneVision learns to answer questions about clips, from the embedded LLaVA",
        schema="tokensieve.config.llava_video:LlavaVideoTraining",
        learner=f"{RECIPES}.llava_video:LlavaVideoLearner",
        export=f"{RECIPES}.llava_video:export",
    ),
    origin=__name__,
)
