"""The file of the training `reid`, for example configs/RGBNT201/DeMo_SDTPS.yml; keys in capitals, as is usual in the field.

The defaults are the usual recipe for RGBNT201. What depends on the file alone is checked here; what needs the model and the
data is checked in training.py, before the first step.
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
from tokensieve.config.section import (
    Batch,
    Count,
    CountOrZero,
    FilePath,
    Fraction,
    KeepCheckpoints,
    PairBatch,
    Positive,
    Probability,
    Problems,
    Rate,
    Section,
    Seed,
    Share,
    Size,
    Temperature,
    Text,
    Threads,
    Weight,
    Workers,
)
from tokensieve.errors import UserError, did_you_mean, one_line, short
from tokensieve.reid.arguments import Arguments
from tokensieve.reid.layouts import NAMES, OWN_PREFIXES
from tokensieve.reid.published_keys import PublishedSection, unused_note

Mean = Annotated[float, Field(ge=-1000, le=1000)]
Deviation = Annotated[float, Field(ge=1e-4, le=1000)]
Modality = Literal["RGB", "NI", "TI"]
WARM, COLD = 0.01, 0.002  # factors of the learning rate at the start of the warm-up and at the end of the cosine
OPENAI_NAMES = ("ViT-B-32", "ViT-B-16", "ViT-L-14")  # of OpenAI's weights, whose activation has names of its own in open_clip


class Model(PublishedSection):
    """The vision transformer, the reduction after or inside it, and the losses."""

    fixed: ClassVar = {
        "DIRECT": (1, "the modalities of a branch are concatenated and have one classifier; write DIRECT: 1"),
        "NECK": ("bnneck", "every branch has a BNNeck; write bnneck"),
        "ID_LOSS_TYPE": ("softmax", "the identity loss is cross-entropy; write softmax"),
        "METRIC_LOSS_TYPE": ("triplet", "the metric loss is a triplet loss; write triplet"),
        "NO_MARGIN": (True, "triplets have a soft margin; write True"),
        "IF_LABELSMOOTH": (True, "set LABEL_SMOOTH: 0 instead"),
        "DIST_TRAIN": (False, "several processes are started by torchrun -m tokensieve train; write False"),
        "SDTPS_CROSS_ATTN_TYPE": ("cosine", "patches are compared by cosines; write cosine"),
    }
    absent: ClassVar = {
        "HDM": "hierarchical decoupling module",
        "ATM": "attention-triggered mixture of experts",
        "GLOBAL_LOCAL": "fusion of global features with pooled patches",
        "USE_SACR": "contextual refinement (SACR)",
        "USE_MULTIMODAL_SACR": "contextual refinement (SACR)",
        "USE_LIF": "quality-aware fusion (LIF)",
        "USE_DGAF": "dual-gated fusion (DGAF)",
        "PROMPT": "prompt tuning",
        "ADAPTER": "adapters",
        "FROZEN": "training with a frozen backbone",
        "IF_WITH_CENTER": "center loss",
        "SIE_VIEW": "embedding of viewpoints",
    }
    unused: ClassVar = (
        *("HEAD", "NAME", "DEVICE", "DEVICE_ID", "PRETRAIN_PATH_T", "SDTPS_CROSS_ATTN_HEADS"),
        *("SACR_", "MULTIMODAL_SACR_", "LIF_", "DGAF_"),
    )

    USE_SDTPS: bool = True
    SDTPS_SPARSE_RATIO: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the patches that is selected."""
    SDTPS_AGGR_RATIO: Share = 0.4
    """Share of the selected ones that is left after aggregation."""
    SDTPS_BETA: Annotated[float, Field(ge=0, le=0.5)] = 0.25
    """Weight of the similarities with the global features; that of the learned score is 1 - 2 * beta."""
    SDTPS_USE_GUMBEL: bool = False
    SDTPS_GUMBEL_TAU: Temperature = 1.0
    """Temperature of Gumbel's softmax."""
    SDTPS_GUMBEL_MASS: Literal["kept", "one"] = "kept"
    """Sum of Gumbel's soft decisions: the number of selected patches, or 1 as a softmax has."""
    PLAN: Text | None = None
    """The plan, such as random@out:26 or sdtps@6; None: sdtps@out, or none without USE_SDTPS."""
    LIBRARY: Literal["open_clip", "timm", "hf"] = "open_clip"
    TRANSFORMER_TYPE: Text = "ViT-B-16-quickgelu"
    PRETRAINED: Text = "openai"
    """A tag of the library, an embedded name, the folder of an earlier training, or "" (default of timm and hf): random."""
    ARGUMENTS: Arguments = Field(default_factory=dict)
    """More arguments of timm.create_model."""
    STRIDE_SIZE: tuple[Size, Size] | None = None
    """None: the patch size. Other strides are not supported."""
    MODALITIES: Annotated[tuple[Modality, ...], Field(min_length=1, max_length=3)] = ("RGB", "NI", "TI")
    SHARED_BACKBONE: bool = True
    """One transformer for all modalities, or one for each."""
    SIE_CAMERA: bool = True
    """An embedding of the camera is added to all tokens, before the first block."""
    SIE_COE: Weight = 1.0
    """Its weight."""
    ID_LOSS_WEIGHT: Weight = 0.25
    TRIPLET_LOSS_WEIGHT: Weight = 1.0
    SDTPS_LOSS_WEIGHT: Weight = 2.0
    """Factor of both losses of the tokens branch; that of the plain branch is 1."""
    INIT_FROM: Text = ""
    """Folder of an earlier training of this model, of which it takes all weights that it has too; "": only PRETRAINED's."""
    TEACHER: Text = ""
    """Folder of an earlier training whose features, with all tokens, are imitated; "": none."""
    TEACHER_LOSS_WEIGHT: Weight = 1.0
    """Weight of the squared distance from the teacher's features, relative to their spread, of each branch."""
    LABEL_SMOOTH: Probability = 0.1

    @property
    def plan(self) -> str:
        return self.PLAN if self.PLAN is not None else "sdtps@out" if self.USE_SDTPS else "none"

    @model_validator(mode="before")
    @classmethod
    def _default_pretrained(cls, values: Any) -> Any:
        """The default openai is a tag of open_clip; there ViT-B-16 of OpenAI has the activation of ViT-B-16-quickgelu."""
        if not isinstance(values, dict):
            return values
        if values.get("LIBRARY") in ("timm", "hf"):
            return {"PRETRAINED": "", **values}
        if values.get("TRANSFORMER_TYPE") in OPENAI_NAMES and values.get("PRETRAINED", "openai") == "openai":
            return {**values, "TRANSFORMER_TYPE": f"{values['TRANSFORMER_TYPE']}-quickgelu"}
        return values

    @model_validator(mode="after")
    def _check_model(self) -> Model:
        from tokensieve.plan import Plan  # imports torch

        problems = []
        if len(set(self.MODALITIES)) < len(self.MODALITIES):
            problems.append(f"MODALITIES: {', '.join(self.MODALITIES)}: list each of them once")
        if self.ARGUMENTS and self.LIBRARY != "timm":
            problems.append(f"ARGUMENTS: only timm's models take them, and LIBRARY is {self.LIBRARY}")
        if self.ID_LOSS_WEIGHT == self.TRIPLET_LOSS_WEIGHT == 0 and not (self.TEACHER and self.TEACHER_LOSS_WEIGHT):
            problems.append("ID_LOSS_WEIGHT: 0, as TRIPLET_LOSS_WEIGHT is, and no TEACHER: there is nothing to learn from")
        try:
            names = {step.method.name for step in Plan.parse(self.plan).steps}
        except ValueError as error:
            problems.append(f"PLAN: {one_line(error)}")
        else:
            if "USE_SDTPS" in self.model_fields_set and ("sdtps" in names) != self.USE_SDTPS:
                problems.append(f"USE_SDTPS: {self.USE_SDTPS} and PLAN: {self.plan} contradict; leave one of them out")
        if problems:
            raise Problems(problems)
        return self


