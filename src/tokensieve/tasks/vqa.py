"""Visual question answering: a model is shown an image, asked about it, and writes a short answer, word by word the likeliest.

vqa_score is VQA's own: an answer is worth min(1, m/3) where m of the other nine people said the same, averaged over leaving
each of the ten out. exact_match is 1 if it is what most people said. Both compare answers as VQA does: lower case, number
words as digits, no articles, contractions with their apostrophe, punctuation as https://visualqa.org/evaluation.html tells.

Where we differ: VQA's program leaves answers as they are where all people agree, so that "two" would be wrong where all ten
wrote "2"; here both are always made alike. With other than ten people m is held against 3, or all others if they are fewer;
with one, both numbers are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from tokensieve.data import vqa
from tokensieve.data.images import BrokenImage
from tokensieve.data.sources import Broken, Source, folder_of
from tokensieve.data.vqa import VqaData, VqaItem, most_frequent
from tokensieve.errors import UserError
from tokensieve.models.load_vlm import LoadedVlm, prompt
from tokensieve.tasks import Encode, Record, Setup, Task
from tokensieve.tasks.matching import grouped_stderr

NAME = "vqa"
BARE, SHORT = "{question}", "{question}\nAnswer the question using a single word or phrase."  # prompts
MAX_NEW_TOKENS = 16

# ------------------------------------------------------------------------------------------------------------------ the scores

MARKS = ';/[]"{}()=+\\_-><@`,?!'  # all punctuation but the apostrophe, the colon (2:50) and the full stop
ARTICLES = ("a", "an", "the")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
DIGITS = {"none": "0"} | {word: str(number) for number, word in enumerate(NUMBERS)}
_PEOPLE = "somebody someone something everybody everyone"
_CONTRACTED = {  # what is contracted, and the words before it; only where the two without an apostrophe are no other word
    "n't": "ai are ca could did does do had has have is might must need ought sha should was were wo would",
    "'ve": "could i might must should they we what where who would you",
    "'ll": f"how it that they what who why you {_PEOPLE}",
    "'re": "there they what why you",
    "'d": f"he how it that there they when where who you {_PEOPLE}",
    "'s": "he how she that there what when where who why",
    "'m": "i",
}
CONTRACTIONS = {f"{word}{end}".replace("'", ""): f"{word}{end}" for end, words in _CONTRACTED.items() for word in words.split()}
CONTRACTIONS |= {"maam": "ma'am", "oclock": "o'clock", "twas": "'twas", "yall": "y'all", "lets": "let's"}


@cache
def normalise(answer: str) -> str:
    """The answer as it is compared.

    >>> normalise("The 2 Dogs."), normalise("dont know"), normalise("1,000"), normalise("black/white")
    ('2 dogs', "don't know", '1000', 'black white')
    """
    text = " ".join(answer.lower().split())
    grouped = re.search(r"\d,\d", text) is not None  # 100,978
    made = text
    for mark in MARKS:
        beside_a_space = f"{mark} " in text or f" {mark}" in text
        made = made.replace(mark, "" if beside_a_space or grouped else " ")
    made = re.sub(r"\.(?!\d)", "", made)  # a full stop, but not a decimal point
    words = [DIGITS.get(word, word) for word in made.split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def soft_score(answer: str, answers: Sequence[str]) -> float:
    """VQA's score of an answer, from 0 to 1."""
    said = [normalise(one) for one in answers]
    same = said.count(normalise(answer))
    others = len(said) - 1
    if others == 0:
        return float(same)
    enough = min(3, others)
    # of those left out, `same` agreed and leave one fewer behind
    return (same * min(1.0, (same - 1) / enough) + (len(said) - same) * min(1.0, same / enough)) / len(said)


def exact_match(answer: str, answers: Sequence[str]) -> float:
    """1 if the answer is the one that most people gave, else 0."""
    return float(normalise(answer) == most_frequent([normalise(one) for one in answers]))


# --------------------------------------------------------------------------------------------------------------------- asking


def ask(processor: Any, items: Sequence[VqaItem], template: str = BARE, *, blind: bool = False) -> dict[str, Tensor]:
    """Images and questions as the model takes them, padded on the left; blind: a picture of the mean colour in every place."""
    texts = [prompt(processor, template.replace("{question}", item.question)) for item in items]
    images = [grey(processor, item.image) if blind else item.image for item in items]
    start = processor.tokenizer.bos_token
    own_start = bool(start) and all(text.startswith(start) for text in texts)  # the template has it: not twice
    made = processor(
        text=texts,
        images=images,
        padding=True,
        padding_side="left",
        add_special_tokens=not own_start,
        return_tensors="pt",
    )
    return dict(made)


def grey(processor: Any, image: Image.Image) -> Image.Image:
    """A picture of that size in the colour that the processor turns into zeros: nothing can be seen."""
    mean = getattr(processor.image_processor, "image_mean", None) or (0.5, 0.5, 0.5)
    red, green, blue = (round(255 * part) for part in mean)
    return Image.new("RGB", image.size, (red, green, blue))


