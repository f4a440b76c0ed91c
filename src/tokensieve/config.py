"""The YAML files as typed models: every mistake is told at once, an unknown key with the nearest allowed one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tokensieve.errors import UserError, did_you_mean

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of a file. Keys it does not know are errors; nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Phase(Section):
    """A stretch of training on pictures of one kind."""

    steps: Count
    batch: Annotated[int, Field(ge=2)] = 64
    canvas: Annotated[int, Field(ge=8, le=112, multiple_of=8)] = 112
    """Side of the window that is cut from each picture, in pixels: a smaller one costs less."""
    level: tuple[Fraction, Fraction] = (1.0, 1.0)
    """Difficulty of the scenes at the first and at the last step."""
    several: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of pictures with several objects, which have captions that tell them all. Needs the full canvas."""

    @model_validator(mode="after")
    def _several_fit(self) -> Phase:
        if self.several and self.canvas < 112:
            raise ValueError("several > 0 needs canvas: 112, since captions tell what a smaller window may not show")
        return self


class Optimizer(Section):
    """Muon for the matrices of the blocks, AdamW for the rest; one learning rate, warm-up, then half a cosine."""

    lr: Annotated[float, Field(gt=0)] = 2e-3
    floor: Fraction = 0.01
    """The last learning rate, as a part of the first."""
    warmup: Annotated[int, Field(ge=0)] = 100
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest norm of the gradient of AdamW's part."""

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of one of so many steps."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / (steps - self.warmup)
        return self.lr * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2)

    def check(self, steps: int) -> None:
        """A ValueError if the warm-up would last the whole training."""
        if self.warmup >= steps:
            raise ValueError(f"optimizer.warmup: {self.warmup} is not less than the {steps} steps of the training")


class SelectorOptimizer(Optimizer):
    """AdamW alone, for a run of few steps."""

    lr: Annotated[float, Field(gt=0)] = 3e-3
    floor: Fraction = 0.02
    warmup: Annotated[int, Field(ge=0)] = 10


class ClipTraining(Section):
    """`tokensieve train configs/embedded_clip.yaml`: a CLIP learns scenes and their captions."""

    task: Literal["clip"]
    output: Path
    model: str = "sieve-vit-8"
    seed: Annotated[int, Field(ge=0)] = 0
    optimizer: Optimizer = Optimizer()
    phases: Annotated[tuple[Phase, ...], Field(min_length=1)]
    workers: Annotated[int, Field(ge=0)] = 1
    threads: Count | None = None
    checkpoint_every: Count = 100
    evaluate: bool = True
    """At the end, measure on the val and test splits and write it to card.json."""

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @model_validator(mode="after")
    def _warmup_ends(self) -> ClipTraining:
        self.optimizer.check(self.steps)
        return self


class CaptionTraining(Section):
    """`tokensieve train configs/embedded_coca.yaml`: a CoCa learns captions on top of a CLIP's frozen vision tower."""

    task: Literal["captions"]
    output: Path
    model: str = "sieve-coca-8"
    start: str = "scenes-v1"
    """The embedded weights whose towers it begins with."""
    seed: Annotated[int, Field(ge=0)] = 0
    optimizer: Optimizer = Optimizer()
    pictures: Count = 12_800
    """How many training pictures there are; each keeps about 50 kB of memory."""
    batch: Annotated[int, Field(ge=2)] = 32
    steps: Count
    contrast: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the contrast between captions and pictures beside the caption loss."""
    threads: Count | None = None
    checkpoint_every: Count = 200
    evaluate: bool = True
    """At the end, measure on the val and test splits and write it to card.json."""

    @model_validator(mode="after")
    def _numbers_fit(self) -> CaptionTraining:
        self.optimizer.check(self.steps)
        if self.batch > self.pictures:
            raise ValueError(f"batch: {self.batch} is more than the {self.pictures} pictures")
        return self


class LlavaPhase(Section):
    """A stretch of training in which every picture has so many questions."""

    steps: Count
    batch: Count = 16
    """Pictures in a step."""
    questions: Annotated[int, Field(ge=0)] = 8
    """Questions about each picture; with 0 only the patches are named, which needs no language model."""
    layers: Count = 12
    """How many of the language model's layers run, evenly spread; the others wait and pass everything on."""
    patches: Annotated[float, Field(ge=0)] = 1.0
    """Weight of naming what lies in each patch beside the answers."""


class LlavaTraining(Section):
    """`tokensieve train configs/embedded_llava.yaml`: a LLaVA learns to answer questions on a CLIP's vision tower."""

    task: Literal["llava"]
    output: Path
    start: str = "scenes-v1"
    """The embedded weights whose vision tower it begins with."""
    layers: Count = 12
    """Layers of the language model."""
    seed: Annotated[int, Field(ge=0)] = 0
    optimizer: Optimizer = Optimizer()
    phases: Annotated[tuple[LlavaPhase, ...], Field(min_length=1)]
    threads: Count | None = None
    checkpoint_every: Count = 50
    evaluate: bool = True
    """At the end, measure on the val and test splits and write it to card.json."""

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @model_validator(mode="after")
    def _numbers_fit(self) -> LlavaTraining:
        self.optimizer.check(self.steps)
        if any(phase.layers > self.layers for phase in self.phases):
            raise ValueError(f"phases: there are no more than the {self.layers} layers")
        return self


