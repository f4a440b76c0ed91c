"""The YAML files as typed models: every mistake is told at once, an unknown key with the nearest allowed one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from tokensieve import validation
from tokensieve.errors import UserError, did_you_mean, nearest

Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of a file. Keys it does not know are errors; nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """pydantic would take `steps: true` for 1."""
        wanted = str(cls.model_fields[info.field_name or ""].annotation)
        numbers = any(word in wanted for word in ("int", "float")) and not any(word in wanted for word in ("bool", "Any"))
        if numbers and any(item is True or item is False for item in (value if isinstance(value, list) else [value])):
            raise ValueError("true and false are no numbers")
        return value


class Dimension(Section):
    """What a search tries for one key: numbers from low to high, or one of the choices."""

    low: int | float | None = None
    high: int | float | None = None
    step: int | float | None = None
    """Only every so many."""
    log: bool = False
    """As many trials from 1e-5 to 1e-4 as from 1e-4 to 1e-3."""
    choices: Annotated[tuple[Any, ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Dimension:
        if self.choices is not None:
            if self.model_fields_set != {"choices"}:
                raise ValueError("choices stand alone, without low, high, step and log")
            return self
        if self.low is None or self.high is None:
            raise ValueError("give low and high, such as {low: 0.3, high: 0.6}, or {choices: [...]}")
        if self.low > self.high:
            raise ValueError(f"low: {self.low} is above high: {self.high}")
        if self.step is not None and (self.log or self.step <= 0):
            raise ValueError("step: must be above 0" if self.step <= 0 else "step: cannot be combined with log: true")
        if self.log and self.low <= 0:
            raise ValueError(f"low: {self.low} must be above 0 with log: true")
        return self


class Objective(Section):
    """A number of result.json that a search makes large or small."""

    name: str
    direction: Literal["maximize", "minimize"] = "maximize"


class Search(Section):
    """What a search tries, and what it looks for; see docs/search.md."""

    enable: bool = False
    n_trials: Count = 50
    space: dict[str, Dimension] = Field(default_factory=dict)
    """For any key of the file, by its path, such as method_settings.merge_ratio: {low: 0.3, high: 0.6}."""
    objectives: Annotated[tuple[Objective, ...], Field(min_length=1)] = (Objective(name="accuracy_hard"),)
    """One, or several for the trials that no other one beats in all of them."""
    pruner: Literal["median", "hyperband", "none"] | None = None
    """What ends bad trials early; None: median with one objective, none with several."""
    seed: Annotated[int, Field(ge=0)] = 0
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which no trial is begun any more."""

    @model_validator(mode="after")
    def _objectives_are_clear(self) -> Search:
        names = [objective.name for objective in self.objectives]
        if len(set(names)) < len(names):
            raise ValueError(f"objectives: {', '.join(names)}: each may stand there once")
        if len(names) > 1 and self.pruner not in (None, "none"):
            raise ValueError(f"pruner: {self.pruner} needs a single objective, and there are {len(names)}; write pruner: none")
        return self


