"""A linear probe gives clip_benchmark's numbers; features that were kept are used again, and only where they are the same."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.paired import assert_paired
from tests.support.pictures import picture
from tests.support.rounding import assert_near
from tokensieve.data import registry as data_registry
from tokensieve.data.source import Broken, Source
from tokensieve.errors import UserError
from tokensieve.models.loading.loaded import Loaded
from tokensieve.tasks.base import TaskContext
from tokensieve.tasks.linear_probe import feature_store
from tokensieve.tasks.linear_probe.probe import Features, Probe, first_k_per_class
from tokensieve.tasks.linear_probe.task import LinearProbeTask

SETTINGS: dict[str, Any] = {
    "split": "test",
    "train_split": "train",
    "val_split": None,
    "val_proportion": None,
    "fewshot_k": -1,
    "fewshot_epochs": 2,
    "fewshot_lr": 0.05,
    "normalize": True,
    "skip_load": False,
    "batch_size": 16,
    "num_workers": 0,
    "seed": 3,
    "limit": None,
    "model_type": "open_clip",
    "token_fusion": "cls",
    "token_fusion_weight": 0.8,
    "token_fusion_temperature": 1.0,
}
NAMES = ("lp_acc1", "lp_acc5", "lp_mean_per_class_recall", "weight_decay", "epochs", "seed", "fewshot_k", "normalized")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fer2013's layout with a training split: 7 classes, a third of the images in another class's colour."""
    root = tmp_path_factory.mktemp("fer2013")
    draws = np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 5)):
        for label in range(7):
            (root / split / str(label)).mkdir(parents=True)
            for number in range(count):
                colour = int(draws.integers(6)) if draws.random() < 0.35 else label % 6
                picture(colour, int(draws.integers(10**6))).save(root / split / str(label) / f"{number}.png")
    return root


@pytest.fixture
def context(tiny_clip: SimpleNamespace, folder: Path, tmp_path: Path) -> Callable[..., TaskContext]:
    model, transform, tokenizer = tiny_clip.make()

    def make(**changes: Any) -> TaskContext:
        own = {"fingerprint": "f" * 32, "root": folder, "warn": pytest.fail, **changes}
        fingerprint, root, warn = own.pop("fingerprint"), own.pop("root"), own.pop("warn")
        args = argparse.Namespace(**{**SETTINGS, "feature_root": str(tmp_path / "features"), **own})
        loaded = Loaded(None if args.skip_load else model, transform, tokenizer, "" if args.skip_load else fingerprint)

        def source(split: str) -> Source:
            return data_registry.build_source(
                "fer2013",
                transform,
                root=str(root),
                split=split,
                limit=args.limit,
                task="linear_probe",
                needs_class_names=False,
            )

        cpu = torch.device("cpu")
        return TaskContext("tiny-clip", "tiny", "fer2013", "en", args, loaded, cpu, contextlib.nullcontext, False, warn, source)

    return make


def run(context: TaskContext, plan: str = "none") -> tuple[dict[str, Any], int]:
    """The numbers, and how many passes over images they took."""
    task = LinearProbeTask(context)
    records: dict[str, list[Any]] = {}
    passes = 0
    for split, source in task.sources().items():
        kept = task.stored(plan, split)
        if kept is not None:
            records[split] = kept.records
            continue
        passes += 1
        batches = [batch for batch in source.loader(context.args.batch_size, 0) if batch.images is not None]
        with torch.inference_mode():
            records[split] = [
                task.batch(split, batch.images, batch.targets, [context.loaded.model.encode_image])[0] for batch in batches
            ]
        task.store(plan, split, records[split], torch.cat([batch.samples for batch in batches]), [])
    return task.metrics(records), passes


# ------------------------------------------------------------------------------------------------------------ the numbers


class PassesForCuda(str):
    """A device's name that is 'cpu' to torch and 'cuda' to whoever compares it."""

    def __eq__(self, other: object) -> bool:
        return other in ("cuda", "cpu")

    def __hash__(self) -> int:
        return hash("cpu")


def accuracy(output: torch.Tensor, target: torch.Tensor, topk: tuple[int, ...] = (1,)) -> list[float]:
    """clip_benchmark 1.6.2's, without its float() of an array of one element, which numpy 2.4 forbids."""
    correct = output.topk(max(topk), 1, True, True)[1].t() == target[None]
    return [float(correct[:k].sum()) / len(target) for k in topk]