def _fitting(model: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def answer(model: Any, processor: Any, inputs: Mapping[str, Tensor], max_new_tokens: int = MAX_NEW_TOKENS) -> list[str]:
    """The answer to each question, greedily decoded."""
    words = processor.tokenizer
    greedy: dict[str, Any] = {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}
    with torch.inference_mode():
        ids = model.generate(
            **_fitting(model, inputs), **greedy, max_new_tokens=max_new_tokens, pad_token_id=words.pad_token_id
        )
    new = ids[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in words.batch_decode(new, skip_special_tokens=True)]


def answer_questions(
    model: Any,
    processor: Any,
    items: Iterable[VqaItem],
    batch_size: int = 16,
    max_new_tokens: int = MAX_NEW_TOKENS,
    template: str = BARE,
) -> list[str]:
    """The answer to each question, in order."""
    answers: list[str] = []
    batch: list[VqaItem] = []

    def flush() -> None:
        if batch:
            inputs = {name: value.to(model.device) for name, value in ask(processor, batch, template).items()}
            answers.extend(answer(model, processor, inputs, max_new_tokens))
            batch.clear()

    for item in items:
        batch.append(item)
        if len(batch) == batch_size:
            flush()
    flush()
    return answers


def prefill(model: Any, inputs: Mapping[str, Tensor]) -> Any:
    """One pass over image and question, up to the first word of the answer."""
    return model(**_fitting(model, inputs), logits_to_keep=1)


# ------------------------------------------------------------------------------------------------------------------- the task


class Reference(NamedTuple):
    """What a question's answer is judged by."""

    answers: list[str]
    kind: str
    file: str


class Scored(NamedTuple):
    """What is kept of a batch, a number for each question."""

    soft: list[float]
    exact: list[float]
    kinds: list[str]
    files: list[str]


class VqaTask(Task):
    """Questions of one data set, answered by a vision-language model."""

    name = NAME
    metric = "vqa_score"

    def __init__(self, setup: Setup) -> None:
        args, loaded = setup.args, setup.loaded
        if not isinstance(loaded, LoadedVlm):
            raise UserError(f"--task {NAME}: {setup.model} answers no questions; use --model_type vlm.")
        if setup.language != "en":
            raise UserError(f"--language {setup.language}: questions are asked as the data has them; leave it out.")
        self.setup, self.processor = setup, loaded.processor
        self.data = vqa.load(
            setup.dataset,
            questions=args.questions,
            annotations=args.annotations,
            images=args.images,
            split=args.split,
            limit=args.limit,
            root=folder_of(setup.dataset, args.dataset_root),
        )
        for remark in self.data.check(args.max_broken):
            setup.say(remark)
        self.template = _template(args.vqa_prompt, setup.dataset)
        asked = Prompts(self.processor, self.template, args.blind)
        self.source = Source(Questions(self.data), [], [], self.data.fingerprint, join=asked)
        self.act, self.once = self._answer, prefill

    def sources(self) -> dict[str, Source]:
        return {"test": self.source}

    def settings(self) -> dict[str, Any]:
        args = self.setup.args
        return {"max_new_tokens": args.max_new_tokens, "vqa_prompt": self.template, "blind": args.blind}

    def _answer(self, model: Any, inputs: Mapping[str, Tensor]) -> list[str]:
        return answer(model, self.processor, inputs, self.setup.args.max_new_tokens)

    def batch(self, split: str, images: Any, targets: list[Reference], encoders: Sequence[Encode]) -> list[Record]:
        kinds, files = [target.kind for target in targets], [target.file for target in targets]
        made = []
        for encode in encoders:
            pairs = list(zip(encode(images), (target.answers for target in targets), strict=True))
            made.append(Scored([soft_score(*pair) for pair in pairs], [exact_match(*pair) for pair in pairs], kinds, files))
        return made

    def metrics(self, records: dict[str, list[Record]]) -> dict[str, float]:
        return metrics(records["test"])

    def tokens(self, inputs: Any) -> int | None:
        """The places that the image has in the prompt."""
        config = self.setup.loaded.model.config
        image = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
        return None if image is None else int((inputs["input_ids"] == image).sum())

    def language_model(self) -> nn.Module | None:
        inner: Any = getattr(self.setup.loaded.model, "model", self.setup.loaded.model)
        found: nn.Module | None = getattr(inner, "language_model", None)
        return found


def _template(given: str | None, dataset: str) -> str:
    if given is None:
        return BARE if dataset in vqa.EMBEDDED else SHORT
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
        return item, Reference(item.answers, item.kind, item.file)


class Prompts:
    """Makes a batch of items the model's inputs; it can be sent to worker processes."""

    def __init__(self, processor: Any, template: str, blind: bool) -> None:
        self.processor, self.template, self.blind = processor, template, blind

    def __call__(self, items: Sequence[VqaItem], targets: Sequence[Reference]) -> tuple[dict[str, Tensor], list[Reference]]:
        return ask(self.processor, items, self.template, blind=self.blind), list(targets)


def metrics(records: Sequence[Scored]) -> dict[str, float]:
    """vqa_score and exact_match of all questions and of every kind there is, then their standard errors.

    Questions about one image are not independent of each other: standard errors are those of whole images.
    """
    soft = torch.tensor([value for batch in records for value in batch.soft], dtype=torch.float64)
    exact = torch.tensor([value for batch in records for value in batch.exact], dtype=torch.float64)
    kinds = [kind for batch in records for kind in batch.kinds]
    files: dict[str, int] = {}
    image = torch.tensor([files.setdefault(file, len(files)) for batch in records for file in batch.files])
    chosen = {"": torch.ones(len(kinds), dtype=torch.bool)}
    for kind in dict.fromkeys(filter(None, kinds)):
        name = re.sub(r"\W+", "_", kind)
        chosen[f"_{name}"] = torch.tensor([one == kind for one in kinds])
    numbers = {
        f"{metric}{suffix}": (values[rows], image[rows])
        for suffix, rows in chosen.items()
        for metric, values in (("vqa_score", soft), ("exact_match", exact))
    }
    shares = {name: float(values.mean()) for name, (values, _) in numbers.items()}
    return shares | {f"{name}_stderr": grouped_stderr(values, groups) for name, (values, groups) in numbers.items()}
