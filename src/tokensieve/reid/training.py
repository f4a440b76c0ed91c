"""A vision transformer learns to re-identify people or vehicles by several modalities, with few of its tokens.

A batch has P identities with K objects each. Each branch of the model (plain: the global features; tokens: the mean of the
tokens that the plan leaves) is trained to classify the identity, and to be nearer to its own identity than to any other of the
batch. The plan is on the model during training, by the same Handle as everywhere, so that backbone and reduction are trained
together. With a teacher, each branch also imitates the feature that an earlier model gives with all of its tokens.

What a step does depends on the seed and the step alone: the batch, its crops and flips, and the noise of the reduction. So a
resumed run ends with the same bits. With several processes each takes some of the identities of every batch; its triplets and
the statistics of its batch norm are within its share. Gradients are averaged, and so are the running statistics of the batch
norms after every step, so that all processes hold the same model.

The weights that are written are those with the best mAP on held-out training identities. The test split is never used.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.config.recipe import check_recipe
from tokensieve.cutting.handle import Handle
from tokensieve.errors import UserError
from tokensieve.models.loading.load_errors import collect_warnings
from tokensieve.plan import Plan
from tokensieve.reid import build, loading, losses, model, ranking
from tokensieve.reid import data as reid_data
from tokensieve.reid.batches import Augment, Balanced, Plain
from tokensieve.reid.config import ReidTraining
from tokensieve.reid.views import Inputs, Views, named, named_model
from tokensieve.training import start as training_start
from tokensieve.training.loader import read_ahead
from tokensieve.training.processes import average, start_accelerator


class ReidLearner:
    """The model with its plan, its optimizer and its batches, driven by training.loop."""

    monitor = ("mAP", "max")

    def __init__(self, config: ReidTraining) -> None:
        self.config, self.solver = config, config.SOLVER
        self.accelerator = start_accelerator(self.solver.DEVICE, self.solver.MIXED_PRECISION, 1, key="SOLVER.DEVICE")
        self.device = self.accelerator.device
        self._print([note] if (note := config.unused_note()) else [])
        self.train_data, self.val_data = self._read()
        torch.manual_seed(self.solver.SEED)
        with named("MODEL"):
            with collect_warnings() as notes:
                self.model = build.build(self._settings(), config.MODEL.PRETRAINED)
            if config.MODEL.INIT_FROM:
                with named_model("INIT_FROM"):
                    build.start_from(self.model, config.MODEL.INIT_FROM)
            self.model.to(self.device).train()
            self._print(notes)
            self._check_patches()
            self.handle = Handle(self.model, Plan.parse(config.MODEL.plan), self.solver.SEED, parts=self.model.parts)
            for note in self.handle.notes:
                raise UserError(f"{note}, so there is nothing to learn; keep fewer")
            self.teacher = self._read_teacher()
        self.norms: list[Any] = [module for module in self.model.modules() if isinstance(module, nn.BatchNorm1d)]
        self.optimizer = self._optimizer()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.accelerator.mixed_precision == "fp16")
        with named("SOLVER.IMS_PER_BATCH"):
            self.batches = self._batches_from(0)
            self._check_triplets()
        self.steps, self.warmup = self._count_steps()
        self.seconds = 0.0
        self.broken = 0  # objects of this process that were replaced, since their images could not be read
        self._batches: Iterator[tuple[Inputs, Tensor, list[str]]] | None = None
        self.views = None if self.val_data is None else self._views(self.val_data)

    # --- parts ----------------------------------------------------------------------------------------------------

    def _read(self) -> tuple[reid_data.ReidData, reid_data.ReidData | None]:
        """The identities to train on, and the held-out ones."""
        names = self.config.DATASETS
        with named("DATASETS"):
            splits = [
                reid_data.load(names.NAMES, names.ROOT_DIR, split, names.VAL_IDENTITIES, self.config.MODEL.MODALITIES)
                for split in (("train", "val") if names.VAL_IDENTITIES else ("train",))
            ]
        self._print([note for data in splits for note in data.notes])
        for data in splits:
            lost, n = len(data.left_out), len(data) + len(data.left_out)
            if lost > (allowed := self.config.DATALOADER.allowed(n)):
                raise UserError(
                    f"DATASETS: of {n} shots of {data.name} ({data.split}) {len(data.incomplete)} lack a modality and "
                    f"{len(data.misnamed)} are misnamed; at most {allowed} are allowed "
                    f"(DATALOADER.MAX_BROKEN: {self.config.DATALOADER.MAX_BROKEN:g})"
                )
        return splits[0], splits[1] if len(splits) > 1 else None

    def _print(self, notes: list[str]) -> None:
        for note in dict.fromkeys(notes) if self.accelerator.is_main_process else ():
            print(note, file=sys.stderr)

    def _settings(self) -> model.Settings:
        settings, images, test = self.config.MODEL, self.config.INPUT, self.config.TEST
        return model.Settings(
            library=settings.LIBRARY,
            backbone=settings.TRANSFORMER_TYPE,
            arguments=settings.ARGUMENTS,
            image_size=images.SIZE,
            modalities=settings.MODALITIES,
            shared=settings.SHARED_BACKBONE,
            cameras=self.train_data.cameras if settings.SIE_CAMERA else 0,
            camera_weight=settings.SIE_COE,
            identities=len(self.train_data.pids),
            plan=settings.plan,
            sparse_ratio=settings.SDTPS_SPARSE_RATIO,
            aggr_ratio=settings.SDTPS_AGGR_RATIO,
            beta=settings.SDTPS_BETA,
            gumbel=settings.SDTPS_USE_GUMBEL,
            tau=settings.SDTPS_GUMBEL_TAU,
            gumbel_mass=settings.SDTPS_GUMBEL_MASS,
            feature=test.FEAT,
            neck=test.NECK_FEAT,
            mean=images.PIXEL_MEAN,
            std=images.PIXEL_STD,
            data=self.config.DATASETS.NAMES,
            val_identities=self.config.DATASETS.VAL_IDENTITIES,
        )

    def _read_teacher(self) -> model.ReidModel | None:
        """The model whose features are imitated, without a plan; a UserError if they cannot be compared."""
        name, mine = self.config.MODEL.TEACHER, self.model
        if not name:
            return None
        with named_model("TEACHER"):
            teacher = loading.read(name)
        for what, theirs, wanted in (
            ("modalities", teacher.modalities, mine.modalities),
            ("image sizes", teacher.settings.image_size, mine.settings.image_size),
            ("feature widths", teacher.width, mine.width),
        ):
            if theirs != wanted:
                raise UserError(f"TEACHER: {name}: its {what} are {theirs}, this model's {wanted}; they must be the same")
        return teacher.to(self.device).requires_grad_(False).eval()

    def _check_patches(self) -> None:
        """A UserError where patches do not cover the image, or would overlap."""
        wanted, (h, w), (high, wide) = self.config.MODEL.STRIDE_SIZE, self.model.grid, self.config.INPUT.SIZE
        name, patch = self.config.MODEL.TRANSFORMER_TYPE, (high // h, wide // w)
        if high % h or wide % w:
            raise UserError(
                f"INPUT.SIZE: {high} x {wide} is not a multiple of {name}'s patches; {h * patch[0]} x {w * patch[1]} is one"
            )
        if wanted is not None and wanted != patch:
            raise UserError(
                f"STRIDE_SIZE: {list(wanted)}, but the patches of {name} are {patch[0]} x {patch[1]} pixels, without overlap; "
                f"write {list(patch)}"
            )

    def _check_triplets(self) -> None:
        """A UserError where a process has a single identity, so that it has no triplets."""
        if self.config.MODEL.TRIPLET_LOSS_WEIGHT and self.batches.identities < 2 * self.batches.world:
            many, world = self.batches.identities, self.batches.world
            raise UserError(
                f"{many} identities for {world} processes are a single one for each, and a triplet needs two; "
                f"write {2 * world * self.batches.shots}"
            )

    def _optimizer(self) -> torch.optim.Optimizer:
        """Two groups, each with its own learning rate: the transformers, and all other weights."""
        backbone = [p for p in self.model.backbones.parameters() if p.requires_grad]
        ids = {id(p) for p in backbone}
        others = [p for p in self.model.parameters() if p.requires_grad and id(p) not in ids]
        self.rates = (self.solver.BACKBONE_LR, self.solver.BASE_LR)
        groups = [{"params": backbone}, {"params": others}]
        kind = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[self.solver.OPTIMIZER_NAME]
        return kind(groups, lr=self.solver.BASE_LR, weight_decay=self.solver.WEIGHT_DECAY)

    def _batches_from(self, start: int, stop: int = 0) -> Balanced:
        """The batches from a step on, this process's share of each."""
        images, loader, a = self.config.INPUT, self.config.DATALOADER, self.accelerator
        augment = Augment(images.SIZE, images.PROB, images.PADDING, images.RE_PROB, images.PIXEL_MEAN, images.PIXEL_STD)
        return Balanced(
            self.train_data,
            augment,
            identities=self.solver.IMS_PER_BATCH // loader.NUM_INSTANCE,
            shots=loader.NUM_INSTANCE,
            seed=self.solver.SEED,
            rank=a.process_index,
            world=a.num_processes,
            start=start,
            stop=stop,
            modalities=self.config.MODEL.MODALITIES,
            drop=loader.DROP_MODALITY,
            keep_in_memory=loader.KEEP_IN_MEMORY,
        )

    def _count_steps(self) -> tuple[int, int]:
        """All steps, and those of the warm-up."""
        steps_per_epoch = self.batches.steps_per_epoch
        steps = self.solver.MAX_EPOCHS * steps_per_epoch
        steps = min(steps, self.solver.MAX_STEPS or steps)
        warmup = round(self.solver.WARMUP_EPOCHS * steps_per_epoch)
        if warmup >= steps:
            raise UserError(
                f"SOLVER.WARMUP_EPOCHS: {self.solver.WARMUP_EPOCHS:g} are {warmup} steps, not less than the {steps} of the run"
            )
        return steps, warmup

    def _in_steps(self, epochs: float) -> int:
        return max(1, round(epochs * self.batches.steps_per_epoch))

    @property
    def checkpoint_every(self) -> int:
        return self._in_steps(self.solver.CHECKPOINT_PERIOD)

    @property
    def evaluate_every(self) -> int | None:
        return None if self.solver.EVAL_PERIOD is None else self._in_steps(self.solver.EVAL_PERIOD)

    # --- a step ---------------------------------------------------------------------------------------------------

    def step(self, index: int) -> dict[str, float]:
        began = time.perf_counter()
        if self._batches is None:
            self._batches = read_ahead(self._batches_from(index, self.steps), self.config.DATALOADER.NUM_WORKERS)
        inputs, labels = self._readable(*next(self._batches))
        factor = self.solver.rate(index, self.steps, self.warmup)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = factor * rate
        self.optimizer.zero_grad(set_to_none=True)
        share = len(labels)
        first = (index * self.accelerator.num_processes + self.accelerator.process_index) * share
        samples = first + torch.arange(share)  # different noise for every object of the run
        with self.handle, self.handle.call(samples=samples), self.accelerator.autocast():
            output = self.model(inputs)
        wanted = dict[str, Tensor]()
        if self.teacher is not None:
            with torch.no_grad(), self.accelerator.autocast():
                wanted = self.teacher.features(inputs)
        loss, values = self._losses(output, labels, wanted)
        self.scaler.scale(loss).backward()
        self._update()
        self.seconds += time.perf_counter() - began
        return values

    def _readable(self, inputs: Inputs, labels: Tensor, broken: list[str]) -> tuple[Inputs, Tensor]:
        """The batch on the device; a UserError if too many objects of the run cannot be read."""
        if not inputs:
            raise UserError(f"{broken[-1]}.")
        if broken and not self.broken:
            print(f"{broken[0]}: cannot be read; another shot of the same identity takes its place", file=sys.stderr)
        self.broken += len(broken)
        loader, whole = self.config.DATALOADER, self.steps * len(labels)
        if self.broken > loader.allowed(whole):
            raise UserError(
                f"{self.broken} objects could not be read, the last {broken[-1]}; of the {whole} objects of a process "
                f"at most {loader.allowed(whole)} are allowed (DATALOADER.MAX_BROKEN: {loader.MAX_BROKEN:g})"
            )
        return self._to_device(inputs), labels.to(self.device)

    def _to_device(self, inputs: Inputs) -> Inputs:
        return {name: value.to(self.device) for name, value in inputs.items()}

    def _losses(self, output: model.Output, labels: Tensor, wanted: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """The weighted sum of the losses of all branches, and the numbers to log. wanted: the teacher's features, if any."""
        settings, terms, weights = self.config.MODEL, dict[str, Tensor](), dict[str, float]()
        factors = {"plain": 1.0, "tokens": settings.SDTPS_LOSS_WEIGHT}
        for branch, features in output.features.items():
            terms[f"ce_{branch}"] = losses.identity(output.logits[branch], labels, settings.LABEL_SMOOTH)
            weights[f"ce_{branch}"] = factors[branch] * settings.ID_LOSS_WEIGHT
            terms[f"triplet_{branch}"] = losses.hard_triplet(features, labels)
            weights[f"triplet_{branch}"] = factors[branch] * settings.TRIPLET_LOSS_WEIGHT
        for branch, feature in wanted.items():
            terms[f"teacher_{branch}"] = losses.imitation(output.features[branch], feature)
            weights[f"teacher_{branch}"] = settings.TEACHER_LOSS_WEIGHT
        loss = torch.stack([weights[name] * value for name, value in terms.items() if weights[name]]).sum()
        right = torch.stack([(logits.argmax(1) == labels).float().mean() for logits in output.logits.values()]).mean()
        values = {"loss": loss} | terms | {"accuracy": right}
        return loss, {name: float(value.detach()) for name, value in values.items()}

    def _update(self) -> None:
        """Update the weights by the mean gradient of all processes, and average the statistics of the batch norms."""
        processes = self.accelerator.num_processes
        weights = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        average([p.grad for p in weights if p.grad is not None], processes)
        self.scaler.unscale_(self.optimizer)
        if self.solver.CLIP is not None:
            nn.utils.clip_grad_norm_(weights, self.solver.CLIP)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        average([statistic for norm in self.norms for statistic in (norm.running_mean, norm.running_var)], processes)

    # --- its state ------------------------------------------------------------------------------------------------

    @property
    def objectives(self) -> list[str]:
        """The losses in words."""
        settings = self.config.MODEL
        weights = {
            "cross-entropy of the identity": settings.ID_LOSS_WEIGHT,
            "soft-margin triplets of the hardest": settings.TRIPLET_LOSS_WEIGHT,
        }
        if settings.TEACHER:
            weights[f"distance from the features of {settings.TEACHER}"] = settings.TEACHER_LOSS_WEIGHT
        return [name for name, weight in weights.items() if weight]

    @property
    def recipe(self) -> dict[str, Any]:
        """What decides the result: keys of the file, fingerprints of the data, number format, and number of processes."""
        fingerprints = {"train": self.train_data.fingerprint}
        if self.val_data is not None:
            fingerprints["val"] = self.val_data.fingerprint
        recipe = self.config.recipe()
        recipe["SOLVER"]["MIXED_PRECISION"] = self.accelerator.mixed_precision  # the format that auto stands for
        return recipe | {"processes": self.accelerator.num_processes, "fingerprints": fingerprints}

    def state(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "seconds": self.seconds,
            "broken": training_start.processes(self).all_gather(self.broken),
        }

    def restore(self, state: dict[str, Any]) -> None:
        check_recipe(self.recipe, state["recipe"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.seconds, self.broken = state["seconds"], state["broken"][self.accelerator.process_index]
        self._batches = None

    def exports(self) -> dict[str, dict[str, Tensor]]:
        return {"model": dict(self.model.state_dict())}

    # --- measuring ------------------------------------------------------------------------------------------------

    def evaluate(self, index: int) -> dict[str, Any] | None:
        """mAP and CMC among the validation identities, with each object as a query, by the inference path."""
        data = self.val_data
        if data is None:
            return None
        encoded = [pair for share in training_start.processes(self).all_gather(self._encode()) for pair in share]
        encoded.sort(key=lambda pair: pair[0])
        lost = len(data.left_out)
        broken, n = len(data.shots) - len(encoded) + lost, len(data.shots) + lost
        loader = self.config.DATALOADER
        if broken > loader.allowed(n) or not encoded:
            raise UserError(
                f"{broken} of {n} validation objects could not be read; at most {loader.allowed(n)} are allowed "
                f"(DATALOADER.MAX_BROKEN: {loader.MAX_BROKEN:g})"
            )
        features, all_groups = torch.stack([feature for _, feature in encoded]), data.groups
        ids, groups = [data.shots[i].pid for i, _ in encoded], [all_groups[i] for i, _ in encoded]
        ranked = ranking.rank(features, features, query_ids=ids, gallery_ids=ids, query_groups=groups, gallery_groups=groups)
        measured = ranked.metrics()
        numbers = {name: measured[name] for name in ("mAP", "mAP_stderr", "rank_1", "rank_5", "rank_10")}
        return numbers | {"queries": len(encoded) - ranked.left_out, "unreadable": broken}

    @torch.no_grad()
    def _encode(self) -> list[tuple[int, Tensor]]:
        """Numbers and features of this process's share of the validation objects, of those that can be read."""
        assert self.views is not None
        encoded: list[tuple[int, Tensor]] = []
        loader = self.config.DATALOADER
        self.model.eval()
        try:
            with self.handle, self.accelerator.autocast():
                for numbers, inputs in read_ahead(self.views, 0 if loader.KEEP_IN_MEMORY else loader.NUM_WORKERS):
                    if not numbers:
                        continue
                    with self.handle.call(samples=torch.tensor(numbers)):
                        features = self.model.encode(self._to_device(inputs)).float().cpu()
                    encoded += zip(numbers, features, strict=True)
        finally:
            self.model.train()
        return encoded

    def _views(self, data: reid_data.ReidData) -> Views:
        """This process's share of the validation objects."""
        images, a, loader = self.config.INPUT, self.accelerator, self.config.DATALOADER
        mine = range(a.process_index, len(data), a.num_processes)
        plain = Plain(images.SIZE, images.PIXEL_MEAN, images.PIXEL_STD)
        return Views(data, plain, list(mine), self.config.TEST.IMS_PER_BATCH, loader.KEEP_IN_MEMORY)