class Manager(Section):
    """One training or a search over several, and where the trials of a search run."""

    mode: Literal["single", "optuna"] = "single"
    available_gpus: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Numbers of the GPUs that trials may use; none of them, or no CUDA: trials run on the CPU."""
    gpus_per_subtask: Count = 1
    """GPUs that a trial has for itself; with several it is trained in as many processes."""
    n_workers: Count | None = None
    """Trials at a time: on the CPU 1 if it is not given, on GPUs as many as there is room for."""
    storage: str | None = None
    """Where the study is kept, an address of a database as Optuna takes it; None: an SQLite file in the output folder."""
    study_name: str | None = None
    """None: the name of the file."""

    @model_validator(mode="after")
    def _gpus_suffice(self) -> Manager:
        given = self.available_gpus
        if len(set(given)) < len(given):
            raise ValueError(f"available_gpus: {list(given)} has one of them twice")
        if given and self.gpus_per_subtask > len(given):
            raise ValueError(f"gpus_per_subtask: {self.gpus_per_subtask} are more than the {len(given)} of available_gpus")
        if self.storage is not None and "://" not in self.storage:
            raise ValueError(f"storage: {self.storage!r} is no address; for example sqlite:///study.db")
        return self


class Training(Section):
    """A file that can be trained, and searched."""

    several_processes: ClassVar[bool] = False
    """Whether it can be trained by several processes at once, each with a GPU."""

    manager_settings: Manager = Manager()
    search_settings: Search = Search()

    @property
    def searches(self) -> bool:
        """Whether `tokensieve train` makes a search of it: either switch turns it on."""
        return self.manager_settings.mode == "optuna" or self.search_settings.enable

    @model_validator(mode="after")
    def _processes_fit(self) -> Training:
        if self.manager_settings.gpus_per_subtask > 1 and not self.several_processes:
            raise ValueError("manager_settings.gpus_per_subtask: this is trained by one process, on one GPU; write 1")
        return self

    def outside(self) -> Iterable[tuple[str, str]]:
        """What is wrong outside the file, such as data that is not there: the path of a key, and a message."""
        return ()

    def notes(self) -> Iterable[str]:
        """What is odd outside the file, and yet no mistake."""
        return ()


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


class ClipTraining(Training):
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


class CaptionTraining(Training):
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


QuestionKind = Literal["colour", "shape", "count", "position", "presence", "place"]


class LlavaPhase(Section):
    """A stretch of training in which every picture has so many questions."""

    steps: Count
    batch: Count = 16
    """Pictures in a step."""
    questions: Annotated[int, Field(ge=0)] = 8
    """Questions about each picture; with 0 only the patches are named, which needs no language model."""
    kinds: Annotated[tuple[QuestionKind, ...], Field(min_length=1)] = ("colour", "shape", "count", "position", "presence")
    """The kinds of questions, which take turns; one that stands here twice comes twice as often."""
    layers: Count | None = None
    """How many of the language model's layers run, evenly spread; the others wait and pass everything on. None: all."""
    patches: Annotated[float, Field(ge=0)] = 1.0
    """Weight of naming what lies in each patch beside the answers."""
    places: Annotated[float, Field(ge=0)] = 1.0
    """Weight of telling where in the picture each patch lies."""
    lr: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] | None = None
    """Learning rate at the first and at the last step, with a straight line between; None: the optimizer's."""

    @model_validator(mode="after")
    def _every_picture_has_questions(self) -> LlavaPhase:
        if set(self.kinds) == {"position"}:
            raise ValueError("kinds: a picture of one object has no positions; add another kind")
        return self


class LlavaTraining(Training):
    """`tokensieve train configs/embedded_llava.yaml`: a LLaVA learns to answer questions on a CLIP's vision tower."""

    task: Literal["llava"]
    output: Path
    start: str = "scenes-v1"
    """The embedded weights whose vision tower it begins with."""
    layers: Count = 12
    """Layers of the language model."""
    seed: Annotated[int, Field(ge=0)] = 0
    optimizer: Optimizer = Optimizer()
    horizon: Count | None = None
    """For how many steps the optimizer's learning rate is planned; None: for all."""
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
        if any(phase.layers is not None and phase.layers > self.layers for phase in self.phases):
            raise ValueError(f"phases: there are no more than the {self.layers} layers")
        return self


class SelectorTraining(Training):
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
CIRCUMSTANCES = {
    *("output", "workers", "threads", "device", "model_cache_dir", "checkpoint_every", "evaluate", "val_images"),
    *("manager_settings", "search_settings"),
}


def recipe(config: Section) -> dict[str, Any]:
    """What decides the result of a training: all of its file but the circumstances."""
    decided: dict[str, Any] = json.loads(config.model_dump_json(exclude=CIRCUMSTANCES))
    return decided


def check_recipe(now: Mapping[str, Any], begun: Mapping[str, Any]) -> None:
    """A UserError if a run that was begun with one recipe is to be resumed with another."""
    changed = list(_changed(begun, now))
    if changed:
        raise UserError(
            f"the run was begun with other values of {', '.join(changed)}; "
            "restore them in the configuration, or begin a new run with another --output"
        )


def _changed(begun: Any, now: Any, at: str = "") -> Iterator[str]:
    """The keys whose values differ, with their sections."""
    if not (isinstance(begun, Mapping) and isinstance(now, Mapping)):
        if begun != now:
            yield at
        return
    for key in {**begun, **now}:
        yield from _changed(begun.get(key), now.get(key), f"{at}.{key}" if at else key)


TASKS: dict[str, type[Training]] = {
    "clip": ClipTraining,
    "captions": CaptionTraining,
    "llava": LlavaTraining,
    "learned_selector": SelectorTraining,
}
# Sections by which a file is known that has no `task:`, those of S4 and those of S5.
PRUNING = ("method_settings", "trainer_settings", "dataset_settings", "backbone_settings")
REID = ("MODEL", "INPUT", "DATASETS", "DATALOADER", "SOLVER", "TEST")
OUTPUTS = ("output", "OUTPUT_DIR")  # how files call the folder of a run


def load(path: str | Path) -> Any:
    """Read and check a training file: a section of its task. Raises UserError, in one line, with every mistake in it."""
    document = validation.Document(Path(path))
    schema = schema_of(document)
    return validation.check(document, schema, [*document.doubles, *check_space(document, schema)])