def upstream(
    flags: list[str], tiny_clip: SimpleNamespace, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """What clip_benchmark's own command says, with its demands for CUDA and its model loading replaced."""
    from clip_benchmark import cli
    from clip_benchmark.metrics import linear_probe

    made = tiny_clip.make()
    own = linear_probe.evaluate
    with monkeypatch.context() as patch:
        patch.setattr(cli, "load_clip", lambda **names: made)
        patch.setattr(linear_probe, "evaluate", lambda *a, **k: own(*a, **{**k, "device": PassesForCuda("cpu")}))
        patch.setattr(linear_probe, "accuracy", accuracy)
        patch.setattr(torch.nn.Module, "cuda", lambda self: self)
        patch.setattr(torch.Tensor, "cuda", lambda self: self)
        patch.setattr(torch.nn, "DataParallel", lambda module, device_ids: module)
        patch.setattr(torch, "autocast", lambda *a, **k: contextlib.nullcontext())
        patch.setattr(torch.cuda, "is_available", lambda: False)
        output = str(tmp_path / "upstream.json")
        argv = ["clip_benchmark", "eval", "--dataset", "fer2013", "--dataset_root", str(folder), "--task", "linear_probe"]
        argv += [
            "--model",
            "tiny-clip",
            "--pretrained",
            "tiny",
            "--output",
            output,
            "--no_amp",
            "--quiet",
            "--num_workers",
            "0",
        ]
        argv += ["--seed", "3", "--batch_size", "16", "--fewshot_epochs", "2", "--fewshot_lr", "0.05"]
        patch.setattr("sys.argv", [*argv, "--feature_root", str(tmp_path / "theirs"), *flags])
        cli.main()
    metrics: dict[str, Any] = json.loads(Path(output).read_text())["metrics"]
    return metrics


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ([], {}),
        (["--fewshot_k", "3"], {"fewshot_k": 3}),
        (["--val_split", "test"], {"val_split": "test"}),
        (["--val_proportion", "0.3"], {"val_proportion": 0.3}),
        (["--val_proportion", "0.25", "--fewshot_k", "2"], {"val_proportion": 0.25, "fewshot_k": 2}),
        (["--normalize", ""], {"normalize": False}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_numbers_are_clip_benchmarks(
    flags: list[str],
    changes: dict[str, Any],
    context: Callable[..., TaskContext],
    tiny_clip: SimpleNamespace,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = upstream(flags, tiny_clip, folder, tmp_path, monkeypatch)
    torch.manual_seed(12345)  # draws made elsewhere do not matter
    ours, _ = run(context(**changes))
    assert set(theirs) == set(NAMES) and 0.1 < theirs["lp_acc1"] < 0.95
    for name in NAMES:
        assert ours[name] == pytest.approx(theirs[name], abs=1e-6), name
    assert set(ours) == {*NAMES, *(f"{name}_stderr" for name in NAMES[:3])}
    n = 35
    assert ours["lp_acc1_stderr"] == pytest.approx(math.sqrt(ours["lp_acc1"] * (1 - ours["lp_acc1"]) / n))


def test_the_layer_is_the_one_that_clip_benchmark_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    from clip_benchmark.metrics import linear_probe as theirs

    monkeypatch.setattr(torch.nn.Module, "cuda", lambda self: self)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.nn, "DataParallel", lambda module, device_ids: module)
    features, labels = torch.randn(50, 12, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 4
    loader = torch.utils.data.DataLoader(theirs.FeatureDataset(features, labels), batch_size=8, shuffle=True)
    expected = theirs.train(loader, 12, 4, 0.01, 0.1, 3, False, "cpu", 7)
    probe = Probe(4, 0.1, 3, 8, 7, torch.device("cpu"), contextlib.nullcontext)
    before = torch.get_rng_state()
    ours = probe.train(Features(features, labels), 0.01)
    assert_near(ours.weight, expected.weight)
    assert_near(ours.bias, expected.bias)
    assert torch.equal(before, torch.get_rng_state())  # and nobody else's draws are moved


def test_few_of_each_are_the_first_of_each() -> None:
    draws = torch.Generator().manual_seed(1)
    labels = torch.randint(5, (200,), generator=draws)
    order = torch.randperm(200, generator=draws)
    for k in (1, 7, 20):
        counts: dict[int, int] = {}
        slow = []
        for place in order.tolist():
            counts[int(labels[place])] = counts.get(int(labels[place]), 0) + 1
            if counts[int(labels[place])] <= k:
                slow.append(place)
        assert first_k_per_class(labels, order, k).tolist() == slow
    assert first_k_per_class(labels, order, -1) is order
    with pytest.raises(UserError, match=r"--fewshot_k 100: 5 classes have fewer.*--fewshot_k \d+ or less, or -1"):
        first_k_per_class(labels, order, 100)
    gap = torch.tensor([0, 0, 3, 3])  # classes 1 and 2 do not occur
    assert sorted(first_k_per_class(gap, torch.arange(4), 1).tolist()) == [0, 2]


def test_settings_that_make_no_sense(context: Callable[..., TaskContext]) -> None:
    for changes, message in (
        ({"fewshot_k": 0}, "leaves nothing to learn from"),
        ({"fewshot_epochs": 0}, "1 or more"),
        ({"fewshot_lr": 0.0}, "above 0"),
        ({"val_proportion": 1.5}, "above 0 and below 1"),
    ):
        with pytest.raises(UserError, match=message):
            LinearProbeTask(context(**changes))
    with pytest.raises(UserError, match="--fewshot_k 9: 7 classes have fewer training images"):
        run(context(fewshot_k=9))
    task = LinearProbeTask(context())
    with pytest.raises(UserError, match="several labels an image"):
        task.batch("train", torch.zeros(2, 3, 4, 4), torch.zeros(2, 5), [])
    with pytest.raises(UserError, match="NaN"):
        task.batch("train", torch.zeros(2, 3, 4, 4), torch.zeros(2), [lambda images: torch.full((2, 4), math.nan)])


def test_the_records_of_many_processes_give_the_same_numbers(context: Callable[..., TaskContext]) -> None:
    ready = context(val_proportion=0.3)
    expected, _ = run(ready)
    task = LinearProbeTask(context(val_proportion=0.3, feature_root=ready.args.feature_root + "-other"))
    records = {}
    for split, source in task.sources().items():
        found = []
        for rank in (1, 0):
            for batch in source.loader(16, 0, rank=rank, world=2):
                found.append(
                    (batch.number, task.batch(split, batch.images, batch.targets, [ready.loaded.model.encode_image])[0])
                )
        records[split] = [record for _, record in sorted(found, key=lambda pair: pair[0])]
    assert task.metrics(records) == expected


def test_what_a_plan_loses_is_counted_image_by_image(
    context: Callable[..., TaskContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer's outputs are given; it is trained once for each plan."""
    task, trained = LinearProbeTask(context()), []
    labels = torch.arange(40) % 7
    draws = torch.Generator().manual_seed(0)
    outputs = [torch.randn(40, 7, generator=draws) + 3 * (labels[:, None] == torch.arange(7)) * right for right in (1, 0.3)]
    monkeypatch.setattr(Probe, "train", lambda self, data, decay: trained.append(data))
    monkeypatch.setattr(Probe, "logits", lambda self, layer, features: outputs[len(trained) - 1])
    record = Features(torch.randn(40, 4, generator=draws), labels)
    records = ({"train": [record], "test": [record]}, {"train": [record], "test": [record]})
    expected = tuple(
        [float(row.index(max(row)) == label) for row, label in zip(logits.tolist(), labels.tolist(), strict=True)]
        for logits in outputs
    )
    assert_paired(task, records, (expected[0], expected[1]), range(40))
    assert len(trained) == 2


# ------------------------------------------------------------------------------------------------------- kept features


def test_features_are_kept_and_used_again(context: Callable[..., TaskContext]) -> None:
    first, passes = run(context(val_proportion=0.3))
    assert passes == 3
    again, passes = run(context(val_proportion=0.3))
    assert passes == 0 and again == first
    again, passes = run(context(val_proportion=0.3, fewshot_k=2, fewshot_epochs=4, fewshot_lr=0.5))
    assert passes == 0 and again != first
    assert run(context(val_proportion=0.3), plan="random:5")[1] == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "other"},
        {"normalize": False},
        {"seed": 4},
        {"batch_size": 8},
        {"token_fusion": "mean"},
        {"token_fusion_weight": 0.5},
        {"token_fusion_temperature": 0.5},
        {"limit": 30},
        {"model_type": "hf"},
        {"val_proportion": 0.5},
    ],
    ids=str,
)
def test_kept_features_of_something_else_are_not_used(changes: dict[str, Any], context: Callable[..., TaskContext]) -> None:
    run(context())
    assert run(context(**changes))[1] == 2  # with a part held out, the test split is the same


def test_changed_data_and_code_are_something_else(
    context: Callable[..., TaskContext], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "data")
    run(context(root=tmp_path / "data"))
    assert run(context(root=tmp_path / "data"))[1] == 0
    shutil.copy(tmp_path / "data/test/1/1.png", tmp_path / "data/test/0/0.png")
    assert run(context(root=tmp_path / "data"))[1] == 1
    monkeypatch.setattr("tokensieve.provenance.code_version", lambda: "newer")
    assert run(context(root=tmp_path / "data"))[1] == 2


def test_damaged_files_are_made_again(context: Callable[..., TaskContext], tmp_path: Path) -> None:
    first, _ = run(context())
    files = sorted((tmp_path / "features").rglob("*.safetensors"))
    assert len(files) == 2 and not [file for file in (tmp_path / "features").rglob("*") if file.suffix == ".tmp"]
    whole = files[0].read_bytes()
    flipped = bytearray(whole)
    flipped[-100] ^= 1
    header = whole.replace(rb"\"broken\": []", rb"\"broken\": {}")
    assert header != whole
    for content in (b"", whole[:50], whole[:-5], bytes(flipped), header, b"\xff" * 500):
        files[0].write_bytes(content)
        messages: list[str] = []
        again, passes = run(context(warn=messages.append))
        assert passes == 1 and again == first
        assert len(messages) == 1 and "is damaged" in messages[0] and str(files[0]) in messages[0]
        assert run(context()) == (first, 0)


def test_without_a_model(context: Callable[..., TaskContext], folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"--skip_load: there are no features in .*, it holds nothing that can be read. Run it once"
    ):
        LinearProbeTask(context(skip_load=True, root="nowhere"))
    first, _ = run(context(val_proportion=0.3))
    assert run(context(val_proportion=0.3, skip_load=True, root="nowhere")) == (first, 0)
    task = LinearProbeTask(context(val_proportion=0.3, skip_load=True))
    assert task.weights == "f" * 32
    assert task.sources()["test"].fingerprint == LinearProbeTask(context()).sources()["test"].fingerprint

    with pytest.raises(UserError, match=r"no features of split 'train' under the plan grid:5 in .*'train' under none"):
        task.stored("grid:5", "train")
    with pytest.raises(UserError, match=r"only with other settings \(normalize True, not False\)"):
        LinearProbeTask(context(val_proportion=0.3, skip_load=True, normalize=False))
    run(context(val_proportion=0.3, fingerprint="0" * 32))
    with pytest.raises(UserError, match=r"of 2 different weights \(\"0{32}\", \"f{32}\"\): leave --skip_load out"):
        LinearProbeTask(context(val_proportion=0.3, skip_load=True)).stored("none", "train")


def test_a_probe_that_diverges_is_an_error(context: Callable[..., TaskContext]) -> None:
    with pytest.raises(UserError, match="--fewshot_lr inf"):
        LinearProbeTask(context(fewshot_lr=float("inf")))
    huge = Features(torch.full((8, 4), 3e38), torch.arange(8) % 2)
    with pytest.raises(UserError, match="diverged"):
        LinearProbeTask(context()).metrics({"train": [huge], "test": [huge]})


def test_validation_labels_that_training_never_saw_are_an_error(context: Callable[..., TaskContext]) -> None:
    train, more = (Features(torch.randn(8, 4), torch.arange(8) % classes) for classes in (2, 3))
    with pytest.raises(UserError, match="a validation label is 2"):
        LinearProbeTask(context()).metrics({"train": [train], "val": [more], "test": [train]})


def test_a_folder_that_cannot_be_written_is_said_at_once(context: Callable[..., TaskContext], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--feature_root"):
        LinearProbeTask(context(feature_root=str(tmp_path / "file")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_store_returns_what_it_was_given(dtype: torch.dtype, tmp_path: Path) -> None:
    store = feature_store.FeatureStore(str(tmp_path), "a/b", "c", "wds/d", pytest.fail, False)
    identity = {"split": "train/x", "plan": "none", "value": (1, 2)}
    given = torch.randn(5, 3).to(dtype).t()
    assert store.find(identity) is None
    broken = [Broken("x.png", "cut off")]
    store.keep(identity, {"features": given, "labels": torch.arange(3)}, broken)
    answer = store.find(identity)
    assert answer is not None and answer[1] == broken
    found = answer[0]
    assert found and torch.equal(found["features"], given) and found["features"].dtype == dtype
    assert store.find({**identity, "value": (1, 3)}) is None
