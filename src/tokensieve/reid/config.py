"""The file of S5's training, configs/RGBNT201/DeMo_SDTPS.yml: sections and keys in capitals, as files of the field have them.

The defaults are the field's recipe for RGBNT201. What can be known from the file alone is checked here; what needs the model
and the data, in training/reid.py, before the first step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from tokensieve.config.schema import Training
from tokensieve.config.search import Objective, Search
from tokensieve.config.section import Count, Fraction, Section
from tokensieve.errors import UserError, one_line

Weight = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Channels = tuple[float, float, float]
Modality = Literal["RGB", "NI", "TI"]
WARM, COLD = 0.01, 0.002  # learning rate from which the warm-up rises, and to which the cosine falls, as parts of the full one


class Model(Section):
    """The vision transformer, the reduction after or inside it, and the losses."""

    USE_SDTPS: bool = True
    SDTPS_SPARSE_RATIO: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Part of the patches that is selected."""
    SDTPS_AGGR_RATIO: Share = 0.4
    """Part of the selected ones that is left after aggregation."""
    SDTPS_BETA: Annotated[float, Field(ge=0, le=0.5)] = 0.25
    """Weight of the similarities with the global features; that of the learned score is 1 - 2 * beta."""
    SDTPS_USE_GUMBEL: bool = False
    PLAN: str | None = None
    """What is done to the tokens, such as random@out:26 or sdtps@6; None: sdtps@out, or none without USE_SDTPS."""
    LIBRARY: Literal["open_clip", "timm", "hf"] = "open_clip"
    TRANSFORMER_TYPE: str = "ViT-B-16-quickgelu"
    PRETRAINED: str = "openai"
    """A tag of the library's, an embedded name, the folder of an earlier training, or "" (default of timm and hf): random."""
    ARGUMENTS: dict[str, Any] = Field(default_factory=dict)
    """More for timm.create_model."""
    STRIDE_SIZE: tuple[Count, Count] | None = None
    """None: the patch size, which is the only one there is; another is refused."""
    MODALITIES: Annotated[tuple[Modality, ...], Field(min_length=1)] = ("RGB", "NI", "TI")
    SHARED_BACKBONE: bool = True
    """One transformer for all modalities, or one for each."""
    SIE_CAMERA: bool = True
    """An embedding of the camera is added to all tokens, before the first block."""
    SIE_COE: Weight = 1.0
    """Its weight."""
    ID_LOSS_WEIGHT: Weight = 0.25
    TRIPLET_LOSS_WEIGHT: Weight = 1.0
    LABEL_SMOOTH: Annotated[float, Field(ge=0, lt=1)] = 0.1

    @property
    def plan(self) -> str:
        return self.PLAN if self.PLAN is not None else "sdtps@out" if self.USE_SDTPS else "none"

    @model_validator(mode="before")
    @classmethod
    def _openai_is_of_open_clip(cls, given: Any) -> Any:
        others = isinstance(given, dict) and given.get("LIBRARY") in ("timm", "hf")
        return {"PRETRAINED": "", **given} if others else given

    @model_validator(mode="after")
    def _fits_together(self) -> Model:
        from tokensieve.plan import Plan

        wrong = []
        if len(set(self.MODALITIES)) < len(self.MODALITIES):
            wrong.append(f"MODALITIES: {', '.join(self.MODALITIES)}: each may stand there once")
        if self.ARGUMENTS and self.LIBRARY != "timm":
            wrong.append(f"ARGUMENTS: only timm's models take them, and LIBRARY is {self.LIBRARY}")
        if self.ID_LOSS_WEIGHT == self.TRIPLET_LOSS_WEIGHT == 0:
            wrong.append("ID_LOSS_WEIGHT: 0, as TRIPLET_LOSS_WEIGHT is, so there is nothing to learn from")
        try:
            names = {step.method.name for step in Plan.parse(self.plan).steps}
        except ValueError as error:
            wrong.append(f"PLAN: {one_line(error)}")
        else:
            if "USE_SDTPS" in self.model_fields_set and ("sdtps" in names) != self.USE_SDTPS:
                wrong.append(f"USE_SDTPS: {self.USE_SDTPS} and PLAN: {self.plan} contradict; leave one of them out")
        if wrong:
            raise ValueError("; ".join(wrong))
        return self


