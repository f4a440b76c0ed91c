"""Visual question answering: a model gets an image or a video and a question and generates a short answer, greedily decoded.

The data says what kind of answer it expects (`VqaData.scoring`), and the scoring of that kind has the prompt and the metrics:
open answers (scores.py), yes or no (yes_no.py), multiple choice (choices.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.data import Dataset

from tokensieve.data import vqa
from tokensieve.data.images import BrokenImage
from tokensieve.data.registry import folder_of
from tokensieve.data.source import Broken, Source
from tokensieve.data.vqa_items import VqaData, VqaItem
from tokensieve.errors import UserError
from tokensieve.models.loading.vlm import LoadedVlm
from tokensieve.tasks.base import Encode, Prediction, Record, SampleScores, Task, TaskContext
from tokensieve.tasks.vqa.answering import BARE, SHORT, answer, ask, prefill
from tokensieve.tasks.vqa.choices import Choices
from tokensieve.tasks.vqa.scores import OpenAnswers
from tokensieve.tasks.vqa.scoring import Reference, Scoring
from tokensieve.tasks.vqa.yes_no import YesNo

NAME = "vqa"


class VqaTask(Task):
    """Questions of one data set, answered by a vision-language model."""

    name = NAME

    def __init__(self, context: TaskContext) -> None:
        args, loaded = context.args, context.loaded
        if not isinstance(loaded, LoadedVlm):
            raise UserError(f"--task {NAME}: {context.model} answers no questions; use --model_type vlm.")
        if context.language != "en":
            raise UserError(f"--language {context.language}: questions are asked as the data has them; leave it out.")
        self.context, self.processor = context, loaded.processor
        self.data = vqa.load(
            context.dataset,
            questions=args.questions,
            annotations=args.annotations,
            images=_one_folder(args.images),
            split=args.split,
            limit=args.limit,
            root=folder_of(context.dataset, args.dataset_root),
        )
        if args.frames is not None:
            self.data = self.data.with_frames(args.frames)
        for remark in self.data.check(args.max_broken):
            context.warn(remark)
        if args.circular:
            self.data = self.data.in_all_rotations()
        self.scoring = _scoring(self.data.scoring, context.dataset, args.circular)
        self.metric = self.scoring.metric
        self.template = self.scoring.prompt if args.vqa_prompt is None else _template(args.vqa_prompt)
        prompts = Prompts(self.processor, self.template, args.blind)
        self.source = Source(Questions(self.data), [], [], self.data.fingerprint, join=prompts)
        self.run, self.run_for_flops = self._answer, prefill

    def sources(self) -> dict[str, Source]:
        return {"test": self.source}

    def settings(self) -> dict[str, Any]:
        return {"vqa_prompt": self.template}

    def _answer(self, model: Any, inputs: Mapping[str, Tensor]) -> list[str]:
        return answer(model, self.processor, inputs, self.context.args.max_new_tokens)

    def batch(self, split: str, images: Any, targets: list[Reference], encoders: Sequence[Encode]) -> list[Record]:
        keeps = self.context.saves_predictions
        made = []
        for answers in (encode(images) for encode in encoders):
            made.append(Answered(self.scoring.record(answers, targets), *((answers, targets) if keeps else ([], []))))
        return made

    def sample_scores(self, records: dict[str, list[Record]]) -> SampleScores:
        return self.scoring.sample_scores(_scored(records))

    def metrics(self, records: dict[str, list[Record]]) -> dict[str, float]:
        return self.scoring.metrics(_scored(records))

    def counts(self, records: dict[str, list[Record]]) -> dict[str, Any]:
        return self.scoring.counts(_scored(records))

    def predictions(self, records: dict[str, list[Record]], samples: dict[str, Tensor]) -> list[Prediction]:
        """`answer` is what the model wrote, `prediction` what it is taken for, `label` what people answered."""
        batches: list[Answered] = records["test"]
        pairs = [pair for batch in batches for pair in zip(batch.answers, batch.references, strict=True)]
        made: list[Prediction] = []
        for sample, (said, reference) in zip(samples["test"].tolist(), pairs, strict=True):
            taken_for, score = self.scoring.judge(said, reference)
            about = {"id": reference.id, "image": reference.file, "kind": reference.kind, "question": reference.question}
            outcome = {"label": reference.answers, "answer": said, "prediction": taken_for, "score": score}
            made.append({"sample": sample, **about, **outcome})
        return made

    def tokens(self, inputs: Any) -> int | None:
        """The places that the image or the video has in the prompt."""
        config = self.context.loaded.model.config
        names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
        places = {getattr(config, name, None) for name in names} - {None}
        return sum(int((inputs["input_ids"] == place).sum()) for place in places) if places else None

    def language_model(self) -> nn.Module | None:
        inner: Any = getattr(self.context.loaded.model, "model", self.context.loaded.model)
        found: nn.Module | None = getattr(inner, "language_model", None)
        return found


class Answered(NamedTuple):
    """What is kept of a batch: the record of the scoring; with --save_predictions also the answers and what they are held
    against."""

    scored: Record
    answers: list[str]
    references: list[Reference]


def _scored(records: dict[str, list[Record]]) -> list[Record]:
    return [batch.scored for batch in records["test"]]


def _scoring(name: str, dataset: str, circular: bool) -> Scoring:
    """The scoring of that name (`VqaData.scoring`)."""
    scorings = {
        "open": OpenAnswers(BARE if dataset in (*vqa.EMBEDDED, vqa.CLIPS) else SHORT),
        "yes_no": YesNo(),
        "choice": Choices(circular),
    }
    return scorings[name]


def _one_folder(images: Sequence[str] | None) -> str | None:
    """--images of questions: a single folder."""
    if images is not None and len(images) > 1:
        raise UserError(f"--images {images[0]} {images[1]} ...: of questions give the one folder that holds their images.")
    return images[0] if images else None


def _template(given: str) -> str:
    if "{question}" not in given:
        raise UserError(f"--vqa_prompt {given!r} has no {{question}} in it, for example '{{question}} Answer in one word.'")
    return given.replace("\\n", "\n")


class Questions(Dataset[Any]):
    """Samples as the loader wants them: (item, reference), or Broken."""

    def __init__(self, data: VqaData) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        try:
            item = self.data[index]
        except BrokenImage as error:
            name, _, reason = str(error).partition(": ")
            return Broken(name, reason)
        return item, Reference.of(item)


class Prompts:
    """Makes a batch of items the model's inputs; it can be sent to worker processes."""

    def __init__(self, processor: Any, template: str, blind: bool) -> None:
        self.processor, self.template, self.blind = processor, template, blind

    def __call__(self, items: Sequence[VqaItem], targets: Sequence[Reference]) -> tuple[dict[str, Tensor], list[Reference]]:
        return ask(self.processor, items, self.template, blind=self.blind), list(targets)