class Input(PublishedSection):
    """The model's input. Training and test use the same size, since the model has one grid of positions."""

    other_names: ClassVar = {"SIZE_TRAIN": "SIZE", "SIZE_TEST": "SIZE"}

    SIZE: tuple[Size, Size] = (256, 128)
    """Height and width; 128 x 256 for vehicles."""
    PROB: Fraction = 0.5
    """Probability of a mirrored object."""
    PADDING: Annotated[int, Field(ge=0, le=10**4)] = 10
    """Pixels of padding around the image, before a crop of the old size."""
    RE_PROB: Fraction = 0.5
    """Probability of an erased rectangle."""
    PIXEL_MEAN: tuple[Mean, Mean, Mean] = (0.5, 0.5, 0.5)
    PIXEL_STD: tuple[Deviation, Deviation, Deviation] = (0.5, 0.5, 0.5)


class Datasets(Section):
    NAMES: Text = "RGBNT201"
    """RGBNT201, RGBNT100, MSVR310, an embedded one, or objects of your own: folder:DIR, csv:FILE."""
    ROOT_DIR: Text = "root"
    """The folder that holds the data set's own; embedded ones are drawn by code and need none."""
    VAL_IDENTITIES: CountOrZero = 30
    """Training identities held out to choose the best weights; 0: train on all, and use the last weights."""

    @field_validator("NAMES", mode="before")
    @classmethod
    def _read_python(cls, value: Any) -> Any:
        """Published files write NAMES: ('RGBNT201'), which YAML reads as a text with brackets and quotes."""
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if not isinstance(value, str) or value.startswith(OWN_PREFIXES):
            return value
        return value.strip("()[], ").strip("'\"")

    @field_validator("NAMES")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value in NAMES or value.startswith(OWN_PREFIXES):
            return value
        known = ", ".join((*NAMES, *OWN_PREFIXES))
        raise ValueError(f"{short(repr(value), 60)} is not one of {known}.{did_you_mean(value, NAMES)}")


