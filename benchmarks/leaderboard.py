"""The leaderboard: every method of the registry on every task, at the same shares of tokens left, over measured time.

    python benchmarks/leaderboard.py --quick                                  # all tasks on the embedded models
    python benchmarks/leaderboard.py --tasks classification vqa --methods tome cover --limit 300
    python benchmarks/leaderboard.py --tasks photos --real-clip CLIP_FOLDER PHOTOS CLASSIFIER

One file for each task and method in benchmarks/results/leaderboard. It is resumable row by row: what is there of a task,
method, place, budget and number of samples is not made again, and files are replaced whole. A method is placed where its
authors put it and, where that is possible, at a place that is the same for all: after half the depth of a tower (half), and in
a vision-language model at the tower's output (out) and before layer 2 of the language model (llm.2). Trained parts that come
with a model also have a row with the plan that they were trained for (trained). Budgets are shares of the tokens that are left
at the end; where a method cuts several times, its budget is searched. Methods that a model cannot carry out are recorded with
the reason.

Scores and paired differences are those of `tokensieve eval` on the first --limit samples. Times are measured on one batch in
one thread, in rounds in which the full model, all plans of a method and their oracles run in turn. They are of the image tower
(of vision-language models: of the whole prompt), also where a task does more with its output, as captioning does.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from remember import remember_outputs

from tokensieve import embedded, files, list_methods, provenance
from tokensieve.cli import main as tokensieve
from tokensieve.cutting.handle import Handle
from tokensieve.data import registry as data_registry
from tokensieve.data import vqa
from tokensieve.errors import one_line
from tokensieve.evaluation import run as evaluation
from tokensieve.leaderboard import rows as board
from tokensieve.measuring.flops import gflops
from tokensieve.measuring.generation import measure_all, prompts
from tokensieve.measuring.oracle import oracle
from tokensieve.measuring.rounds import Ratio, Variant, detached_handle, interleaved
from tokensieve.methods.registry import Method
from tokensieve.models import loading
from tokensieve.models.features import encode_image
from tokensieve.models.loading.loaded import Loaded
from tokensieve.models.registry import open_tower
from tokensieve.models.vlm import open_vlm
from tokensieve.parts.files import read_header
from tokensieve.parts.fit import SHIPPED, parts_of_model
from tokensieve.parts.signature import model_signature, signatures_match
from tokensieve.plan import Plan
from tokensieve.tasks.captioning import metrics as caption_metrics

FOLDER = Path(__file__).parent / "results" / "leaderboard"
BUDGETS = (0.5, 0.3, 0.15, 0.08)
LARGER = (0.75, 0.6)  # images for `resize`, so that its curve covers the times of the others
NEAR = 0.1  # of the target: how far the tokens left may be from it
AUTHORS, HALF, TRAINED = "authors", "half", "trained"  # places
CPU = torch.device("cpu")
SEED = 0


@dataclass(frozen=True)
class BoardTask:
    """A task of the leaderboard."""

    name: str
    kind: str  # of model: tower, vlm or reid
    metric: str
    flags: tuple[str, ...]  # of `tokensieve eval`
    limit: int  # samples
    quick: int  # samples with --quick
    model: str = embedded.MODEL
    model_type: str = "open_clip"
    dataset: str = embedded.DATASET
    pretrained: str = embedded.PRETRAINED


TASKS = (
    BoardTask("classification", "tower", "acc1", (), 500, 200),
    BoardTask("held-out", "tower", "acc1", (), 500, 100, dataset="embedded-heldout"),
    BoardTask("retrieval", "tower", "image_retrieval_recall@5", (), 500, 100, dataset="embedded-captions"),
    BoardTask("caption selection", "tower", "acc", (), 300, 100, dataset="embedded-selection"),
    BoardTask("linear probe", "tower", "lp_acc1", ("--task", "linear_probe", "--fewshot_k", "-1"), 1000, 100),
    BoardTask(
        name="captioning",
        kind="tower",
        metric="CIDEr",
        flags=("--task", "captioning"),
        limit=300,
        quick=50,
        model=embedded.CAPTIONER,
        dataset="embedded-captions",
        pretrained=embedded.CAPTIONER_PRETRAINED,
    ),
    BoardTask("vqa", "vlm", "vqa_score", (), 400, 100, "sieve-llava-8", "vlm", "embedded-questions", ""),
    BoardTask(
        name="re-identification",
        kind="reid",
        metric="mAP",
        flags=("--modalities", "RGB,NI,TI"),
        limit=300,
        quick=100,
        model=embedded.REID,
        model_type="reid",
        dataset="embedded-reid",
        pretrained="",
    ),
)
PHOTOS = "photos"  # the task of --real-clip


class Skip(Exception):
    """Why a method has no row at a place."""


def reason(error: BaseException) -> str:
    """An error as a reason."""
    text = one_line(getattr(error, "reason", None) or error, 300)
    return (
        text if isinstance(error, (Skip, ValueError)) or type(error).__module__.startswith("tokensieve") else f"fails: {text}"
    )


# --------------------------------------------------------------------------------------------------------------- models


@dataclass
class Subject:
    """A model with a batch on which plans are tried and timed."""

    net: Any
    tokens: int  # of an image
    places: dict[str, str]  # the common ones: what rows call them, and as a plan writes them
    call: Callable[[], Any]  # the timed batch
    one: Callable[[], Any]  # one sample
    inputs: dict[str, Any] | None = None  # of a vision-language model
    costs: dict[str, dict[str, Any]] = field(default_factory=dict)  # times and GFLOPs by plan
    tried: dict[str, list[Any]] = field(default_factory=dict)  # the ledger by plan

    def handle(self, plan: str) -> Handle:
        return detached_handle(self.net, plan, seed=SEED)

    def ledger(self, plan: str) -> list[Any]:
        """What a plan does to the tokens of the timed batch."""
        if plan not in self.tried:
            handle = self.handle(plan)
            if handle.leaves_feature:
                raise Skip("the image feature does not depend on the tokens at the tower's output")
            with handle:
                self.one()
            self.tried[plan] = handle.ledger
        return self.tried[plan]

    def left(self, plan: str) -> int:
        """The tokens that a plan leaves at the end."""
        found = self.ledger(plan)
        return found[-1].tokens_out if found else self.tokens


def load_subject(task: BoardTask, batch_size: int, eval_flags: Sequence[str]) -> Subject:
    """The model of a task, and a batch of its data (of re-identification: of noise)."""
    if task.kind == "vlm":
        return _vlm(batch_size)
    if task.kind == "reid":
        return _reid(task.model, batch_size)
    loaded = loading.load(task.model, task.pretrained, model_type=task.model_type)
    given = dict(pairwise(eval_flags))
    data = task.dataset if task.name == PHOTOS else embedded.DATASET  # times do not depend on the images
    source = data_registry.build_source(
        data, loaded.transform, root=given.get("--dataset_root", "root"), split="test", limit=batch_size
    )
    images = next(iter(source.loader(batch_size, 0))).images
    net = loaded.model.eval()
    tower = open_tower(net)
    run = partial(encode_image, net)
    h, w = tower.grid
    return Subject(net, h * w, {HALF: str(len(tower.blocks) // 2)}, partial(run, images), partial(run, images[:1]))


def _reid(model: str, batch_size: int) -> Subject:
    net = loading.load(model, "", model_type="reid").model.eval()
    shape = (batch_size, 3, *net.settings.image_size)
    generator = torch.Generator().manual_seed(SEED)
    inputs = {modality: torch.randn(shape, generator=generator) for modality in net.modalities}
    inputs["cameras"] = torch.zeros(batch_size, dtype=torch.long)
    tower = open_tower(net)
    h, w = tower.grid
    single = {name: value[:1] for name, value in inputs.items()}
    return Subject(net, h * w, {HALF: str(len(tower.blocks) // 2)}, partial(net.encode, inputs), partial(net.encode, single))


def _vlm(batch_size: int) -> Subject:
    loaded = loading.load("sieve-llava-8", "", model_type="vlm")
    net = loaded.model.eval()
    inputs = prompts(net, batch_size)
    data = vqa.load("embedded", split="test", limit=batch_size)
    pictures = [data[number].image for number in range(batch_size)]
    inputs["pixel_values"] = loaded.processor.image_processor(images=pictures, return_tensors="pt")["pixel_values"]
    single = {name: value[:1] for name, value in inputs.items()}
    vlm = open_vlm(net)
    assert vlm is not None and vlm.tower is not None
    h, w = vlm.tower.grid
    return Subject(
        net, h * w, {"out": "out", "llm.2": "llm.2"}, partial(_read, net, inputs), partial(_read, net, single), inputs
    )


@torch.no_grad()
def _read(net: Any, inputs: dict[str, Any]) -> Any:
    return net(**inputs, logits_to_keep=1)


# ---------------------------------------------------------------------------------------------------------------- plans


@dataclass(frozen=True)
class Entry:
    """A row to be made."""

    method: Method
    plan: str
    placement: str
    budget: float | None


@dataclass
class MethodFile:
    """The rows of a method on a task: those that are there, and those to be made."""

    method: Method
    path: Path
    rows: list[dict[str, Any]]
    skipped: list[dict[str, Any]]
    done: set[tuple[str, float | None]]  # placement and budget of the rows that need not be made again
    entries: list[Entry] = field(default_factory=list)

    def skip(self, placement: str, budgets: Sequence[float], why: str) -> None:
        self.skipped.append({"method": self.method.name, "placement": placement, "budgets": [*budgets], "reason": why})

    def write(self, about: dict[str, str]) -> None:
        """Replaces the file; a new row takes the place of an older one about the same."""
        rows = {board.key_of(row): row for row in self.rows}
        files.write_bytes(self.path, files.json_bytes(board.file_value([*rows.values()], [about | e for e in self.skipped])))


def open_file(method: Method, path: Path, samples: int, budgets: Sequence[float], again: bool) -> MethodFile:
    """The file of a method. What could not be made is tried again, so these notes are dropped."""
    rows, skipped = board.read_file(path) if path.exists() else ([], [])
    kept = []
    for entry in skipped:
        others = [budget for budget in entry.get("budgets", ()) if budget not in budgets]
        if others:
            kept.append(entry | {"budgets": others})
    done = {(row["placement"], row["budget"]) for row in rows if row["samples"] == samples and not again}
    return MethodFile(method, path, rows, kept, done)


def find_entries(found: MethodFile, subject: Subject, budgets: Sequence[float]) -> Iterator[Entry]:
    """The rows of a method that are missing at some budgets; what cannot be made is noted with its reason."""
    method = found.method
    if method.on_image:
        for share in (*LARGER, *budgets):
            if (AUTHORS, share) not in found.done:
                yield Entry(method, f"{method.name}(scale={math.sqrt(share):.3f})", AUTHORS, share)
        return
    if (TRAINED, None) not in found.done and (plan := trained_plan(method, subject.net)):
        yield Entry(method, plan, TRAINED, None)
    for placement in (AUTHORS, *subject.places):
        refused: dict[str, list[float]] = {}
        reached = sum((placement, budget) in found.done for budget in budgets)
        for budget in budgets:
            if (placement, budget) in found.done:
                continue
            try:
                plan = find_plan(method, subject, placement, max(1, round(budget * subject.tokens)))
                reached += 1
                yield Entry(method, plan, placement, budget)
            except Exception as error:
                refused.setdefault(reason(error), []).append(budget)
        if not reached and placement == AUTHORS and (AUTHORS, None) not in found.done:
            with contextlib.suppress(Exception):
                if subject.left(method.name) < subject.tokens:
                    yield Entry(method, method.name, placement, None)
        for why, those in refused.items():
            found.skip(placement, those, why)


def trained_plan(method: Method, net: Any) -> str:
    """The plan that the part of a method was trained for; "" where none comes with the model."""
    if method.part is None:
        return ""
    own = parts_of_model(net)
    if method.name in own:
        places: list[str] = own[method.name].places()  # type: ignore[operator]
        return f"{method.name}@{','.join(places)}"
    path = SHIPPED / f"{method.name}.safetensors"
    if not path.is_file():
        return ""
    header = read_header(path)
    plan: str = header["trained"]["plans"][0]
    return plan if signatures_match(model_signature(net), header) else ""


def find_plan(method: Method, subject: Subject, placement: str, keep: int) -> str:
    """The plan that leaves so many tokens at the end."""
    name = method.name
    if placement != AUTHORS:
        place = subject.places[placement]
        with contextlib.suppress(Exception):  # where the authors put it: the same plan
            if [row.layer for row in subject.ledger(f"{name}:{keep}")] == [place]:
                place = ""
        name = f"{name}@{place}" if place else name
    plan = f"{name}:{keep}"
    if len(subject.ledger(plan)) > 1:
        plan = search(name, subject, keep, removes=_removes(method))
    last = subject.ledger(plan)[-1]
    left, slack, extra = last.tokens_out, max(2.0, NEAR * keep), max(0, method.n_extra(int(last.tokens_in), keep))
    if left > keep + slack + extra or (left < keep - slack and not method.adaptive):
        raise Skip(f"leaves {left} of {subject.tokens} tokens where {keep} are wanted")
    return plan


def _removes(method: Method) -> bool:
    """Whether the method's own budget is a number of tokens to remove."""
    if method.budget is None:
        return False
    return str(method.budget({name: option.default for name, option in method.options.items()})).startswith("-")


