"""Visual question answering: the declaration. `task.py` implements it, `answering.py` asks models, `scores.py` has scores."""

from __future__ import annotations

from tokensieve.flags import Flag, integer_in
from tokensieve.tasks.registry import TASKS, TaskSpec

TASKS.add(
    TaskSpec(
        "vqa",
        "questions about images, answered by a vision-language model",
        implementation="tokensieve.tasks.vqa.task:VqaTask",
        contents="questions",
        dataset="embedded-questions",
        metrics=("vqa_score", "exact_match"),
        main_metrics=("vqa_score",),
        percent=("vqa_score*", "exact_match*"),
        flags=(
            Flag(
                "questions",
                "of vqav2 or gqa (default: the published file in --dataset_root)",
                options={"metavar": "FILE"},
                repeats=True,
            ),
            Flag(
                "annotations",
                "answers of vqav2 (default: the published file in --dataset_root)",
                options={"metavar": "FILE"},
                repeats=True,
            ),
            Flag(
                "images",
                "of the images (default: in --dataset_root, or the folder of the JSONL)",
                options={"metavar": "DIR"},
                repeats=True,
            ),
            Flag(
                "vqa_prompt",
                "the prompt; holds {question} (default: '{question}' for embedded data, else with "
                "'Answer the question using a single word or phrase.' on a line below)",
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