class Dataloader(PublishedSection):
    fixed: ClassVar = {"SAMPLER": ("softmax_triplet", "batches have several objects of each identity; write softmax_triplet")}

    NUM_INSTANCE: PairBatch = 8
    """Shots of each identity in a batch."""
    NUM_WORKERS: Workers = 4
    DROP_MODALITY: Probability = 0.0
    """Probability, for each modality, that a batch lacks it (one always stays), for robustness to missing ones."""
    KEEP_IN_MEMORY: bool = False
    """Read every image once and keep it in memory, at its input size."""
    MAX_BROKEN: Fraction = 0.01
    """The largest allowed share of objects, rounded up, that are unreadable, lack a modality or are misnamed."""

    def allowed(self, objects: int) -> int:
        """How many of this many objects may be unreadable."""
        return math.ceil(self.MAX_BROKEN * objects)


class Solver(PublishedSection):
    """Length, batch size and learning rates of the training."""

    other_names: ClassVar = {"WARMUP_ITERS": "WARMUP_EPOCHS", "LR_SCHEDULER": "SCHEDULE"}  # the authors count epochs too
    fixed: ClassVar = {
        "WARMUP_METHOD": ("linear", "the warm-up is linear; write linear"),
        "WARMUP_FACTOR": (WARM, f"the warm-up starts at {WARM} of the learning rate; write {WARM}"),
        "LARGE_FC_LR": (False, "classifiers have BASE_LR; write False"),
    }
    unused: ClassVar = (
        *("LOG_PERIOD", "MARGIN", "CLUSTER_MARGIN", "CENTER_", "RANGE_", "COSINE_", "GAMMA", "STEPS", "MOMENTUM"),
        *("BIAS_LR_FACTOR", "WEIGHT_DECAY_BIAS"),
    )

    IMS_PER_BATCH: Batch = 64
    """Objects per step, of all processes together; each has an image of every modality."""
    OPTIMIZER_NAME: Literal["Adam", "AdamW"] = "Adam"
    BASE_LR: Rate = 3.5e-4
    BACKBONE_LR: Rate = 5e-6
    """Learning rate of the vision transformer's own weights."""
    WEIGHT_DECAY: Weight = 1e-4
    SCHEDULE: Literal["cosine", "constant"] = "cosine"
    """Schedule of both learning rates after the warm-up."""
    WARMUP_EPOCHS: Weight = 10.0
    MAX_EPOCHS: Batch = 50
    MAX_STEPS: Count | None = None
    """Maximum number of steps, whatever the epochs."""
    CLIP: Positive | None = None
    """Maximum norm of the gradient; None: no clipping."""
    SEED: Seed = 1111
    MIXED_PRECISION: Literal["auto", "no", "fp16", "bf16"] = "auto"
    """auto: fp16 on CUDA, else none."""
    EVAL_PERIOD: Positive | None = 5.0
    """Epochs between evaluations; None: only at the end."""
    CHECKPOINT_PERIOD: Positive = 5.0
    """Epochs between checkpoints."""
    KEEP_CHECKPOINTS: KeepCheckpoints = 2
    DEVICE: Text | None = None
    THREADS: Threads | None = None

    @field_validator("MIXED_PRECISION", mode="before")
    @classmethod
    def _accept_no(cls, value: Any) -> Any:
        """YAML reads `no` as false."""
        return "no" if value is False else value

    def rate(self, step: int, steps: int, warmup: int) -> float:
        """The factor of the learning rates at a step."""
        if step < warmup:
            return WARM + (1 - WARM) * (step + 1) / warmup
        if self.SCHEDULE == "constant":
            return 1.0
        done = (step - warmup) / max(1, steps - warmup)
        return COLD + (1 - COLD) * (1 + math.cos(math.pi * done)) / 2


class Test(PublishedSection):
    fixed: ClassVar = {
        "MISS": ("nothing", "tokensieve eval --task reid --modalities NI,TI compares without one; write nothing"),
        "FEAT_NORM": ("yes", "features are compared at unit length; write yes"),
        "RE_RANKING": ("no", "there is no re-ranking; write no"),
        "WEIGHT": ("", "tokensieve eval --task reid --model FOLDER tests a trained model; leave it empty"),
    }

    IMS_PER_BATCH: Batch = 128
    FEAT: Literal["both", "tokens", "plain"] = "both"
    """The feature that is compared: that of the reduced tokens, the plain global one, or both concatenated."""
    NECK_FEAT: Literal["before", "after"] = "before"
    """Features before or after the batch norm at the neck."""