def search(name: str, subject: Subject, keep: int, removes: bool) -> str:
    """The budget of a method with several cuts that leaves nearest to so many tokens: so many fewer, or a share, at each."""
    low, high = (0, subject.tokens) if removes else (1, 1000)
    best: tuple[float, str] = (math.inf, "")
    while low <= high:
        middle = (low + high) // 2
        plan = f"{name}:-{middle}" if removes else f"{name}:{middle / 10:g}%"
        try:
            left = subject.left(plan)
        except ValueError:  # it would leave no token
            left = 0
        best = min(best, (abs(left - keep) if left else math.inf, plan))
        if left == keep:
            break
        if (left > keep) == removes:
            low = middle + 1
        else:
            high = middle - 1
    if not best[1]:
        raise Skip(f"no budget leaves about {keep} tokens")
    return best[1]


# ---------------------------------------------------------------------------------------------------------------- times


def measure_costs(subject: Subject, plans: Sequence[str], rounds: int) -> None:
    """Times and GFLOPs of plans, in the same rounds as the full model and the oracles."""
    missing = [plan for plan in dict.fromkeys(plans) if plan not in subject.costs]
    if not missing:
        return
    handles = [subject.handle(plan) for plan in missing]
    if subject.inputs is not None:
        found = measure_all(subject.net, subject.inputs, handles, rounds, 4, what={"oracle", "gflops"})
        for plan, row in zip(missing, found, strict=True):
            faster, ends = row["speedup"]["total"], (row["speedup_low"]["total"], row["speedup_high"]["total"])
            realized = row["realized"]["total"]
            subject.costs[plan] = {
                "time_ratio": 1 / faster,
                "time_ratio_low": 1 / ends[1],
                "time_ratio_high": 1 / ends[0],
                "oracle_ratio": None if realized is None else realized / faster,
                "gflops": row["gflops"]["all"],
                "gflops_none": row["gflops_full"]["all"],
            }
        return
    with torch.inference_mode():
        call, one = subject.call, subject.one
        full_cost = gflops(one)
        variants = [Variant(call), *(Variant(call, handle) for handle in handles)]
        for variant in variants:
            variant.run()
        costs, oracles = [], []
        for handle in handles:
            oracles.append(_oracle(subject, handle))
            with handle:
                costs.append(gflops(one))
        known = [ideal for ideal in oracles if ideal is not None]
        times = interleaved([*variants, *known], CPU, range(rounds))
    counted = [[each.counted(CPU) for each in series] for series in times]
    ideals = iter(counted[len(variants) :])
    for number, (plan, ideal, cost) in enumerate(zip(missing, oracles, costs, strict=True), start=1):
        ratio = Ratio.of(counted[number], counted[0])
        subject.costs[plan] = {
            "time_ratio": ratio.median,
            "time_ratio_low": ratio.low,
            "time_ratio_high": ratio.high,
            "oracle_ratio": None if ideal is None else Ratio.of(next(ideals), counted[0]).median,
            "gflops": cost,
            "gflops_none": full_cost,
        }


