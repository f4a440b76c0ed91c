"""Captioning: the declaration. `task.py` implements it, `beam_search.py` writes captions, `metrics.py` scores them."""

from __future__ import annotations

from tokensieve.tasks.registry import TASKS, TaskSpec
from tokensieve.tasks.shared_flags import ANNOTATION_FILE

TASKS.add(
    TaskSpec(
        "captioning",
        "captions written by a CoCa, compared with those that people wrote",
        implementation="tokensieve.tasks.captioning.task:CaptioningTask",
        contents="captions",
        dataset="embedded-captions",
        metrics=("Bleu_1", "Bleu_2", "Bleu_3", "Bleu_4", "METEOR", "ROUGE_L", "CIDEr", "SPICE"),
        main_metrics=("CIDEr",),
        shown_metrics=("Bleu_4", "METEOR", "ROUGE_L"),
        flags=(ANNOTATION_FILE,),
        order=70,
    ),
    origin=__name__,
)