class ReidSearch(Search):
    objectives: Annotated[tuple[Objective, ...], Field(min_length=1, max_length=10)] = (Objective(name="mAP"),)


class ReidTraining(Training):
    """For example configs/RGBNT201/DeMo_SDTPS.yml."""

    several_processes: ClassVar[bool] = True
    output_key: ClassVar[str] = "OUTPUT_DIR"

    MODEL: Model = Model()
    INPUT: Input = Input()
    DATASETS: Datasets = Datasets()
    DATALOADER: Dataloader = Dataloader()
    SOLVER: Solver = Solver()
    TEST: Test = Test()
    OUTPUT_DIR: FilePath = Path("outputs/reid")
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

    @property
    def device(self) -> str | None:
        return self.SOLVER.DEVICE

    @property
    def keep_checkpoints(self) -> int | str:
        return self.SOLVER.KEEP_CHECKPOINTS

    @model_validator(mode="after")
    def _check_numbers(self) -> ReidTraining:
        solver, each, problems = self.SOLVER, self.DATALOADER.NUM_INSTANCE, []
        if solver.IMS_PER_BATCH % each:
            near = max(1, round(solver.IMS_PER_BATCH / each)) * each
            problems.append(
                f"SOLVER.IMS_PER_BATCH: {solver.IMS_PER_BATCH} is not a multiple of DATALOADER.NUM_INSTANCE: {each}; "
                f"write {near}"
            )
        elif each == solver.IMS_PER_BATCH and self.MODEL.TRIPLET_LOSS_WEIGHT:
            problems.append(f"SOLVER.IMS_PER_BATCH: {each} are a single identity, and a triplet needs two; write {2 * each}")
        if solver.WARMUP_EPOCHS >= solver.MAX_EPOCHS:
            problems.append(
                f"SOLVER.WARMUP_EPOCHS: {solver.WARMUP_EPOCHS:g} is not less than the {solver.MAX_EPOCHS} of MAX_EPOCHS"
            )
        if problems:
            raise Problems(problems)
        return self

    def check_files(self) -> Iterator[tuple[str, str]]:
        """A data set that cannot be read, with what is missing or misnamed; the embedded ones need no files."""
        from tokensieve.reid import data as reid_data  # imports torch
        from tokensieve.reid import layouts

        data = self.DATASETS
        if data.NAMES in layouts.EMBEDDED:
            return
        try:
            reid_data.load(data.NAMES, data.ROOT_DIR, "train", data.VAL_IDENTITIES, self.MODEL.MODALITIES)
        except UserError as error:
            yield "DATASETS", str(error).replace("--dataset_root", "DATASETS.ROOT_DIR")
        for problem in reid_data.check_dataset(data.NAMES, data.ROOT_DIR, self.MODEL.MODALITIES, strips=False):
            if problem.startswith(layouts.OVERLAP_MESSAGE):
                yield "DATASETS", f"{problem}: test results would be measured on training data; remove them from one of the two"

    def notes(self) -> Iterator[str]:
        """Keys that are not used, and what is missing or misnamed in a data set that can be read."""
        if note := self.unused_note():
            yield note
        from tokensieve.reid import data as reid_data  # imports torch
        from tokensieve.reid import layouts

        data = self.DATASETS
        if data.NAMES not in layouts.EMBEDDED:
            for problem in reid_data.check_dataset(data.NAMES, data.ROOT_DIR, self.MODEL.MODALITIES):
                yield f"DATASETS: {data.NAMES}: {problem}"

    def unused_note(self) -> str:
        """The published keys of the file that are not used; "" if there are none."""
        return unused_note((name, getattr(self, name)) for name in type(self).model_fields)

    def recipe(self) -> dict[str, Any]:
        """The keys of the file that decide the result, without those that set where and how it runs."""
        recipe: dict[str, Any] = json.loads(
            self.model_dump_json(exclude={"OUTPUT_DIR": True, "manager_settings": True, "search_settings": True})
        )
        del recipe["DATASETS"]["ROOT_DIR"], recipe["TEST"]["IMS_PER_BATCH"]
        for key in ("NUM_WORKERS", "KEEP_IN_MEMORY"):
            del recipe["DATALOADER"][key]
        for key in ("DEVICE", "THREADS", "CHECKPOINT_PERIOD", "KEEP_CHECKPOINTS"):
            del recipe["SOLVER"][key]
        return recipe
