"""Linear probe: a linear layer learns the labels from the frozen features of a training split, and is scored on the test split.

The layer, its training (AdamW, cosine from --fewshot_lr to 0, --fewshot_epochs epochs, minibatches of --batch_size) and the
search for a weight decay where there are validation data are clip_benchmark 1.6.2's, on any device, and so are the numbers.

Random draws. clip_benchmark seeds torch's generator when a run begins, and again before each training of a layer. From the
first seeding come, in this order: the parts of --val_proportion (a permutation), one number for each pass over images (a
DataLoader draws it), and the order of the training features, of which few-shot takes the first k of each class. From the
second: the layer's weight and bias, and for each epoch one number and the seed of its order. Here own generators make the same
draws, so nothing else can shift them. Upstream's first state is also moved by what a model draws when it is built, and its
second run, with cached features, makes no passes; ours is always that of a first run with a model that draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from tokensieve import plugins, provenance
from tokensieve.data.source import Broken, Source
from tokensieve.errors import UserError
from tokensieve.tasks.base import (
    Encode,
    Prediction,
    Record,
    SampleScores,
    StoredPass,
    Task,
    TaskContext,
    check_finite,
    once_per_plan,
)
from tokensieve.tasks.labels import label_predictions, top_shares
from tokensieve.tasks.linear_probe.feature_store import FeatureStore, Identity
from tokensieve.tasks.linear_probe.probe import (
    Features,
    Probe,
    first_k_per_class,
    hits,
    join_features,
    random_int63,
    scores,
    select_features,
)

NAME = "linear_probe"


class Learnt(NamedTuple):
    """What a trained layer says about the test split."""

    logits: Tensor  # (n, C)
    labels: Tensor  # (n,)
    weight_decay: float


class LinearProbeTask(Task):
    """Accuracy of a linear layer on the features."""

    name = NAME
    metric = "lp_acc1"

    def __init__(self, context: TaskContext) -> None:
        self.context, args = context, context.args
        if args.fewshot_k == 0:
            raise UserError("--fewshot_k 0 leaves nothing to learn from: give 1 or more images a class, or -1 for all.")
        if args.fewshot_epochs < 1 or not 0 < args.fewshot_lr < math.inf:
            raise UserError(
                f"--fewshot_epochs {args.fewshot_epochs} --fewshot_lr {args.fewshot_lr}: "
                f"the epochs must be 1 or more, the learning rate above 0."
            )
        self.splits = {"train": args.train_split, "test": args.split}
        if args.val_split is not None or args.val_proportion is not None:
            self.splits = {"train": args.train_split, "val": args.val_split or args.train_split, "test": args.split}
        self.kept = FeatureStore(
            args.feature_root, context.model, context.pretrained, context.dataset, context.warn, args.skip_load
        )
        self.draws = torch.Generator().manual_seed(args.seed)
        self.divided: int | None = None  # of how many images --val_proportion is taken
        self.data = self._kept_data() if args.skip_load else self._read_data()

    def _read_data(self) -> dict[str, Source]:
        args = self.context.args
        data = {"train": self.context.source(args.train_split)}
        if args.val_split is not None:
            data["val"] = self.context.source(args.val_split)
        elif args.val_proportion is not None:
            self.divided = data["train"].size
            data["train"], data["val"] = data["train"].split(args.val_proportion, self.draws)
        data["test"] = self.context.source(args.split)
        return data

    def _kept_data(self) -> dict[str, Source]:
        """With --skip_load: empty sources, which nobody reads, of the data that the kept features were made of."""
        nothing: Any = TensorDataset(torch.empty(0))
        known = self._known()
        made_of = {split: self.kept.only("data", {**known, **self._place(split)}) for split in self.splits}
        self.divided = self.kept.only("divided", {**known, **self._place("train")})
        if self.divided is not None:
            torch.randperm(self.divided, generator=self.draws)  # as when they were divided
        return {split: Source(nothing, [], [], mark) for split, mark in made_of.items()}

    def sources(self) -> dict[str, Source]:
        return self.data

    @property
    def weights(self) -> str:
        """The fingerprint of the weights that the features are of; with --skip_load, of those that are kept."""
        if not self.context.args.skip_load:
            return self.context.loaded.fingerprint
        return str(self.kept.only("weights", self._known()))

    def settings(self) -> dict[str, Any]:
        if not self.context.args.skip_load:
            return {}
        readers = [self.kept.only("workers", {**self._known(), **self._place(split)}) for split in self.splits]
        return {"workers": max((count for count in readers if count is not None), default=None)}  # of the run that kept them

    def batch(self, split: str, images: Tensor, targets: Any, encoders: Sequence[Encode]) -> list[Record]:
        if not isinstance(targets, Tensor) or targets.dim() != 1:
            raise UserError(
                f"{self.context.dataset} has several labels an image: {NAME} needs one. Use zeroshot_classification."
            )
        return [Features(self._features(encode, images), targets) for encode in encoders]

    def _features(self, encode: Encode, images: Tensor) -> Tensor:
        with torch.no_grad(), self.context.precision():
            features: Tensor = encode(images)
            if self.context.args.normalize:
                features = F.normalize(features, dim=-1)
            if not torch.is_autocast_enabled(images.device.type):
                features = features.float()
        return check_finite(features).cpu()

    # ------------------------------------------------------------------------------------------------------ kept features

    def _known(self) -> Identity:
        """What the features of every pass depend on, besides the weights."""
        context, args = self.context, self.context.args
        with context.precision():
            amp = torch.is_autocast_enabled(context.device.type)
            dtype = torch.get_autocast_dtype(context.device.type) if amp else torch.float32
        return {
            "model": context.model,
            "pretrained": context.pretrained,
            "model_type": args.model_type,
            "dataset": context.dataset,
            "limit": args.limit,
            "seed": args.seed,
            "normalize": args.normalize,
            "token_fusion": [args.token_fusion, args.token_fusion_weight, args.token_fusion_temperature],
            "device": context.device.type,
            "amp": amp,
            "dtype": str(dtype).removeprefix("torch."),
            "batch_size": args.batch_size,  # the last digits depend on it
            "code": provenance.code_version(),
            "versions": provenance.versions(),
            **({"plugins": hashes} if (hashes := plugins.plugin_hashes()) else {}),
        }

    def _place(self, split: str) -> Identity:
        """Which images a pass reads."""
        proportion = self.context.args.val_proportion
        return {"split": self.splits[split], "part": None if split == "test" or proportion is None else [split, proportion]}

    def _identity(self, plan: str, split: str) -> Identity:
        """All that the features of a pass depend on."""
        known = {**self._known(), **self._place(split), "plan": plan, "weights": self.weights}
        source = self.data[split]
        known |= {"data": source.fingerprint, "divided": self.divided if known["part"] else None}
        if self.context.args.skip_load:
            known["workers"] = self.kept.only("workers", known)
        else:  # they make the order of a stream
            known["workers"] = source.workers(self.context.args.num_workers) if source.size is None else None
        return known

    def stored(self, plan: str, split: str) -> StoredPass | None:
        identity = self._identity(plan, split)
        found = self.kept.find(identity)
        if found is None:
            if self.context.args.skip_load:
                raise UserError(f"--skip_load: {self.kept.path(identity)} is damaged. Run it once without --skip_load.")
            return None
        tensors, broken = found
        return StoredPass([Features(tensors["features"], tensors["labels"])], tensors["samples"], broken)

    def store(self, plan: str, split: str, records: list[Record], samples: Tensor, broken: Sequence[Broken]) -> None:
        whole = join_features(records)
        tensors = {"features": whole.features, "labels": whole.labels, "samples": samples}
        self.kept.keep(self._identity(plan, split), tensors, broken)

    # ------------------------------------------------------------------------------------------------------------ numbers

    def metrics(self, records: dict[str, list[Record]]) -> dict[str, Any]:
        args, learnt = self.context.args, self._learn(records)
        return {
            **scores(learnt.logits, learnt.labels),
            "weight_decay": learnt.weight_decay,
            "epochs": args.fewshot_epochs,
            "seed": args.seed,
            "fewshot_k": args.fewshot_k,
            "normalized": args.normalize,
        }

    def sample_scores(self, records: dict[str, list[Record]]) -> SampleScores:
        learnt = self._learn(records)
        right = hits(learnt.logits, learnt.labels)[:, 0].double()
        return SampleScores(right, torch.arange(len(right)))

    def predictions(self, records: dict[str, list[Record]], samples: dict[str, Tensor]) -> list[Prediction]:
        learnt = self._learn(records)
        return label_predictions(*top_shares(learnt.logits), learnt.labels, samples["test"], self.data["test"].classes)

    @once_per_plan
    def _learn(self, records: dict[str, list[Record]]) -> Learnt:
        args = self.context.args
        with torch.inference_mode(False), torch.enable_grad():
            passes = {split: join_features(found) for split, found in records.items()}  # copies, which may be trained on
            draws = self.draws.clone_state()
            for _ in passes:
                random_int63(draws)
            order = torch.randperm(len(passes["train"].labels), generator=draws)
            train = select_features(passes["train"], first_k_per_class(passes["train"].labels, order, args.fewshot_k))
            classes = int(passes["train"].labels.max()) + 1
            probe = Probe(
                classes,
                lr=args.fewshot_lr,
                epochs=args.fewshot_epochs,
                batch_size=args.batch_size,
                seed=args.seed,
                device=self.context.device,
                precision=self.context.precision,
                show=self.context.show,
            )
            weight_decay = 0.0
            if "val" in passes:
                most = int(passes["val"].labels.max())
                if args.fewshot_k < 0 and most >= classes:  # they are learnt from in the end
                    raise UserError(
                        f"a validation label is {most}, but training labels only go to {classes - 1}: give more data."
                    )
                weight_decay = probe.best_weight_decay(train, passes["val"])
                if args.fewshot_k < 0:  # few-shot means that no more images than those are learnt from
                    train = join_features([train, passes["val"]])
            logits = probe.logits(probe.train(train, weight_decay), passes["test"].features)
            if not torch.isfinite(logits).all():
                raise UserError(f"the linear probe has diverged with --fewshot_lr {args.fewshot_lr}: give a lower one.")
        return Learnt(logits, passes["test"].labels, weight_decay)
