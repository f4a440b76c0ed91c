"""Re-identification: every query is compared with the whole gallery (ranking.py), by each combination of its modalities.

mAP, rank_k and cmc are those of all modalities that were asked for; what a plan costs and how fast it is, too. Of every
combination the model sees those images alone, and there are mAP_RGB+NI, rank_1_RGB+NI and so on. Where features are of both
branches, mAP_plain and mAP_tokens (and rank_1) are of one alone. mAP_stderr is that of queries; those of one identity are not
independent of each other, so the true one is larger.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from tokensieve import table
from tokensieve.data import reid
from tokensieve.data.images import BrokenImage
from tokensieve.data.reid import ReidData
from tokensieve.data.sources import Broken, Source, first, folder_of
from tokensieve.errors import UserError, did_you_mean
from tokensieve.handle import Handle, place
from tokensieve.models import open_tower
from tokensieve.models.load_reid import LoadedReid
from tokensieve.models.reid import BRANCHES, ReidModel
from tokensieve.plan import Plan
from tokensieve.tasks import Encode, Record, Setup, Task
from tokensieve.tasks.ranking import rank

NAME = "reid"
CONTROLS = ("random", "grid", "anchor")
VAL_IDENTITIES = 30  # of the embedded data
Combination = tuple[str, ...]  # modalities, in the model's order


class Compared(NamedTuple):
    """What is kept of a batch: features (B,F) by the name of a combination, identities (B,), cameras or scenes (B,)."""

    features: dict[str, Tensor]
    ids: Tensor
    groups: Tensor


class ReidTask(Task):
    """Queries and gallery of one data set, compared by a re-identification model."""

    name = NAME
    metric = "mAP"
    unit = "object"

    def __init__(self, setup: Setup) -> None:
        args, loaded = setup.args, setup.loaded
        if not isinstance(loaded, LoadedReid):
            raise UserError(f"--task {NAME}: {setup.model} is no re-identification model; use --model_type reid.")
        if setup.language != "en":
            raise UserError(f"--language {setup.language}: re-identification reads no text; leave it out.")
        self.setup = setup
        self.combinations = chosen(args.modalities, loaded.model.modalities)
        self.whole = tuple(name for name in loaded.model.modalities if any(name in some for some in self.combinations))
        self.val_identities = _val_identities(args.split, args.val_identities, setup.dataset)
        splits = {"test": ("query", "gallery"), "val": ("val", "val")}[args.split]
        self.query, self.gallery = (self._load(split) for split in splits)
        self.once = _encode
        self.act = _encode
        made = {"query": self.query, "gallery": self.gallery}
        if [shot.name for shot in self.query.shots] == [shot.name for shot in self.gallery.shots]:
            made = {"test": self.gallery}  # the same shots: read and encoded once
        self._sources = {name: self._source(data) for name, data in made.items()}

    def _load(self, split: str) -> ReidData:
        setup = self.setup
        root = folder_of(setup.dataset, setup.args.dataset_root)
        data = reid.load(setup.dataset, root, split, self.val_identities or 0, self.whole)
        for note in data.notes:
            setup.say(note)
        return data

    def _source(self, data: ReidData) -> Source:
        shots = Shots(data, self.whole, self.setup.loaded.transform)
        return first(Source(shots, [], [], data.fingerprint, join=joined), self.setup.args.limit)

    def sources(self) -> dict[str, Source]:
        return self._sources

    def settings(self) -> dict[str, Any]:
        return {
            "rule": f"same identity and {self.gallery.rule} excluded",
            "modalities": [",".join(some) for some in self.combinations],
            "val_identities": self.val_identities,
        }

    def counts(self, records: dict[str, list[Record]]) -> dict[str, Any]:
        query, gallery = self._joined(records)
        seen: dict[int, set[int]] = defaultdict(set)  # identity: where the gallery shows it
        for pid, group in zip(gallery.ids.tolist(), gallery.groups.tolist(), strict=True):
            seen[pid].add(group)
        left_out = sum(not seen[pid] - {group} for pid, group in zip(query.ids.tolist(), query.groups.tolist(), strict=True))
        return {"n_queries": len(query.ids), "n_gallery": len(gallery.ids), "n_left_out": left_out}

    def batch(
        self, split: str, images: Mapping[str, Tensor], targets: tuple[Tensor, Tensor], encoders: Sequence[Encode]
    ) -> list[Record]:
        made = []
        for encode in encoders:
            features = {titled(self.whole): _kept(encode(images))}
            for some in self.combinations:
                if some != self.whole:  # beside what the plan's time is told of
                    seen = {name: images[name] for name in (*some, "cameras")}
                    features[titled(some)] = _kept(encode(seen, aside=True))
            made.append(Compared(features, *targets))
        return made

    def metrics(self, records: dict[str, list[Record]]) -> dict[str, Any]:
        query, gallery = self._joined(records)
        about: dict[str, Any] = {
            "query_ids": query.ids,
            "gallery_ids": gallery.ids,
            "query_groups": query.groups,
            "gallery_groups": gallery.groups,
        }
        rankings = {name: rank(query.features[name], gallery.features[name], **about) for name in query.features}
        whole = titled(self.whole)
        numbers = rankings[whole].metrics()
        for branch, part in branches_of(self.setup.loaded.model, query.features[whole].shape[1]).items():
            of_branch = rank(query.features[whole][:, part], gallery.features[whole][:, part], **about)
            numbers |= {f"mAP_{branch}": of_branch.mean_ap, f"rank_1_{branch}": of_branch.cmc(1)}
        for some in self.combinations:
            name, of_some = titled(some), rankings[titled(some)]
            numbers |= {f"mAP_{name}": of_some.mean_ap, f"rank_1_{name}": of_some.cmc(1)}
        return numbers

    def show(self, rows: Sequence[dict[str, Any]]) -> None:
        if self.combinations == [self.whole]:
            return
        lines = []
        for name in map(titled, self.combinations):
            numbers = [(row["metrics"][f"mAP_{name}"], row["metrics"][f"rank_1_{name}"]) for row in rows]
            lines.append([name, *(f"{100 * ap:.1f} / {100 * first:.1f}" for ap, first in numbers)])
        plans = [row["reduction"]["plan"] for row in rows]
        table.print_grid("mAP / rank-1 in percent, with these modalities alone", ["modalities", *plans], lines)

    def _joined(self, records: dict[str, list[Record]]) -> tuple[Compared, Compared]:
        """All of the queries and of the gallery."""
        whole = {}
        for split, batches in records.items():
            features = {name: torch.cat([batch.features[name] for batch in batches]) for name in batches[0].features}
            ids, groups = (torch.cat(parts) for parts in zip(*((b.ids, b.groups) for b in batches), strict=True))
            whole[split] = Compared(features, ids, groups)
        return (whole["test"], whole["test"]) if "test" in whole else (whole["query"], whole["gallery"])


def branches_of(model: ReidModel, width: int) -> dict[str, slice]:
    """Where in a feature of this width each branch stands, if there are two."""
    if model.settings.feature != "both":
        return {}
    each = width // len(BRANCHES)
    return {name: slice(each * i, each * (i + 1)) for i, name in enumerate(BRANCHES)}


def _encode(model: ReidModel, inputs: Mapping[str, Tensor]) -> Tensor:
    return model.encode(inputs)


def _kept(features: Tensor) -> Tensor:
    return features.float().cpu()


def _val_identities(split: str, given: int | None, dataset: str) -> int | None:
    """How many identities of the training set are for validation; None where none are asked for."""
    if split not in ("test", "val"):
        raise UserError(
            f"--split {split}: re-identification has test (query and gallery) and val.{did_you_mean(split, ['test'])}"
        )
    if split == "test":
        if given is not None:
            raise UserError("--val_identities works with --split val only: add it.")
        return None
    if given is None and dataset not in reid.EMBEDDED:
        raise UserError(
            f"--split val: {dataset} has no validation identities of its own; give --val_identities N, as the training held "
            "out of its training set."
        )
    return VAL_IDENTITIES if given is None else given


# ----------------------------------------------------------------------------------------------------------- modalities, plans


def titled(modalities: Sequence[str]) -> str:
    """How numbers and tables call a combination.

    >>> titled(("RGB", "NI"))
    'RGB+NI'
    """
    return "+".join(modalities)


def chosen(asked: Sequence[str] | None, known: Sequence[str]) -> list[Combination]:
    """The combinations to compare by, each once, in the model's order of modalities: those asked for, or all there are."""
    if not asked:
        return [some for size in range(len(known), 0, -1) for some in combinations(known, size)]
    made = []
    for text in asked:
        names = [word.strip() for word in re.split("[,+]", text)]
        for name in names:
            if name not in known:
                hint = did_you_mean(name.upper(), known)
                raise UserError(f"--modalities {text}: {name!r} is not one of the model's, {', '.join(known)}.{hint}")
        made.append(tuple(name for name in known if name in names))
    return list(dict.fromkeys(made))


