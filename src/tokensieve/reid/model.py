"""Re-identification of objects seen in several modalities: one vision transformer, a branch for its global features and one for
its tokens.

    each modality   image -> backbone -> global feature (B, E), patches (B, N, E), by the backbone's own norm and projection
    plain branch    the global features of the modalities, one after another (B, M E)
    tokens branch   the patches that a plan leaves, their mean, one modality after another (B, M E)
    each branch     BNNeck (a batch norm without bias), classifier; triplets are compared before the neck

Modalities are a list. Those that are in a batch are run as one batch, one after another (modality-major), whether the backbone
is shared or each has its own; of a missing one the branches hold zeros. A plan is put on the model as on any other:
`apply(model, model.plan)`. There @out is after the projection, so SDTPS sees tokens of width E and all global features;
inside a shared backbone (@3) it sees the CLS tokens of that depth.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokensieve.cutting.placement import position_names
from tokensieve.errors import Uncuttable, UserError, describe_value, short
from tokensieve.methods.sdtps import Sdtps
from tokensieve.methods.settings import check_count, check_entries, check_number, check_positive
from tokensieve.models.features import get_image_features_with_tokens
from tokensieve.models.patching import PerThread
from tokensieve.models.pooling import weighted_mean
from tokensieve.models.registry import open_tower as open_any
from tokensieve.models.tower import Layout, Sizes, Undo
from tokensieve.parts.signature import token_width, width_at
from tokensieve.plan import Plan

BRANCHES = ("plain", "tokens")
CHOICES = {"library": ("open_clip", "timm", "hf"), "feature": (*BRANCHES, "both"), "neck": ("before", "after")}
MAX_SIDE, MAX_MODALITIES, MAX_DEPTH, MAX_WIDTH = 16_384, 20, 1000, 1_000_000  # of models that are read
SHARED = "shared"  # the name of the backbone that all modalities have


@dataclass(frozen=True)
class Settings:
    """All that builds a model again; plain values, for JSON."""

    library: str  # open_clip, timm or hf
    backbone: str
    image_size: tuple[int, int]  # (h, w)
    modalities: tuple[str, ...] = ("RGB", "NI", "TI")
    arguments: Mapping[str, Any] = field(default_factory=dict)  # more for timm.create_model; of hf, its configuration
    shared: bool = True
    cameras: int = 0  # 0: no camera embedding
    camera_weight: float = 1.0
    identities: int = 0  # 0: no classifiers
    plan: str = "none"  # what it was trained with
    sparse_ratio: float = 0.5
    aggr_ratio: float = 0.4
    beta: float = 0.25
    gumbel: bool = False
    tau: float = 1.0
    gumbel_mass: str = "kept"
    feature: str = "both"  # what is compared: plain, tokens, or both
    neck: str = "before"  # or after
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    data: str = ""  # what it was trained on, where that is known
    val_identities: int = 0  # how many of its identities were kept aside

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Settings:
        """As to_json wrote them; a UserError for what it does not know or lacks, and for values that mean nothing."""
        given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        unknown, needed = (
            given.keys() - {known.name for known in fields(cls)},
            {"library", "backbone", "image_size"} - given.keys(),
        )
        if unknown or needed:
            raise UserError(f"unknown settings: {short(sorted(unknown))}, lacking: {sorted(needed)}")
        settings = cls(**given)
        settings.check()
        return settings

    def check(self) -> None:
        """A UserError for values that mean nothing, or that would build a model without end."""
        for name, texts in CHOICES.items():
            if getattr(self, name) not in texts:
                raise UserError(f"{name} is one of {', '.join(texts)}, not {describe_value(getattr(self, name))}")
        for name in ("backbone", "plan", "data", "gumbel_mass"):
            if not isinstance(getattr(self, name), str):
                raise UserError(f"{name} is a text, not {describe_value(getattr(self, name))}")
        for name in ("shared", "gumbel"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} is true or false, not {describe_value(getattr(self, name))}")
        for name in ("cameras", "identities", "val_identities"):
            check_count(name, getattr(self, name), least=0)
        for name in ("camera_weight", "sparse_ratio", "aggr_ratio", "beta", "tau"):
            check_number(name, getattr(self, name))
        for name, length in {"image_size": 2, "mean": 3, "std": 3}.items():
            if not isinstance(values := getattr(self, name), tuple) or len(values) != length:
                raise UserError(f"{name} is a list of {length} numbers, not {describe_value(values)}")
        for side in self.image_size:
            check_count("a side of image_size", side, most=MAX_SIDE)
        for number, deviation in zip(self.mean, self.std, strict=True):
            check_number("mean", number)
            check_positive("std", deviation)
        check_entries("modalities", self.modalities, str)
        if len(self.modalities) > MAX_MODALITIES or not all(re.fullmatch(r"[A-Za-z0-9_-]{1,40}", m) for m in self.modalities):
            raise UserError(f"modalities are at most {MAX_MODALITIES} short names, not {describe_value(self.modalities)}")
        if not isinstance(self.arguments, dict):
            raise UserError(f"arguments is a table, not {describe_value(self.arguments)}")
        for name, value in self.arguments.items():
            if isinstance(value, int) and not abs(value) <= (MAX_DEPTH if re.search("depth|layers", name) else MAX_WIDTH):
                raise UserError(f"arguments: {short(name)} is too large: {describe_value(value)}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check_cameras(lowest: int, highest: int, settings: Settings) -> None:
    """A UserError if a model has no embedding of one of these cameras (from 0)."""
    if settings.cameras and not 0 <= lowest <= highest < settings.cameras:
        number = 1 + (lowest if lowest < 0 else highest)
        raise UserError(
            f"camera {number} of a model that was trained on {settings.cameras} (1, 2, ...), each with its own embedding: "
            "train on this data set, or without such embeddings (MODEL.SIE_CAMERA: False)"
        )


class Output(NamedTuple):
    """Of each branch the feature before the neck, (B, M E), and the classifier's answer (B, identities)."""

    features: dict[str, Tensor]
    logits: dict[str, Tensor]