def _oracle(subject: Subject, handle: Handle) -> Variant | None:
    """The oracle of the handle's last pass, warm; None if there is none."""
    try:
        ideal = Variant(subject.call, detached_handle(subject.net, oracle(handle)))
        ideal.run()
    except Exception:  # of a plan whose numbers of tokens no other can have
        return None
    return ideal


# --------------------------------------------------------------------------------------------------------------- scores


class RememberingModels(evaluation.ModelCache):
    """Models whose tower blocks remember their last outputs, so that plans share the work before their first cut."""

    def get(self, model: str, pretrained: str) -> Loaded:
        is_new = self.loaded is None or self.names != (model, pretrained)
        loaded = super().get(model, pretrained)
        if is_new and self.args.model_type != "reid":  # timm's blocks are cut only if they are of timm's own classes
            vlm = open_vlm(loaded.model)
            tower = vlm.tower if vlm is not None else open_tower(loaded.model)
            assert tower is not None
            remember_outputs([block.module for block in tower.blocks], inputs=3)
        return loaded


def _without_meteor(gts: Any, res: Any) -> tuple[float, list[float]]:
    """Takes the place of METEOR, whose program loads its tables for 7 s for every plan; the leaderboard reads CIDEr."""
    raise caption_metrics._LeftOut("the leaderboard does not read it")


