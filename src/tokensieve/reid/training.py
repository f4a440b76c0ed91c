"""A vision transformer learns to know people or vehicles again by several modalities, with few of its tokens (S5).

Every step shows P identities, K objects of each. Each branch of the model (plain: the global features; tokens: the mean of what
the plan leaves) says who it is, and shall lie nearer to its own identity than to any other of the batch. The plan is on the
model while it learns, by the same Handle as everywhere, so that backbone and reduction learn together.

What a step does depends on the seed and the step alone: the batch, its crops and flips, and the noise of the reduction. So a
resumed run ends with the same bits. With several processes each takes some of the identities of every batch; its triplets and
the statistics of its batch norm are within its share. Gradients are averaged, and so are the running statistics of the batch
norms after every step, so that all processes hold the same model.

The weights that are written are those with the best mAP on identities that were kept aside from training: the test split is
never looked at.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tokensieve.config.recipe import check_recipe
from tokensieve.cutting.handle import Handle
from tokensieve.errors import UserError
from tokensieve.models.loading.load_errors import collect_warnings
from tokensieve.plan import Plan
from tokensieve.reid import build, losses, model, ranking
from tokensieve.reid import data as reid_data
from tokensieve.reid.batches import Augment, Balanced, Plain
from tokensieve.reid.config import ReidTraining
from tokensieve.reid.views import Inputs, Views, named
from tokensieve.training import start as training_start
from tokensieve.training.loader import read_ahead
from tokensieve.training.processes import average, start_accelerator


class ReidLearner:
    """The model with its plan, its optimizer and the batches: what the loop drives."""

    monitor = ("mAP", "max")

    def __init__(self, config: ReidTraining) -> None:
        self.config, self.how = config, config.SOLVER
        self.accelerator = start_accelerator(self.how.DEVICE, self.how.MIXED_PRECISION, 1, "SOLVER.DEVICE")
        self.device = self.accelerator.device
        self.train_data, self.val_data = self._read()
        torch.manual_seed(self.how.SEED)
        with named("MODEL"):
            with collect_warnings() as notes:
                self.model = build.build(self._settings(), config.MODEL.PRETRAINED).to(self.device).train()
            self._tell(notes)
            self._check_patches()
            self.handle = Handle(self.model, Plan.parse(config.MODEL.plan), self.how.SEED, parts=self.model.parts)
            for note in self.handle.notes:
                raise UserError(f"{note}, so there is nothing to learn; keep fewer")
        self.norms: list[Any] = [module for module in self.model.modules() if isinstance(module, nn.BatchNorm1d)]
        self.optimizer = self._optimizer()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.accelerator.mixed_precision == "fp16")
        with named("SOLVER.IMS_PER_BATCH"):
            self.batches = self._batches_from(0)
            self._check_triplets()
        self.steps, self.warmup = self._count_steps()
        self.seconds = 0.0
        self.broken = 0  # objects of this process that another one replaced, since their images could not be read
        self._batches: Iterator[tuple[Inputs, Tensor, list[str]]] | None = None
        self.views = None if self.val_data is None else self._views(self.val_data)

    # --- what it is made of ---------------------------------------------------------------------------------------

    def _read(self) -> tuple[reid_data.ReidData, reid_data.ReidData | None]:
        """The identities to learn from, and those to choose by."""
        given = self.config.DATASETS
        with named("DATASETS"):
            found = [
                reid_data.load(given.NAMES, given.ROOT_DIR, split, given.VAL_IDENTITIES, self.config.MODEL.MODALITIES)
                for split in (("train", "val") if given.VAL_IDENTITIES else ("train",))
            ]
        self._tell([note for part in found for note in part.notes])
        for part in found:
            lost, n = len(part.left_out), len(part) + len(part.left_out)
            if lost > (allowed := self.config.DATALOADER.allowed(n)):
                raise UserError(
                    f"DATASETS: of {n} shots of {part.name} ({part.split}) {len(part.incomplete)} lack a modality and "
                    f"{len(part.misnamed)} are misnamed; {allowed} may be so "
                    f"(DATALOADER.MAX_BROKEN: {self.config.DATALOADER.MAX_BROKEN:g})"
                )
        return found[0], found[1] if len(found) > 1 else None

    def _tell(self, notes: list[str]) -> None:
        for note in dict.fromkeys(notes) if self.accelerator.is_main_process else ():
            print(note, file=sys.stderr)

    def _settings(self) -> model.Settings:
        given, seen, test = self.config.MODEL, self.config.INPUT, self.config.TEST
        return model.Settings(
            library=given.LIBRARY,
            backbone=given.TRANSFORMER_TYPE,
            arguments=given.ARGUMENTS,
            image_size=seen.SIZE,
            modalities=given.MODALITIES,
            shared=given.SHARED_BACKBONE,
            cameras=self.train_data.cameras if given.SIE_CAMERA else 0,
            camera_weight=given.SIE_COE,
            identities=len(self.train_data.pids),
            plan=given.plan,
            sparse_ratio=given.SDTPS_SPARSE_RATIO,
            aggr_ratio=given.SDTPS_AGGR_RATIO,
            beta=given.SDTPS_BETA,
            gumbel=given.SDTPS_USE_GUMBEL,
            feature=test.FEAT,
            neck=test.NECK_FEAT,
            mean=seen.PIXEL_MEAN,
            std=seen.PIXEL_STD,
            data=self.config.DATASETS.NAMES,
            val_identities=self.config.DATASETS.VAL_IDENTITIES,
        )

    def _check_patches(self) -> None:
        """A UserError where patches do not cover the image, or are asked to overlap."""
        wanted, (h, w), (high, wide) = self.config.MODEL.STRIDE_SIZE, self.model.grid, self.config.INPUT.SIZE
        name, patch = self.config.MODEL.TRANSFORMER_TYPE, (high // h, wide // w)
        if high % h or wide % w:
            raise UserError(
                f"INPUT.SIZE: {high} x {wide} is no multiple of {name}'s patches; {h * patch[0]} x {w * patch[1]} is one"
            )
        if wanted is not None and wanted != patch:
            raise UserError(
                f"STRIDE_SIZE: {list(wanted)}, but the patches of {name} are {patch[0]} x {patch[1]} pixels, without overlap; "
                f"write {list(patch)}"
            )

    def _check_triplets(self) -> None:
        """A UserError where a process has a single identity, so that its triplets lack the other one."""
        if self.config.MODEL.TRIPLET_LOSS_WEIGHT and self.batches.identities < 2 * self.batches.world:
            many, world = self.batches.identities, self.batches.world
            raise UserError(
                f"{many} identities shared by {world} processes are a single one for each, and a triplet needs two; "
                f"write {2 * world * self.batches.shots}"
            )

    def _optimizer(self) -> torch.optim.Optimizer:
        """Two groups, each with a learning rate of its own: the transformers, and all that is new."""
        old = [p for p in self.model.backbones.parameters() if p.requires_grad]
        known = {id(p) for p in old}
        new = [p for p in self.model.parameters() if p.requires_grad and id(p) not in known]
        self.rates = (self.how.BACKBONE_LR, self.how.BASE_LR)
        groups = [{"params": old}, {"params": new}]
        kind = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[self.how.OPTIMIZER_NAME]
        return kind(groups, lr=self.how.BASE_LR, weight_decay=self.how.WEIGHT_DECAY)

    def _batches_from(self, start: int, stop: int = 0) -> Balanced:
        """The batches from a step on, this process's part of each."""
        seen, given, a = self.config.INPUT, self.config.DATALOADER, self.accelerator
        augment = Augment(seen.SIZE, seen.PROB, seen.PADDING, seen.RE_PROB, seen.PIXEL_MEAN, seen.PIXEL_STD)
        return Balanced(
            self.train_data,
            augment,
            identities=self.how.IMS_PER_BATCH // given.NUM_INSTANCE,
            shots=given.NUM_INSTANCE,
            seed=self.how.SEED,
            rank=a.process_index,
            world=a.num_processes,
            start=start,
            stop=stop,
            modalities=self.config.MODEL.MODALITIES,
            drop=given.DROP_MODALITY,
            keep_in_memory=given.KEEP_IN_MEMORY,
        )

    def _count_steps(self) -> tuple[int, int]:
        """All steps, and those of the warm-up."""
        an_epoch = self.batches.steps_per_epoch
        steps = self.how.MAX_EPOCHS * an_epoch
        steps = min(steps, self.how.MAX_STEPS or steps)
        warmup = round(self.how.WARMUP_EPOCHS * an_epoch)
        if warmup >= steps:
            raise UserError(
                f"SOLVER.WARMUP_EPOCHS: {self.how.WARMUP_EPOCHS:g} are {warmup} steps, not less than the {steps} of the run"
            )
        return steps, warmup

    def _every(self, epochs: float) -> int:
        return max(1, round(epochs * self.batches.steps_per_epoch))

    @property
    def checkpoint_every(self) -> int:
        return self._every(self.how.CHECKPOINT_PERIOD)

    @property
    def evaluate_every(self) -> int | None:
        return None if self.how.EVAL_PERIOD is None else self._every(self.how.EVAL_PERIOD)

    # --- a step ---------------------------------------------------------------------------------------------------

    def step(self, index: int) -> dict[str, float]:
        began = time.perf_counter()
        if self._batches is None:
            self._batches = read_ahead(self._batches_from(index, self.steps), self.config.DATALOADER.NUM_WORKERS)
        inputs, labels = self._readable(*next(self._batches))
        part = self.how.rate(index, self.steps, self.warmup)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = part * rate
        self.optimizer.zero_grad(set_to_none=True)
        share = len(labels)
        first = (index * self.accelerator.num_processes + self.accelerator.process_index) * share
        samples = first + torch.arange(share)  # other noise for every object of the run
        with self.handle, self.handle.call(samples=samples), self.accelerator.autocast():
            made = self.model(inputs)
        loss, told = self._losses(made, labels)
        self.scaler.scale(loss).backward()
        self._move()
        self.seconds += time.perf_counter() - began
        return told

    def _readable(self, inputs: Inputs, labels: Tensor, broken: list[str]) -> tuple[Inputs, Tensor]:
        """The batch on the device; a UserError if of all that is to be read too much cannot be."""
        if not inputs:
            raise UserError(f"{broken[-1]}.")
        if broken and not self.broken:
            print(f"{broken[0]}: cannot be read; another shot of the same identity takes its place", file=sys.stderr)
        self.broken += len(broken)
        given, whole = self.config.DATALOADER, self.steps * len(labels)
        if self.broken > given.allowed(whole):
            raise UserError(
                f"{self.broken} objects could not be read, the last {broken[-1]}; of the {whole} that a process learns from "
                f"{given.allowed(whole)} may be so (DATALOADER.MAX_BROKEN: {given.MAX_BROKEN:g})"
            )
        return self._here(inputs), labels.to(self.device)

    def _here(self, inputs: Inputs) -> Inputs:
        return {name: value.to(self.device) for name, value in inputs.items()}

    def _losses(self, made: model.Output, labels: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Of each branch who it is and the triplets, weighed and added; and what is told of them."""
        given, parts = self.config.MODEL, dict[str, Tensor]()
        for branch, features in made.features.items():
            parts[f"ce_{branch}"] = losses.identity(made.logits[branch], labels, given.LABEL_SMOOTH)
            parts[f"triplet_{branch}"] = losses.hard_triplet(features, labels)
        weights = {"ce": given.ID_LOSS_WEIGHT, "triplet": given.TRIPLET_LOSS_WEIGHT}
        loss = torch.stack([weights[name.partition("_")[0]] * value for name, value in parts.items()]).sum()
        right = torch.stack([(logits.argmax(1) == labels).float().mean() for logits in made.logits.values()]).mean()
        told = {"loss": loss} | parts | {"accuracy": right}
        return loss, {name: float(value.detach()) for name, value in told.items()}

    def _move(self) -> None:
        """The step of the optimizer by the mean gradient of all processes; then batch norms have the mean statistics."""
        processes = self.accelerator.num_processes
        weights = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        average([p.grad for p in weights if p.grad is not None], processes)
        self.scaler.unscale_(self.optimizer)
        if self.how.CLIP is not None:
            nn.utils.clip_grad_norm_(weights, self.how.CLIP)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        average([statistic for norm in self.norms for statistic in (norm.running_mean, norm.running_var)], processes)

    # --- its state ------------------------------------------------------------------------------------------------

    @property
    def objectives(self) -> list[str]:
        """What it learns by, in words."""
        given = self.config.MODEL
        named = {
            "cross-entropy of the identity": given.ID_LOSS_WEIGHT,
            "soft-margin triplets of the hardest": given.TRIPLET_LOSS_WEIGHT,
        }
        return [name for name, weight in named.items() if weight]

    @property
    def recipe(self) -> dict[str, Any]:
        """What decides the result: the file, the data that it names, the number format, and how many processes there are."""
        prints = {"train": self.train_data.fingerprint}
        if self.val_data is not None:
            prints["val"] = self.val_data.fingerprint
        told = self.config.recipe()
        told["SOLVER"]["MIXED_PRECISION"] = self.accelerator.mixed_precision  # what auto is here
        return told | {"processes": self.accelerator.num_processes, "fingerprints": prints}

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
        """mAP and CMC among the validation identities, each object asked for the others, by the path that is used later."""
        found = self.val_data
        if found is None:
            return None
        told = [pair for one in training_start.processes(self).all_gather(self._encoded()) for pair in one]
        told.sort(key=lambda pair: pair[0])
        lost = len(found.left_out)
        broken, n = len(found.shots) - len(told) + lost, len(found.shots) + lost
        given = self.config.DATALOADER
        if broken > given.allowed(n) or not told:
            raise UserError(
                f"{broken} of {n} validation objects could not be read; {given.allowed(n)} may be so "
                f"(DATALOADER.MAX_BROKEN: {given.MAX_BROKEN:g})"
            )
        features, all_groups = torch.stack([feature for _, feature in told]), found.groups
        ids, groups = [found.shots[i].pid for i, _ in told], [all_groups[i] for i, _ in told]
        ranked = ranking.rank(features, features, query_ids=ids, gallery_ids=ids, query_groups=groups, gallery_groups=groups)
        measured = ranked.metrics()
        numbers = {name: measured[name] for name in ("mAP", "mAP_stderr", "rank_1", "rank_5", "rank_10")}
        return numbers | {"queries": len(told) - ranked.left_out, "unreadable": broken}

    @torch.no_grad()
    def _encoded(self) -> list[tuple[int, Tensor]]:
        """Numbers and features of this process's part of the validation objects; those that can be read."""
        assert self.views is not None
        told: list[tuple[int, Tensor]] = []
        given = self.config.DATALOADER
        self.model.eval()
        try:
            with self.handle, self.accelerator.autocast():
                for numbers, inputs in read_ahead(self.views, 0 if given.KEEP_IN_MEMORY else given.NUM_WORKERS):
                    if not numbers:
                        continue
                    with self.handle.call(samples=torch.tensor(numbers)):
                        features = self.model.encode(self._here(inputs)).float().cpu()
                    told += zip(numbers, features, strict=True)
        finally:
            self.model.train()
        return told

    def _views(self, found: reid_data.ReidData) -> Views:
        """This process's part of the validation objects."""
        seen, a, given = self.config.INPUT, self.accelerator, self.config.DATALOADER
        mine = range(a.process_index, len(found), a.num_processes)
        plain = Plain(seen.SIZE, seen.PIXEL_MEAN, seen.PIXEL_STD)
        return Views(found, plain, list(mine), self.config.TEST.IMS_PER_BATCH, given.KEEP_IN_MEMORY)
