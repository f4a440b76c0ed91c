"""The YAML files as typed models: every mistake is told at once, an unknown key with the nearest allowed one."""

from __future__ import annotations

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
    def _batch_fits(self) -> CaptionTraining:
        if self.batch > self.pictures:
            raise ValueError(f"batch: {self.batch} is more than the {self.pictures} pictures")
        return self


TASKS: dict[str, type[Section]] = {"clip": ClipTraining, "captions": CaptionTraining}


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
    return f"{place}: {told[0].lower()}{told[1:]}{came}"


def _section_at(schema: type[BaseModel], place: list[int | str]) -> type[BaseModel]:
    """The section that stands at a place such as ("phases", 0)."""
    for part in place:
        if isinstance(part, str):
            annotation: Any = schema.model_fields[part].annotation
            while not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
                annotation = get_args(annotation)[0]
            schema = annotation
    return schema