def evaluate(task: BoardTask, plans: Sequence[str], limit: int, flags: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Results of `tokensieve eval` by plan, the full model's under none; a Skip with the error if it failed."""
    evaluation.ModelCache = RememberingModels  # type: ignore[misc]
    caption_metrics._meteor = _without_meteor
    errors = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        args = ["eval", *task.flags, *flags, "--plan", "none", "--compare", *plans, "--quiet"]
        args += ["--model", task.model, "--model_type", task.model_type, "--dataset", task.dataset, "--limit", str(limit)]
        args += ["--num_workers", "0", "--batch_size", "32", "--seed", str(SEED), "--output", f"{folder}/out/"]
        if task.pretrained:
            args += ["--pretrained", task.pretrained]
        if "linear_probe" in task.flags:
            args += ["--feature_root", f"{folder}/features"]
        with contextlib.redirect_stderr(errors):
            code = tokensieve(args)
        if code:
            lines = [line for line in errors.getvalue().splitlines() if line.strip()]
            raise Skip(f"the evaluation failed: {lines[-1] if lines else f'exit code {code}'}")
        found = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder, "out").glob("*.json")]
    return {row["reduction"]["plan"]: row for row in found}


def make_row(task: BoardTask, entry: Entry, found: dict[str, dict[str, Any]], subject: Subject, args: Any) -> dict[str, Any]:
    """One row of the leaderboard."""
    result, full = found[str(Plan.parse(entry.plan))], found["none"]
    score, score_none = result["metrics"][task.metric], full["metrics"][task.metric]
    return {
        "task": task.name,
        "dataset": task.dataset,
        "model": args.model_name if task.name == PHOTOS else task.model,
        "method": entry.method.name,
        "control": entry.method.control or entry.method.on_image,
        "plan": entry.plan,
        "placement": entry.placement,
        "budget": entry.budget,
        "tokens_in": subject.tokens,
        "tokens_left": result["reduction"]["tokens_out"],
        "metric": task.metric,
        "score": score,
        "score_none": score_none,
        "difference": score - score_none,
        "difference_stderr": result["reduction"]["lost_stderr"],
        **subject.costs[entry.plan],
        "samples": result["run"]["n_samples"],
        "seeds": [SEED],
        "batch_size": args.batch_size,
        "rounds": args.rounds,
        "threads": torch.get_num_threads(),
        "clock": "cpu",
        "versions": provenance.versions(),
        "notes": result["reduction"]["notes"],
    }