class Input(Section):
    """Images as the model sees them. Training and test have the same size, since the model has one grid of positions."""

    SIZE: tuple[Count, Count] = (256, 128)
    """Height and width; 128 x 256 for vehicles."""
    PROB: Fraction = 0.5
    """Of a mirrored object."""
    PADDING: Annotated[int, Field(ge=0)] = 10
    """Pixels around the image, before a crop of the old size."""
    RE_PROB: Fraction = 0.5
    """Of a rectangle that is erased."""
    PIXEL_MEAN: Channels = (0.5, 0.5, 0.5)
    PIXEL_STD: tuple[Rate, Rate, Rate] = (0.5, 0.5, 0.5)


class Datasets(Section):
    NAMES: Literal["RGBNT201", "RGBNT100", "MSVR310", "embedded-reid", "embedded-reid-pretrain"] = "RGBNT201"
    """One of them."""
    ROOT_DIR: str = "root"
    """The folder that holds the data set's own; embedded ones are drawn by code and need none."""
    VAL_IDENTITIES: Annotated[int, Field(ge=0)] = 30
    """Training identities kept aside, by which the best weights are chosen; 0: all are trained on, and the last are taken."""


class Dataloader(Section):
    NUM_INSTANCE: Annotated[int, Field(ge=2)] = 8
    """Shots of each identity in a batch."""
    NUM_WORKERS: Annotated[int, Field(ge=0)] = 4
    DROP_MODALITY: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability, for each modality, that a batch lacks it (one stays), so that the model gets used to that."""
    KEEP_IN_MEMORY: bool = False
    """Read every image once and hold it, at its size as input."""
    MAX_BROKEN: Fraction = 0.01
    """The share of objects, rounded up, that may be unreadable, or left out since they lack a modality or are misnamed."""

    def allowed(self, objects: int) -> int:
        """How many of so many may be unreadable."""
        return math.ceil(self.MAX_BROKEN * objects)


class Solver(Section):
    """How long, how much at once, how fast."""

    IMS_PER_BATCH: Count = 64
    """Objects in a step, of all processes together; each has an image of every modality."""
    OPTIMIZER_NAME: Literal["Adam", "AdamW"] = "Adam"
    BASE_LR: Rate = 3.5e-4
    BACKBONE_LR: Rate = 5e-6
    """Of the vision transformer's own weights."""
    WEIGHT_DECAY: Weight = 1e-4
    SCHEDULE: Literal["cosine", "constant"] = "cosine"
    """Of both learning rates, after the warm-up."""
    WARMUP_EPOCHS: Weight = 10.0
    MAX_EPOCHS: Count = 50
    MAX_STEPS: Count | None = None
    """Steps at most, whatever the epochs."""
    CLIP: Rate | None = None
    """Largest norm of the gradient; None: any."""
    SEED: Annotated[int, Field(ge=0)] = 1111
    MIXED_PRECISION: Literal["auto", "no", "fp16", "bf16"] = "auto"
    """auto: fp16 on CUDA, else none."""
    EVAL_PERIOD: Rate | None = 5.0
    """Epochs from one evaluation to the next; None: at the end only."""
    CHECKPOINT_PERIOD: Rate = 5.0
    """Epochs from one checkpoint to the next."""
    DEVICE: str | None = None
    THREADS: Count | None = None

    @field_validator("MIXED_PRECISION", mode="before")
    @classmethod
    def _no_is_a_word(cls, value: Any) -> Any:
        """YAML takes `no` for false."""
        return "no" if value is False else value

    def rate(self, step: int, steps: int, warmup: int) -> float:
        """The part of the learning rates that a step has."""
        if step < warmup:
            return WARM + (1 - WARM) * (step + 1) / warmup
        if self.SCHEDULE == "constant":
            return 1.0
        done = (step - warmup) / max(1, steps - warmup)
        return COLD + (1 - COLD) * (1 + math.cos(math.pi * done)) / 2