class Neck(nn.ModuleDict):
    """A batch norm for each modality: one that is missing does not move its own, and stays 0."""

    def __init__(self, width: int, modalities: Sequence[str]) -> None:
        super().__init__({name: nn.BatchNorm1d(width) for name in modalities})
        for norm in self.values():
            norm.bias.requires_grad_(False)  # so that directions tell identities apart

    def forward(self, feature: Tensor, present: Sequence[str]) -> Tensor:
        """(B, M E) -> the same, normalised."""
        parts = zip(self.items(), feature.chunk(len(self), dim=-1), strict=True)
        return torch.cat([norm(part) if name in present else part for (name, norm), part in parts], dim=-1)


class Branch(nn.Module):
    """BNNeck and classifier of one feature."""

    def __init__(self, width: int, modalities: Sequence[str], identities: int) -> None:
        super().__init__()
        self.neck = Neck(width, modalities)
        width *= len(modalities)
        self.classifier = nn.Linear(width, identities, bias=False) if identities else None
        if self.classifier is not None:
            nn.init.normal_(self.classifier.weight, std=0.001)

    def forward(self, feature: Tensor, present: Sequence[str]) -> Tensor:
        """The classifier's answer: (B, M E) -> (B, identities)."""
        if self.classifier is None:
            raise UserError("this model was built without classifiers (identities = 0), so it cannot be trained")
        logits: Tensor = self.classifier(self.neck(feature, present))
        return logits


