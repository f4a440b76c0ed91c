"""Visual question answering: the declaration.

`task.py` implements it and `answering.py` asks models. `scores.py` (open answers), `yes_no.py` and `choices.py` score answers.
"""

from __future__ import annotations

from tokensieve.flags import Flag, integer_in
from tokensieve.tasks.registry import TASKS, TaskSpec

YES_NO = ("accuracy", "precision", "recall", "f1", "yes_ratio")

TASKS.add(
    TaskSpec(
        "vqa",
        "questions about images or videos, answered by a vision-language model",
        implementation="tokensieve.tasks.vqa.task:VqaTask",
        contents="questions",
        dataset="embedded-questions",
        metrics=("vqa_score", "exact_match", *YES_NO, "f1_mean", "accuracy_circular"),
        main_metrics=("vqa_score", "f1", "accuracy_circular", "accuracy"),
        shown_metrics=("exact_match", "accuracy", "yes_ratio"),
        percent=("vqa_score*", "exact_match*", *(f"{metric}*" for metric in YES_NO)),
        flags=(
            Flag(
                "questions",
                "of a published data set (default: its usual file in --dataset_root)",
                options={"metavar": "FILE"},
                repeats=True,
            ),
            Flag(
                "annotations",
                "answers of vqav2 (default: the published file in --dataset_root, or beside the questions)",
                options={"metavar": "FILE"},
                repeats=True,
            ),
            Flag(
                "vqa_prompt",
                "the prompt; holds {question} (default: '{question}' for embedded data; else, on a line below, 'Answer with "
                "the option's letter from the given choices directly.' for multiple choice, "
                "'Answer the question using a single word or phrase.' for other questions)",
                options={"metavar": "TEXT"},
                separates_results=True,
            ),
            Flag(
                "max_new_tokens",
                "longest answer (default: 16)",
                default=16,
                options={"type": integer_in(1), "metavar": "N"},
                separates_results=True,
            ),
            Flag(
                "circular",
                "ask a multiple choice once for every rotation of its options; it is right if all answers are",
                default=False,
                options={"action": "store_true"},
                separates_results=True,
                names_result=True,
            ),
            Flag(
                "frames",
                "of each video, evenly spread over its time (default: 8)",
                options={"type": integer_in(1, 10_000), "metavar": "N"},
                separates_results=True,
            ),
            Flag(
                "blind",
                "show a grey picture in place of every image: what guessing gives",
                default=False,
                options={"action": "store_true"},
                separates_results=True,
                names_result=True,
            ),
        ),
        model_type="vlm",
        model_description="a vision-language model answers questions",
        own_precision=True,
        order=50,
    ),
    origin=__name__,
)