def schema_of(document: validation.Document) -> type[Training]:
    """The type of a file: its task's, or, if it has the sections of S4 or S5, that of a pruning or a re-identification."""
    task = document.data.get("task")
    if task in TASKS:
        return TASKS[task]
    if task is None and any(nearest(str(key), REID) for key in document.data):
        from tokensieve.config_reid import ReidTraining

        return ReidTraining
    if task is None and any(nearest(str(key), PRUNING) for key in document.data):
        from tokensieve.config_pruning import PruningTraining

        return PruningTraining
    options = f"{', '.join(TASKS)}; or write method_settings, or MODEL"
    if "task" not in document.data:
        raise validation.Mistakes(document.path, [document.mistake(("task",), f"missing; one of {options}")])
    wrong = f"{task!r} is not one of {options}.{did_you_mean(str(task), TASKS)}"
    raise validation.Mistakes(document.path, [document.mistake(("task",), wrong)])


def validate(files: Iterable[str | Path]) -> int:
    """Print every mistake of the files, one a line as FILE:LINE: KEY: MESSAGE, or that there is none; the exit code."""
    code = 0
    for file in files:
        try:
            config = load(file)
            check_outside(file, config)
            notes = list(config.notes())
        except UserError as error:
            code = 2
            print("\n".join(error.lines) if isinstance(error, validation.Mistakes) else error)
        else:
            print(f"{file}: ok: {_summary(config)}")
            for note in notes:
                print(f"{file}: note: {note}")
    return code


def _summary(config: Training) -> str:
    about = (type(config).__doc__ or "").split("`: ")[-1].removesuffix(".")
    search = config.search_settings
    if search.space:
        about += f"; {search.n_trials} trials over {', '.join(search.space)}{'' if config.searches else ' (not turned on)'}"
    return about


def check_outside(path: str | Path, config: Training) -> None:
    """Mistakes for what is wrong outside the file, with the lines that name it."""
    wrong = list(config.outside())
    if wrong:
        document = validation.Document(Path(path))
        raise validation.Mistakes(document.path, [document.mistake(key_path(key), told) for key, told in wrong])


def key_path(key: str) -> validation.Place:
    """The place that a path of keys means: "phases.0.steps" is ("phases", 0, "steps")."""
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def number_type(schema: type[Training], key: str) -> type[int] | type[float] | None:
    """What kind of number a key is; None where it is something else."""
    annotation = validation.annotation_at(schema, key_path(key))
    return annotation if annotation in (int, float) else None


def check_space(document: validation.Document, schema: type[Training]) -> Iterator[validation.Mistake]:
    """What is wrong with the keys that a search would change, and with ranges of what has none."""
    settings = document.data.get("search_settings")
    space = settings.get("space") if isinstance(settings, dict) else None
    known = [".".join(place) for place in validation.all_keys(schema)]
    fixed = ("manager_settings", "search_settings", *OUTPUTS, "task")
    free = [key for key in known if key.split(".")[0] not in fixed]
    manager = document.data.get("manager_settings")
    asked = isinstance(settings, dict) and settings.get("enable") is True
    asked |= isinstance(manager, dict) and manager.get("mode") == "optuna"
    if asked and not space:
        yield document.mistake(("search_settings", "space"), nothing_to_search(schema))
    for key, tried in space.items() if isinstance(space, dict) else ():
        ends = [tried.get(name) for name in ("low", "high", "step")] if isinstance(tried, dict) else []
        kind, wrong = number_type(schema, str(key)), None
        if str(key).split(".")[0] in fixed:
            wrong = "is the same for all trials and cannot be searched"
        elif validation.annotation_at(schema, key_path(str(key))) is None:
            wrong = f"no key of this file; write the whole path, such as {free[-1]}.{_near_path(str(key), free)}"
        elif any(end is not None for end in ends) and kind is None:
            wrong = "is not a number, so it has no range; give {choices: [...]}"
        elif kind is int and any(isinstance(end, float) and end != int(end) for end in ends):
            wrong = "is a whole number; give whole numbers for low, high and step"
        if wrong is not None:
            yield document.mistake(("search_settings", "space", str(key)), wrong)


def nothing_to_search(schema: type[Training]) -> str:
    """What is wrong with an empty space, with an example of the file's own keys."""
    rates = [".".join(place) for place in validation.all_keys(schema) if place[-1].lower() in ("lr", "base_lr")]
    return f"names nothing to search; for example space: {{{rates[0]}: {{low: 1e-5, high: 1e-2, log: true}}}}"


def _near_path(key: str, known: list[str]) -> str:
    """The nearest path: one that ends in the same word, or is spelt alike."""
    last = key.split(".")[-1]
    same = [path for path in known if path.split(".")[-1] == last]
    return f" Did you mean {same[0]!r}?" if same else did_you_mean(key, known)