# ------------------------------------------------------------------------------------------------------------------ run


def run_task(task: BoardTask, subject: Subject, methods: Sequence[Method], args: Any) -> None:
    """Makes the rows of a task that are missing, some methods at a time."""
    limit = args.limit or (task.quick if args.quick else task.limit)
    model = args.model_name if task.name == PHOTOS else task.model
    about = {"task": task.name, "model": model}
    waiting: list[MethodFile] = []
    for method in methods:
        path = args.folder / board.file_name(task.name, model, method.name)
        found = open_file(method, path, limit, args.budgets, args.again)
        entries = list(find_entries(found, subject, args.budgets))
        try:
            measure_costs(subject, [entry.plan for entry in entries], args.rounds)
            found.entries = entries
        except Exception as error:
            found.skip("", args.budgets, reason(error))
        waiting.append(found)
        if sum(len(found.entries) for found in waiting) >= args.plans:
            finish(task, subject, waiting, limit, about, args)
            waiting = []
    finish(task, subject, waiting, limit, about, args)


COSTS = (*board.RATIOS, "oracle_ratio", "gflops", "gflops_none")


def known_costs(folder: Path, model: str, args: Any) -> dict[str, dict[str, Any]]:
    """The times of plans that another task with the same model needed, measured in the same way."""
    found: dict[str, dict[str, Any]] = {}
    for row in board.read_folder(folder)[0]:
        if (row["model"], row["batch_size"], row["rounds"]) == (model, args.batch_size, args.rounds):
            found.setdefault(row["plan"], {name: row[name] for name in COSTS})
    return found


