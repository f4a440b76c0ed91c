"""Zero-shot retrieval: the declaration. `task.py` implements it."""

from __future__ import annotations

from tokensieve.flags import Flag, integer_in
from tokensieve.tasks.registry import TASKS, TaskSpec
from tokensieve.tasks.shared_flags import ANNOTATION_FILE

TASKS.add(
    TaskSpec(
        "zeroshot_retrieval",
        "the image of each caption and the captions of each image among all of them",
        implementation="tokensieve.tasks.zeroshot_retrieval.task:RetrievalTask",
        contents="captions",
        dataset="embedded-captions",
        metrics=tuple(f"{side}_retrieval_recall@{k}" for k in (1, 5, 10) for side in ("image", "text")),
        main_metrics=("image_retrieval_recall@*", "text_retrieval_recall@*"),
        shown_metrics=("*_retrieval_recall@*",),
        percent=("image_retrieval_recall@*", "text_retrieval_recall@*"),
        flags=(
            Flag(
                "recall_k",
                "the k of recall@k (default: 5)",
                default=[5],
                options={"nargs": "+", "type": integer_in(1), "metavar": "K"},
                separates_results=True,
            ),
            ANNOTATION_FILE,
        ),
        order=20,
    ),
    origin=__name__,
)
