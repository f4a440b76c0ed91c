"""Image-caption selection: the declaration. `task.py` implements it."""

from __future__ import annotations

from tokensieve.tasks.registry import TASKS, TaskSpec
from tokensieve.tasks.shared_flags import ANNOTATION_FILE

METRICS = ("image_acc", "text_acc", "acc")

TASKS.add(
    TaskSpec(
        "image_caption_selection",
        "the right pairs among a few similar images and captions",
        implementation="tokensieve.tasks.image_caption_selection.task:CaptionSelectionTask",
        contents="captions",
        dataset="embedded-selection",
        metrics=METRICS,
        main_metrics=("acc",),
        shown_metrics=("image_acc", "text_acc"),
        percent=METRICS,
        flags=(ANNOTATION_FILE,),
        order=30,
    ),
    origin=__name__,
)