def finish(
    task: BoardTask, subject: Subject, waiting: Sequence[MethodFile], limit: int, about: dict[str, str], args: Any
) -> None:
    """Evaluates the plans of some methods in one pass, and writes a file for each. If that fails: each half of them."""
    if not waiting:
        return
    started, plans = time.perf_counter(), list(dict.fromkeys(entry.plan for file in waiting for entry in file.entries))
    found: dict[str, dict[str, Any]] = {}
    try:
        found = evaluate(task, plans, limit, args.eval_flags if task.name == PHOTOS else ()) if plans else {}
    except Exception as error:
        if len(waiting) > 1:
            for half in (waiting[: len(waiting) // 2], waiting[len(waiting) // 2 :]):
                finish(task, subject, half, limit, about, args)
            return
        waiting[0].skip("", args.budgets, reason(error))
        waiting[0].entries = []
    for file in waiting:
        for entry in file.entries:
            try:
                file.rows.append(board.check_row(make_row(task, entry, found, subject, args), "this run"))
            except Exception as error:
                file.skip(entry.placement, [] if entry.budget is None else [entry.budget], reason(error))
        file.write(about)
    if plans:
        took = time.perf_counter() - started
        done = ", ".join(file.method.name for file in waiting if file.entries)
        print(f"{task.name}, {about['model']}: {done}: {len(plans)} plans, {took:.0f} s for scores", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks", nargs="+", choices=[*(task.name for task in TASKS), PHOTOS], help="default: all embedded ones"
    )
    parser.add_argument("--methods", nargs="+", help="default: all of the registry")
    parser.add_argument("--quick", action="store_true", help="fewer samples and rounds, smaller timed batches")
    parser.add_argument("--limit", type=int, help="samples of each task (default: 286 to 1,000, with --quick 50 to 200)")
    parser.add_argument("--batch_size", type=int, help="of the timed batch (default: 16, with --quick 8)")
    parser.add_argument("--rounds", type=int, help="in which times are measured (default: 7, with --quick 3)")
    parser.add_argument("--plans", type=int, default=60, help="about so many in one pass over the data (default: 60)")
    parser.add_argument("--budgets", nargs="+", type=float, default=BUDGETS, help="shares of the tokens left")
    parser.add_argument("--again", action="store_true", help="make rows again that are there")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument(
        "--real-clip", nargs=3, metavar=("CLIP", "PHOTOS", "CLASSIFIER"), help="model, data and classifier of photos"
    )
    args = parser.parse_args()
    args.batch_size = args.batch_size or (8 if args.quick else 16)
    args.rounds = args.rounds or (3 if args.quick else 7)
    args.eval_flags, args.model_name = [], "CLIP ViT-B/16"
    chosen = [task for task in TASKS if task.name in (args.tasks or [task.name for task in TASKS])]
    if args.real_clip:
        clip, photos, classifier = args.real_clip
        args.eval_flags = ["--dataset_root", photos, "--load_clfs", classifier]
        photo_task = BoardTask(PHOTOS, "tower", "acc1", (), 286, 96, clip, "hf", "wds/photos", "")
        chosen = [photo_task] if not args.tasks or args.tasks == [PHOTOS] else [*chosen, photo_task]
    elif PHOTOS in (args.tasks or ()):
        parser.error("--tasks photos needs --real-clip CLIP PHOTOS CLASSIFIER")
    methods = [method for method in list_methods() if method.name != "none"]
    if args.methods:
        if unknown := set(args.methods) - {method.name for method in methods}:
            parser.error(f"no method is named {', '.join(sorted(unknown))}")
        methods = [method for method in methods if method.name in args.methods]
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    subjects: dict[str, Subject] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for task in chosen:
            if task.model not in subjects:
                subjects[task.model] = load_subject(task, args.batch_size, args.eval_flags)
                name = args.model_name if task.name == PHOTOS else task.model
                subjects[task.model].costs = {} if args.again else known_costs(args.folder, name, args)
            run_task(task, subjects[task.model], methods, args)


if __name__ == "__main__":
    sys.exit(main())