def default_plans(model: ReidModel) -> tuple[list[Plan], list[str]]:
    """What it was trained with, the full model, and controls that leave as many tokens at the same places; and remarks."""
    trained = Plan.parse(model.plan)
    if trained.is_identity:
        return [trained], []
    tokens, places = model.grid[0] * model.grid[1], []
    for cut in place(trained, open_tower(model), 0, parts=dict(model.parts.items())):
        tokens = cut.budget.count(tokens)
        places.append(f"@{cut.name}:{tokens}")
    plans, remarks = [trained, Plan()], []
    for method in CONTROLS:
        text = " + ".join(f"{method}{where}" for where in places)
        try:
            plan = Plan.parse(text)
            Handle(model, plan)
            plans.append(plan)
        except UserError as error:
            remarks.append(f"{text} is not compared: {error}")
    return list({str(plan): plan for plan in plans}.values()), remarks


# -------------------------------------------------------------------------------------------------------------------- the data


class Shots(Dataset[Any]):
    """Samples as the loader wants them: (images and camera by name, (identity, group)), or Broken."""

    def __init__(self, data: ReidData, modalities: Combination, transform: Any) -> None:
        self.data, self.modalities, self.transform = data, modalities, transform
        self.groups = data.groups

    def __len__(self) -> int:
        return len(self.data.shots)

    def __getitem__(self, index: int) -> Any:
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