class ReidModel(nn.Module):
    """See above. Made by build.build() or loading.load()."""

    def __init__(self, settings: Settings, backbones: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.settings = settings
        self.modalities = settings.modalities
        self.backbones = nn.ModuleDict(backbones)
        self.head = nn.Identity()  # a plan's @out is here
        self._sizes: Sizes | None = None  # of the tokens of the call under way, while a plan that makes sizes is on
        self._call = PerThread()  # the camera embedding of the call under way in each thread
        for backbone in self.backbones.values() if settings.cameras else ():
            open_any(backbone).blocks[0].module.register_forward_pre_hook(self._add_camera)
        first = next(iter(self.backbones.values()))
        tower = open_any(first)
        if settings.cameras:
            self.camera = nn.Parameter(torch.empty(settings.cameras, token_width(tower)))
            nn.init.trunc_normal_(self.camera, std=0.02)
        self.grid, self.width = measure(first, settings.image_size)
        self.branches = nn.ModuleDict({name: Branch(self.width, self.modalities, settings.identities) for name in BRANCHES})
        self.parts = nn.ModuleDict()
        self.parts.update(make_parts(Plan.parse(settings.plan), self))

    @property
    def plan(self) -> str:
        return self.settings.plan

    def forward(self, inputs: Mapping[str, Tensor]) -> Output:
        """Images (B, 3, h, w) by modality, at least one of them, and "cameras" (B,) -> features and logits of both branches."""
        features, present = self.features(inputs), self.modalities_of(inputs)
        return Output(features, {name: branch(features[name], present) for name, branch in self.branches.items()})

    def encode(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """What is compared at test time, (B, F), its branches of unit length where there are two."""
        features, present = self.features(inputs), self.modalities_of(inputs)
        if self.settings.neck == "after":
            necks: dict[str, Any] = {name: branch.neck for name, branch in self.branches.items()}
            features = {name: necks[name](value, present) for name, value in features.items()}
        if self.settings.feature != "both":
            return features[self.settings.feature]
        return torch.cat([nn.functional.normalize(features[name].float(), dim=-1) for name in BRANCHES], dim=-1)

    def features(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of each branch (B, M E), zeros where a modality is missing."""
        present = self.modalities_of(inputs)
        whole, tokens = self._run({name: inputs[name] for name in present}, inputs.get("cameras"))
        x = self.head(torch.cat([whole[:, None], tokens], dim=1))  # (M B, 1+K, E), the plan's tokens
        sizes = self._sizes() if self._sizes is not None else None
        pooled = x[:, 1:].mean(1) if sizes is None else weighted_mean(x[:, 1:], sizes)
        return {"plain": self._joined(x[:, 0], present), "tokens": self._joined(pooled, present)}

    def modalities_of(self, inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
        """The modalities that are in a batch, in the model's order."""
        present = tuple(name for name in self.modalities if name in inputs)
        unknown = set(inputs) - {*self.modalities, "cameras"}
        if unknown or not present:
            present_names = ", ".join(sorted(unknown)) or "none of them"
            raise UserError(f"the model knows the modalities {', '.join(self.modalities)}; the batch has {present_names}")
        return present

    def _run(self, images: Mapping[str, Tensor], cameras: Tensor | None) -> tuple[Tensor, Tensor]:
        """Global features (M B, E) and tokens (M B, N, E) of the images of each modality."""
        if self.settings.shared:
            backbone = self.backbones[SHARED]
            every = None if cameras is None else cameras.repeat(len(images))
            return self._run_one(backbone, torch.cat(list(images.values())), every)
        found = [self._run_one(self.backbones[name], batch, cameras) for name, batch in images.items()]
        return torch.cat([whole for whole, _ in found]), torch.cat([tokens for _, tokens in found])

    def _run_one(self, backbone: nn.Module, images: Tensor, cameras: Tensor | None) -> tuple[Tensor, Tensor]:
        tower = open_any(backbone)
        with self._camera_embedding(cameras):
            whole, tokens = get_image_features_with_tokens(backbone, images, unscaled=True)
        assert tokens is not None
        return whole, tower.project(tokens)

    @contextmanager
    def _camera_embedding(self, cameras: Tensor | None) -> Iterator[None]:
        """Adds the embedding of its camera to every token before the first block; the mean camera's where it is not known."""
        if not self.settings.cameras:
            yield
            return
        if cameras is None:
            table = self.camera.mean(0, keepdim=True)
        else:
            check_cameras(int(cameras.min()), int(cameras.max()), self.settings)
            table = self.camera[cameras]  # (M B, D)
        outer, self._call.value = self._call.value, table
        try:
            yield
        finally:
            self._call.value = outer

    def _add_camera(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A hook on the first block of each backbone: (M B, P+N, D) -> same."""
        x, *others = args
        table = self._call.value
        return args if table is None else (x + (self.settings.camera_weight * table[:, None]).to(x.dtype), *others)

    def _joined(self, rows: Tensor, present: Sequence[str]) -> Tensor:
        """Rows of the present modalities (M B, E) side by side, zeros for the missing ones: (B, all M E)."""
        by_name = dict(zip(present, rows.chunk(len(present)), strict=True))
        missing = torch.zeros_like(next(iter(by_name.values())))
        return torch.cat([by_name.get(name, missing) for name in self.modalities], dim=-1)

    def weigh(self, sizes: Sizes) -> Undo:
        """The mean of the tokens counts each as often as it stands for patches."""
        self._sizes = sizes

        def undo() -> None:
            self._sizes = None

        return undo


def make_parts(plan: Plan, model: ReidModel) -> dict[str, nn.Module]:
    """The modules of the plan's trained methods, before any training."""
    made: dict[str, nn.Module] = {}
    for step in plan.steps:
        if step.method.part is None:
            continue
        if step.method.part is not Sdtps:
            raise UserError(f"{step}: of the trained methods a re-identification model learns sdtps only")
        tower = open_any(model)
        settings, where, places = model.settings, width_at(step.resolved_where(), model), position_names(step, tower)
        if step.method.name in made or len(places) > 1:
            raise UserError(f"{plan}: sdtps can stand at one place only")
        if where is None:
            raise Uncuttable(f"{step}: {tower.no_blocks_reason}; cut @out")
        made[step.method.name] = Sdtps(
            width=where,
            patches=model.grid[0] * model.grid[1],
            modalities=settings.modalities,
            sparse_ratio=settings.sparse_ratio,
            aggr_ratio=settings.aggr_ratio,
            beta=settings.beta,
            gumbel=settings.gumbel,
            tau=settings.tau,
            gumbel_mass=settings.gumbel_mass,
            aggregation=step.options["aggregation"],
            place=places[0],
        )
    return made


def measure(backbone: nn.Module, image_size: tuple[int, int]) -> tuple[tuple[int, int], int]:
    """The grid of patches of an image and the width E of the feature, tried on a blank one."""
    tower, layouts = open_any(backbone), list[Layout]()
    undo = tower.on_layout(layouts.append)
    was = backbone.training
    try:
        with torch.no_grad():
            whole, tokens = get_image_features_with_tokens(backbone.eval(), torch.zeros(1, 3, *image_size), unscaled=True)
            assert tokens is not None
            projected = tower.project(tokens)
    finally:
        backbone.train(was)
        for take_off in undo:
            take_off()
    if projected.shape[-1] != whole.shape[-1]:
        raise UserError(
            f"{type(backbone).__name__}: its image feature has width {whole.shape[-1]}, its patches {projected.shape[-1]}; "
            "choose a backbone that gives both the same"
        )
    return layouts[-1].grid, whole.shape[-1]
