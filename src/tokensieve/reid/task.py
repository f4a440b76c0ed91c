"""Re-identification: every query is compared with the whole gallery (ranking.py), by each combination of its modalities.

mAP, rank_k and cmc are those of the first requested combination (by default all modalities), the headline; so are the FLOPs and
the speed of a plan. For every combination the model gets those images alone, with the metrics mAP_RGB+NI, rank_1_RGB+NI and so
on. Where features have two branches, mAP_plain and mAP_tokens (and rank_1) are of one branch, by the headline's modalities.
mAP_stderr takes queries as independent; those of one identity are not, so the true error is larger.

Shots without one of the modalities, and misnamed ones, count as broken images.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from tokensieve.cutting.handle import Handle
from tokensieve.cutting.placement import place_plan
from tokensieve.data.images import BrokenImage
from tokensieve.data.registry import folder_of
from tokensieve.data.source import Broken, Source, take_first
from tokensieve.errors import UserError, did_you_mean
from tokensieve.evaluation import tables
from tokensieve.models.registry import open_tower
from tokensieve.plan import Plan
from tokensieve.reid import data as reid_data
from tokensieve.reid import layouts
from tokensieve.reid.data import ReidData
from tokensieve.reid.loading import LoadedReid
from tokensieve.reid.model import BRANCHES, ReidModel, Settings, check_cameras
from tokensieve.reid.ranking import Ranking, rank
from tokensieve.tasks.base import Encode, Prediction, Record, SampleScores, Task, TaskContext, once_per_plan

NAME = "reid"
CONTROLS = ("random", "grid", "anchor")
VAL_IDENTITIES = 30  # of the embedded data, for models whose settings have none
Combination = tuple[str, ...]  # modalities, in the model's order


class FeatureRecord(NamedTuple):
    """What is kept of a batch: features (B,F) by the name of a combination, identities (B,), cameras or scenes (B,).

    Features hold the columns of the combination's modalities; those of the others are zeros and change no distance.
    """

    features: dict[str, Tensor]
    ids: Tensor
    groups: Tensor


class ReidTask(Task):
    """Queries and gallery of one data set, compared by a re-identification model."""

    name = NAME
    metric = "mAP"
    unit = "object"

    def __init__(self, context: TaskContext) -> None:
        args, loaded = context.args, context.loaded
        if not isinstance(loaded, LoadedReid):
            raise UserError(f"--task {NAME}: {context.model} is no re-identification model; use --model_type reid.")
        if context.language != "en":
            raise UserError(f"--language {context.language}: re-identification reads no text; leave it out.")
        self.context = context
        self.combinations = parse_modalities(args.modalities, loaded.model.modalities)
        self.headline = self.combinations[0]
        self.whole = tuple(name for name in loaded.model.modalities if any(name in some for some in self.combinations))
        self.val_identities = _val_identities(args.split, args.val_identities, context.dataset, loaded.model.settings)
        splits = {"test": ("query", "gallery"), "val": ("val", "val")}[args.split]
        self.query, self.gallery = (self._load(split) for split in splits)
        self.run = self.run_for_flops = _encode
        made = {"query": self.query, "gallery": self.gallery}
        if [shot.name for shot in self.query.shots] == [shot.name for shot in self.gallery.shots]:
            made = {"test": self.gallery}  # the same shots: read and encoded once
        self.data = list(made.values())
        self._sources = {name: self._source(data) for name, data in made.items()}

    def _load(self, split: str) -> ReidData:
        context = self.context
        root = folder_of(context.dataset, context.args.dataset_root)
        data = reid_data.load(context.dataset, root, split, self.val_identities or 0, self.whole)
        for note in data.notes:
            context.warn(note)
        lost, n = len(data.left_out), len(data) + len(data.left_out)
        if lost > context.args.max_broken * n:
            raise UserError(
                f"of {n} shots of {data.name} ({data.split}) {len(data.incomplete)} lack a modality and {len(data.misnamed)} "
                f"are misnamed, more than --max_broken {context.args.max_broken} allows: repair them, raise --max_broken, or "
                "give --modalities that are there."
            )
        cameras = [shot.camera for shot in data.shots]
        check_cameras(min(cameras), max(cameras), context.loaded.model.settings)
        return data

    def _source(self, data: ReidData) -> Source:
        shots = Shots(data, self.whole, self.context.loaded.transform)
        return take_first(Source(shots, [], [], data.fingerprint, join=joined), self.context.args.limit)

    def sources(self) -> dict[str, Source]:
        return self._sources

    def settings(self) -> dict[str, Any]:
        return {
            "rule": f"same identity and {self.gallery.rule} excluded",
            "modalities": [",".join(some) for some in self.combinations],
            "headline": combination_name(self.headline),
            "val_identities": self.val_identities,
        }

    def counts(self, records: dict[str, list[Record]]) -> dict[str, Any]:
        rankings, gallery = self._rankings(records)
        first = rankings[combination_name(self.headline)]
        if first.left_out:
            self.context.warn(
                f"{self.context.dataset}: {first.left_out} of {len(first.ap)} queries have no right answer in the gallery "
                f"(none of another {self.gallery.rule}) and are left out"
            )
        return {
            "n_queries": len(first.ap),
            "n_gallery": gallery,
            "n_left_out": first.left_out,
            "n_incomplete": sum(len(data.incomplete) for data in self.data),
            "n_misnamed": sum(len(data.misnamed) for data in self.data),
        }

    def timed_inputs(self, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return _inputs_of(images, self.headline)

    def batch(
        self, split: str, images: Mapping[str, Tensor], targets: tuple[Tensor, Tensor], encoders: Sequence[Encode]
    ) -> list[Record]:
        made = []
        for encode in encoders:
            features = {}
            for some in self.combinations:  # the plan's speed is that of the first
                found = encode(_inputs_of(images, some), timed=some == self.headline)
                features[combination_name(some)] = select_modalities(found, self.context.loaded.model, some).float().cpu()
            made.append(FeatureRecord(features, *targets))
        return made

    def metrics(self, records: dict[str, list[Record]]) -> dict[str, Any]:
        rankings, _ = self._rankings(records)
        numbers = rankings[combination_name(self.headline)].metrics()
        names = [name for name in BRANCHES if name in rankings] + [combination_name(some) for some in self.combinations]
        for name in names:
            numbers |= {f"mAP_{name}": rankings[name].mean_ap, f"rank_1_{name}": rankings[name].cmc(1)}
        return numbers

    def sample_scores(self, records: dict[str, list[Record]]) -> SampleScores:
        """Average precision of every query that has a right answer, by the headline. Those of one identity belong together."""
        ranking = self._rankings(records)[0][combination_name(self.headline)]
        ids = torch.cat([batch.ids for batch in records["test" if "test" in records else "query"]])
        return SampleScores(ranking.ap[ranking.counted], ids[ranking.counted].unique(return_inverse=True)[1])

    def predictions(self, records: dict[str, list[Record]], samples: dict[str, Tensor]) -> list[Prediction]:
        """By the headline: the nearest to every query. score: average precision; rank: of the first right one."""
        ranking = self._rankings(records)[0][combination_name(self.headline)]
        queries, gallery = (samples["test"],) * 2 if "test" in samples else (samples["query"], samples["gallery"])
        shots = [self.gallery.shots[number] for number in gallery.tolist()]
        made: list[Prediction] = []
        for row, number in enumerate(queries.tolist()):
            query = self.query.shots[number]
            found = zip(ranking.nearest[row].tolist(), ranking.distances[row].tolist(), strict=True)
            near = [(shots[i], far) for i, far in found if i >= 0]
            best = near[0][0] if near else None
            made.append(
                {
                    "sample": number,
                    "query": query.name,
                    "label": query.pid,
                    "nearest": None if best is None else best.name,
                    "prediction": None if best is None else best.pid,
                    "correct": best is not None and best.pid == query.pid,
                    "score": float(ranking.ap[row]),
                    "rank": int(ranking.first[row]) or None,
                    "matches": [[shot.name, shot.pid, distance] for shot, distance in near],
                }
            )
        return made

    def show(self, rows: Sequence[dict[str, Any]]) -> None:
        plans, numbers = [row["reduction"]["plan"] for row in rows], [row["metrics"] for row in rows]
        shown = {"mAP": "mAP", "rank_1": "rank-1", "rank_5": "rank-5", "rank_10": "rank-10"}
        lines = [
            [plan, *(f"{100 * of_plan[name]:.1f}" for name in shown)] for plan, of_plan in zip(plans, numbers, strict=True)
        ]
        tables.print_grid(f"in percent, by {combination_name(self.headline)}", ["plan", *shown.values()], lines)
        if len(self.combinations) == 1:
            return
        lines = []
        for name in map(combination_name, self.combinations):
            pairs = [(of_plan[f"mAP_{name}"], of_plan[f"rank_1_{name}"]) for of_plan in numbers]
            lines.append([name, *(f"{100 * ap:.1f} / {100 * first:.1f}" for ap, first in pairs)])
        tables.print_grid("mAP / rank-1 in percent, with these modalities alone", ["modalities", *plans], lines)

    @once_per_plan
    def _rankings(self, records: dict[str, list[Record]]) -> tuple[dict[str, Ranking], int]:
        """By combination, and of the headline by branch, how well the queries were answered; and how large the gallery is."""
        names = ("test", "test") if "test" in records else ("query", "gallery")
        query, gallery = (records[name] for name in names)
        about: dict[str, Any] = {
            "query_ids": torch.cat([batch.ids for batch in query]),
            "gallery_ids": torch.cat([batch.ids for batch in gallery]),
            "query_groups": torch.cat([batch.groups for batch in query]),
            "gallery_groups": torch.cat([batch.groups for batch in gallery]),
        }
        made = {}
        for name in map(combination_name, self.combinations):  # one at a time is put together
            far = torch.cat([batch.features[name] for batch in gallery])
            near = far if query is gallery else torch.cat([batch.features[name] for batch in query])
            made[name] = rank(near, far, **about)
            if name == combination_name(self.headline):
                for branch, part in branches_of(self.context.loaded.model, far.shape[1]).items():
                    made[branch] = rank(near[:, part], far[:, part], **about)
        return made, len(about["gallery_ids"])


def select_modalities(features: Tensor, model: ReidModel, modalities: Combination) -> Tensor:
    """The columns of these modalities in features of all, (B, branches x all M x E) -> (B, branches x M x E)."""
    places = [model.modalities.index(name) for name in modalities]
    parts = features.unflatten(1, (-1, len(model.modalities), model.width))
    return parts[:, :, places].flatten(1)


def branches_of(model: ReidModel, width: int) -> dict[str, slice]:
    """Where in a feature of this width each branch stands, if there are two."""
    if model.settings.feature != "both":
        return {}
    each = width // len(BRANCHES)
    return {name: slice(each * i, each * (i + 1)) for i, name in enumerate(BRANCHES)}


def _encode(model: ReidModel, inputs: Mapping[str, Tensor]) -> Tensor:
    return model.encode(inputs)


def _inputs_of(images: Mapping[str, Tensor], modalities: Combination) -> dict[str, Tensor]:
    return {name: images[name] for name in (*modalities, "cameras")}


def _val_identities(split: str, given: int | None, dataset: str, settings: Settings) -> int | None:
    """How many identities of the training set are for validation; None for other splits."""
    if split not in ("test", "val"):
        raise UserError(
            f"--split {split}: re-identification has test (query and gallery) and val.{did_you_mean(split, ['test'])}"
        )
    if split == "test":
        if given is not None:
            raise UserError("--val_identities works with --split val only: add it.")
        return None
    if settings.data == dataset:
        if given not in (None, settings.val_identities) or not settings.val_identities:
            raise UserError(
                f"--split val: the training of this model held out {settings.val_identities} identities of {dataset}, so "
                "others are known to it; " + ("leave --val_identities out." if settings.val_identities else "use --split test.")
            )
        return settings.val_identities
    if given is None and dataset not in layouts.EMBEDDED:
        raise UserError(
            f"--split val: {dataset} has no validation identities of its own; give --val_identities N, as the training held "
            "out of its training set."
        )
    return VAL_IDENTITIES if given is None else given


# ----------------------------------------------------------------------------------------------------------- modalities, plans


def combination_name(modalities: Sequence[str]) -> str:
    """The name of a combination in metrics and tables.

    >>> combination_name(("RGB", "NI"))
    'RGB+NI'
    """
    return "+".join(modalities)


def parse_modalities(requested: Sequence[str] | None, known: Sequence[str]) -> list[Combination]:
    """The combinations to compare by, each once, in the model's order of modalities: the requested ones, or all."""
    if not requested:
        return [some for size in range(len(known), 0, -1) for some in combinations(known, size)]
    made = []
    for text in requested:
        names = [word.strip() for word in re.split("[,+]", text)]
        for name in names:
            if name not in known:
                hint = did_you_mean(name.upper(), known)
                raise UserError(f"--modalities {text}: {name!r} is not one of the model's, {', '.join(known)}.{hint}")
        made.append(tuple(name for name in known if name in names))
    return list(dict.fromkeys(made))