class Test(Section):
    IMS_PER_BATCH: Count = 128
    FEAT: Literal["both", "tokens", "plain"] = "both"
    """What is compared: the feature of the reduced tokens, the plain global one, or both side by side."""
    NECK_FEAT: Literal["before", "after"] = "before"
    """Before or after the batch norm at the neck."""


class ReidSearch(Search):
    objectives: Annotated[tuple[Objective, ...], Field(min_length=1)] = (Objective(name="mAP"),)


class ReidTraining(Training):
    """`tokensieve train configs/RGBNT201/DeMo_SDTPS.yml`: a vision transformer learns to re-identify by several modalities."""

    several_processes: ClassVar[bool] = True

    MODEL: Model = Model()
    INPUT: Input = Input()
    DATASETS: Datasets = Datasets()
    DATALOADER: Dataloader = Dataloader()
    SOLVER: Solver = Solver()
    TEST: Test = Test()
    OUTPUT_DIR: Path = Path("outputs/reid")
    search_settings: ReidSearch = ReidSearch()

    @property
    def task(self) -> str:
        return "reid"

    @property
    def output(self) -> Path:
        return self.OUTPUT_DIR

    @property
    def threads(self) -> int | None:
        return self.SOLVER.THREADS

    @model_validator(mode="after")
    def _numbers_fit(self) -> ReidTraining:
        solver, each, wrong = self.SOLVER, self.DATALOADER.NUM_INSTANCE, []
        if solver.IMS_PER_BATCH % each:
            near = max(1, round(solver.IMS_PER_BATCH / each)) * each
            wrong.append(
                f"SOLVER.IMS_PER_BATCH: {solver.IMS_PER_BATCH} is no multiple of DATALOADER.NUM_INSTANCE: {each}; write {near}"
            )
        elif each == solver.IMS_PER_BATCH and self.MODEL.TRIPLET_LOSS_WEIGHT:
            wrong.append(f"SOLVER.IMS_PER_BATCH: {each} are a single identity, and a triplet needs two; write {2 * each}")
        if solver.WARMUP_EPOCHS >= solver.MAX_EPOCHS:
            wrong.append(
                f"SOLVER.WARMUP_EPOCHS: {solver.WARMUP_EPOCHS:g} is not less than the {solver.MAX_EPOCHS} of MAX_EPOCHS"
            )
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def check_files(self) -> Iterator[tuple[str, str]]:
        """A data set that cannot be read, with what of it is missing or misnamed; the embedded ones are drawn when needed."""
        from tokensieve.reid import data as reid_data
        from tokensieve.reid import layouts

        given = self.DATASETS
        if given.NAMES in layouts.EMBEDDED:
            return
        try:
            reid_data.load(given.NAMES, given.ROOT_DIR, "train", given.VAL_IDENTITIES, self.MODEL.MODALITIES)
        except UserError as error:
            yield "DATASETS", str(error).replace("--dataset_root", "DATASETS.ROOT_DIR")
        for fault in reid_data.check(given.NAMES, given.ROOT_DIR, self.MODEL.MODALITIES, strips=False):
            if fault.startswith(layouts.OVERLAP_MESSAGE):
                yield "DATASETS", f"{fault}: numbers of the test would be of what was learned; take them out of one of the two"

    def notes(self) -> Iterator[str]:
        """All that is missing or misnamed in a data set that can be read."""
        from tokensieve.reid import data as reid_data
        from tokensieve.reid import layouts

        given = self.DATASETS
        if given.NAMES not in layouts.EMBEDDED:
            for fault in reid_data.check(given.NAMES, given.ROOT_DIR, self.MODEL.MODALITIES):
                yield f"DATASETS: {given.NAMES}: {fault}"

    def recipe(self) -> dict[str, Any]:
        """What decides the result: all of the file but where and how the work is done."""
        told: dict[str, Any] = json.loads(
            self.model_dump_json(exclude={"OUTPUT_DIR": True, "manager_settings": True, "search_settings": True})
        )
        del told["DATASETS"]["ROOT_DIR"], told["TEST"]["IMS_PER_BATCH"]
        for key in ("NUM_WORKERS", "KEEP_IN_MEMORY"):
            del told["DATALOADER"][key]
        for key in ("DEVICE", "THREADS", "CHECKPOINT_PERIOD"):
            del told["SOLVER"][key]
        return told
