"""A data set is declared once; names, contents, tasks and messages come from the declaration."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clip_benchmark.datasets.builder import dataset_collection, get_dataset_default_task
from torchvision.transforms.functional import to_tensor

from tests.support.toy_plugin import loaded_plugins_are_forgotten
from tokensieve.data import clip_benchmark, vqa
from tokensieve.data import registry as data_registry
from tokensieve.data.registry import DATASETS, DatasetSpec
from tokensieve.errors import UserError
from tokensieve.plugins import load_plugin
from tokensieve.registry import resolve

CONTENTS = ("labels", "captions", "images", "questions", "objects", None)
TOY = """
from PIL import Image

from tokensieve.data.registry import DATASETS, DatasetSpec


class Squares:
    def __init__(self, transform, length):
        self.transform, self.length = transform, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.transform(Image.new("RGB", (4, 4), (100 * (index % 2), 0, 0))), index % 2


def build(name, transform, options):
    from tokensieve.data.source import Source

    length = {"train": 8, "test": 5}[options.split]
    return Source(Squares(transform, length), ["black", "red"], ["a {c} square"], f"toy {options.split}")


def build_questions(name, split, limit, root, questions, annotations, images):
    from tokensieve.data.vqa_items import VqaData, VqaItem

    class Toy(VqaData):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return VqaItem(Image.new("RGB", (4, 4)), f"{name} {split} {questions}?", ["yes"], "0")

    return Toy()


DATASETS.add(DatasetSpec("toy", "two colours", f"{__name__}:build", "labels", "zeroshot_classification"))
DATASETS.add(DatasetSpec("toy:", "the same", f"{__name__}:build", None, None, argument="NAME"))
DATASETS.add(DatasetSpec("toy-questions", "one question", f"{__name__}:build_questions", "questions", "vqa"))
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("plugin") / "toy_datasets.py"
    file.write_text(TOY)
    with loaded_plugins_are_forgotten():
        load_plugin(file)
        yield


def test_names_collections_and_files(tmp_path: Path) -> None:
    assert data_registry.dataset_names(None) == ["embedded"]
    (tmp_path / "list.txt").write_text("cifar10\n\n wds/mine \n")
    assert data_registry.dataset_names([str(tmp_path / "list.txt"), "mnist"]) == ["cifar10", "wds/mine", "mnist"]
    for collection, members in dataset_collection.items():
        assert data_registry.dataset_names([collection]) == members
    with pytest.raises(UserError, match=r"no data set 'cifer10'.*Did you mean 'cifar10'"):
        data_registry.dataset_names(["cifer10"])
    for missing in ("photos/", "./photos", "/no/photos"):
        with pytest.raises(UserError, match=f"no file or folder '{missing}'. Your own images are folder:DIR"):
            data_registry.dataset_names([missing])


def test_auto_means_the_task_clip_benchmark_means() -> None:
    for name in (*clip_benchmark.CLASSIFICATION, *clip_benchmark.CAPTIONS, "vtab/dtd", "tfds/x"):
        assert data_registry.task_of(name) == get_dataset_default_task(name)
        assert data_registry.task_of(f"wds/{name}") == get_dataset_default_task(name)
    assert [data_registry.task_of(name) for name in ("embedded", "embedded-heldout")] == ["zeroshot_classification"] * 2
    assert data_registry.task_of("embedded-captions") == "zeroshot_retrieval"
    assert data_registry.task_of("embedded-selection") == "image_caption_selection"


def test_contents_are_known_before_anything_is_opened() -> None:
    for name in ("embedded", "embedded-heldout", "cifar10", "tfds/x", "vtab/dtd"):
        assert data_registry.contents_of(name) == "labels"
    for name in ("embedded-captions", "embedded-selection", *clip_benchmark.CAPTIONS):
        assert data_registry.contents_of(name) == "captions"
    for name in (*vqa.EMBEDDED, "vqav2", "gqa", "jsonl:a/b.jsonl"):
        assert data_registry.contents_of(name) == "questions" and data_registry.task_of(name) == "vqa"
    for name in ("RGBNT201", "RGBNT100", "MSVR310", "embedded-reid", "embedded-reid-pretrain"):
        assert data_registry.contents_of(name) == "objects" and data_registry.task_of(name) == "reid"
    assert data_registry.contents_of("wds/any") is None  # the shards tell


@pytest.mark.parametrize("name", DATASETS)
def test_declarations_are_whole(name: str) -> None:
    spec = DATASETS[name]
    assert spec.contents in CONTENTS and spec.summary and "\n" not in spec.summary and callable(resolve(spec.build))
    assert bool(spec.argument) == spec.prefix.endswith(("/", ":")) and (spec.task or spec.contents is None)


def test_prefixes_and_folders() -> None:
    assert data_registry.folder_of("wds/a/b", "r/{dataset}/{dataset_cleaned}") == "r/a/b/a-b"
    assert data_registry.folder_of("tfds/a", "r/{dataset}") == "r/tfds/a"
    with pytest.raises(UserError, match=r"may only hold {dataset} and {dataset_cleaned}"):
        data_registry.folder_of("cifar10", "{model}")


def test_an_unknown_name_lists_the_groups() -> None:
    with pytest.raises(UserError) as caught:
        data_registry.check_dataset("rgbnt210")
    message = str(caught.value)
    assert "Did you mean 'RGBNT201'" in message and "embedded: embedded, embedded-heldout" in message
    assert "wds/NAME" in message and "jsonl:FILE" in message and "\n" not in message


def test_data_of_another_kind_is_no_source() -> None:
    for name, contents in (("vqav2", "questions"), ("embedded-reid", "objects")):
        with pytest.raises(UserError, match=f"{name} has {contents}"):
            data_registry.build_source(name, to_tensor, task="linear_probe")


def test_importing_the_declarations_imports_no_torch() -> None:
    code = (
        "import sys; from tokensieve.data.registry import DATASETS, task_of, contents_of; len(DATASETS); task_of('wds/x');"
        "print([name for name in ('torch', 'clip_benchmark', 'PIL', 'numpy', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_data_set_of_a_plug_in(toy: None) -> None:
    assert data_registry.dataset_names(["toy", "toy:x"]) == ["toy", "toy:x"]
    assert data_registry.contents_of("toy") == "labels" and data_registry.task_of("toy") == "zeroshot_classification"
    assert data_registry.contents_of("toy:x") is None and data_registry.task_of("toy:x") == "zeroshot_classification"
    source = data_registry.build_source("toy", to_tensor, limit=3)
    (batch,) = source.loader(4, 0)
    assert batch.images.shape == (3, 3, 4, 4) and batch.targets.tolist() == [0, 1, 0]
    assert source.classes == ["black", "red"] and source.templates == ["a {c} square"]
    assert data_registry.build_source("toy:x", to_tensor, split="train").size == 8
    with pytest.raises(UserError, match=r"Did you mean 'toy'.*plug-ins: toy, toy:NAME"):
        data_registry.check_dataset("toi")


def test_questions_of_a_plug_in(toy: None) -> None:
    assert vqa.load("toy-questions", questions="mine")[0].question == "toy-questions test mine?"
    with pytest.raises(UserError, match=r"known are .*toy-questions.*Did you mean 'toy-questions'"):
        vqa.load("toy-question")


def test_a_name_cannot_be_declared_twice() -> None:
    with pytest.raises(UserError, match="a data set named 'embedded' is registered already"):
        DATASETS.add(DatasetSpec("embedded", "mine", "mine:build", "labels", "linear_probe"))
    assert DATASETS["embedded"].group == "embedded"