class SelectorTraining(Section):
    """`tokensieve train configs/learned_selector.yaml`: a small network learns which tokens a frozen model needs."""

    task: Literal["learned_selector"]
    output: Path
    model: str = "sieve-vit-8"
    pretrained: str = "scenes-v1"
    model_type: Literal["open_clip", "hf", "timm"] = "open_clip"
    model_cache_dir: str | None = None
    dataset: str = "embedded"
    dataset_root: str = "root"
    split: str = "train"
    val_split: str = "val"
    val_images: Count | None = None
    """How many pictures of the validation split to measure on; None: all."""
    plans: Annotated[tuple[str, ...], Field(min_length=1)]
    """What to train for, such as learned@4:32(rest=merge); every step draws one of them."""
    steps: Count
    batch: Annotated[int, Field(ge=2)] = 64
    feature: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the distance to the full model's image feature."""
    logits: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the divergence from the full model's class probabilities, where the data has classes."""
    attention: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the divergence of the scores from what the full model's next block attends to."""
    exploration: Annotated[float, Field(ge=0)] = 0.2
    """Gumbel noise on the ranking, so that tokens are tried that would not be chosen."""
    optimizer: SelectorOptimizer = SelectorOptimizer()
    seed: Annotated[int, Field(ge=0)] = 0
    workers: Annotated[int, Field(ge=0)] = 1
    threads: Count | None = None
    device: str | None = None
    checkpoint_every: Count = 50
    evaluate: bool = True
    """At the end, measure every plan and the full model on the validation split and write it to card.json."""

    @model_validator(mode="after")
    def _something_is_learned(self) -> SelectorTraining:
        from tokensieve.plan import Plan

        self.optimizer.check(self.steps)
        for text in self.plans:
            steps = Plan.parse(text).steps
            if not any(step.method.name == "learned" for step in steps):
                raise ValueError(f"plans: {text} has nothing to train; for example learned@4:32(rest=merge)")
            if any(step.rest == "zero" for step in steps):
                raise ValueError(f"plans: {text}: the last norm undoes what rest=zero would learn; use merge, fuse or drop")
        if self.feature == self.logits == self.attention == 0:
            raise ValueError("feature, logits and attention are all 0, so there is nothing to learn from; set one to 1")
        return self


# Keys of any task that say how and where the work is done, and do not change what comes out of it.
CIRCUMSTANCES = {"output", "workers", "threads", "device", "model_cache_dir", "checkpoint_every", "evaluate", "val_images"}


def recipe(config: Section) -> dict[str, Any]:
    """What decides the result of a training: all of its file but the circumstances."""
    decided: dict[str, Any] = json.loads(config.model_dump_json(exclude=CIRCUMSTANCES))
    return decided


def check_recipe(config: Section, begun: Mapping[str, Any]) -> None:
    """A UserError if a run that was begun with one recipe is to be resumed with another."""
    changed = [key for key, value in recipe(config).items() if begun.get(key) != value]
    if changed:
        raise UserError(
            f"the run was begun with other values of {', '.join(changed)}; "
            "restore them in the configuration, or begin a new run with another --output"
        )


TASKS: dict[str, type[Section]] = {
    "clip": ClipTraining,
    "captions": CaptionTraining,
    "llava": LlavaTraining,
    "learned_selector": SelectorTraining,
}


def load(path: str | Path) -> Any:
    """Read and check a training file: a section of its task. Raises UserError with one line that names every mistake in it."""
    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no file {str(path)!r}; give the path of a YAML file, such as configs/embedded_clip.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected keys and values, such as 'task: clip', but found {type(raw).__name__}")
    task = raw.get("task")
    if task not in TASKS:
        raise UserError(f"{path}: task: {task!r} is not one of: {', '.join(TASKS)}.{did_you_mean(str(task), TASKS)}")
    try:
        return TASKS[task].model_validate(raw)
    except ValidationError as error:
        raise UserError(f"{path}: {'; '.join(_explain(e, TASKS[task]) for e in error.errors())}") from None


def _explain(error: Any, schema: type[BaseModel]) -> str:
    """One pydantic error in a user's words: where, what came, what is allowed."""
    place = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        *above, key = error["loc"]
        keys = list(_section_at(schema, above).model_fields)
        return f"{place}: unknown key; allowed are {', '.join(keys)}.{did_you_mean(str(key), keys)}"
    if error["type"] == "missing":
        return f"{place}: missing"
    told = error["msg"].removeprefix("Value error, ")
    came = "" if isinstance(error["input"], dict) else f" (got {error['input']!r})"
    return f"{place}: {told[0].lower()}{told[1:]}{came}" if place else told


def _section_at(schema: type[BaseModel], place: list[int | str]) -> type[BaseModel]:
    """The section that stands at a place such as ("phases", 0)."""
    for part in place:
        if isinstance(part, str):
            annotation: Any = schema.model_fields[part].annotation
            while not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
                annotation = get_args(annotation)[0]
            schema = annotation
    return schema