def default_plans(model: ReidModel) -> tuple[list[Plan], list[str]]:
    """The plan of its training, the full model, and controls that keep as many tokens at the same positions; and notes."""
    trained = Plan.parse(model.plan)
    if trained.is_identity:
        return [trained], []
    tokens, positions = model.grid[0] * model.grid[1], []
    for cut in place_plan(trained, open_tower(model), 0, parts=dict(model.parts.items())):
        tokens = cut.count(tokens)
        positions.append(f"@{cut.name}:{tokens}")
    plans, notes = [trained, Plan()], []
    for method in CONTROLS:
        text = " + ".join(f"{method}{position}" for position in positions)
        try:
            plan = Plan.parse(text)
            Handle(model, plan)
            plans.append(plan)
        except UserError as error:
            notes.append(f"{text} is not compared: {error}")
    return list({str(plan): plan for plan in plans}.values()), notes


# -------------------------------------------------------------------------------------------------------------------- the data


class Shots(Dataset[Any]):
    """Samples as the loader wants them: (images and camera by name, (identity, group)), or Broken; at the end what is lost."""

    def __init__(self, data: ReidData, modalities: Combination, transform: Any) -> None:
        self.data, self.modalities, self.transform = data, modalities, transform
        self.groups, self.lost = data.groups, list(data.left_out.items())

    def __len__(self) -> int:
        return len(self.data) + len(self.lost)

    def __getitem__(self, index: int) -> Any:
        if index >= len(self.data):
            return Broken(*self.lost[index - len(self.data)])
        shot = self.data.shots[index]
        try:
            images: dict[str, Image.Image] = self.data.read(index, self.modalities)
        except BrokenImage as error:
            name, _, reason = str(error).partition(": ")
            return Broken(name, reason)
        return {**self.transform(images), "cameras": torch.tensor(shot.camera)}, (shot.pid, self.groups[index])


def joined(samples: Sequence[dict[str, Tensor]], targets: Sequence[tuple[int, int]]) -> tuple[dict[str, Tensor], Any]:
    """Inputs by name, (B,3,h,w) and cameras (B,); identities (B,) and groups (B,)."""
    ids, groups = torch.tensor(targets).unbind(1)
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}, (ids, groups)
