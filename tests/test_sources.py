"""Data sets by name come in one shape, whole, and nothing in them is executed."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from clip_benchmark.datasets.builder import dataset_collection, get_dataset_default_task
from torchvision.transforms.functional import to_tensor

from tests.pictures import CLASSES, picture, png, write_shards
from tokensieve.data import sources
from tokensieve.data.sources import Broken
from tokensieve.errors import UserError


def test_names_collections_and_files(tmp_path: Path) -> None:
    assert sources.names(None) == ["embedded"]
    (tmp_path / "list.txt").write_text("cifar10\n\n wds/mine \n")
    assert sources.names([str(tmp_path / "list.txt"), "mnist"]) == ["cifar10", "wds/mine", "mnist"]
    for collection, members in dataset_collection.items():
        assert sources.names([collection]) == members
    with pytest.raises(UserError, match=r"no data set 'cifer10'.*Did you mean 'cifar10'"):
        sources.names(["cifer10"])


def test_auto_means_the_task_clip_benchmark_means() -> None:
    for name in (*sources.CLASSIFICATION, *sources.CAPTIONS, "vtab/dtd", "tfds/x"):
        assert sources.task_of(name) == get_dataset_default_task(name)
        assert sources.task_of(f"wds/{name}") == get_dataset_default_task(name)
    assert [sources.task_of(name) for name in ("embedded", "embedded-heldout")] == ["zeroshot_classification"] * 2
    assert sources.task_of("embedded-captions") == "zeroshot_retrieval"
    assert sources.task_of("embedded-selection") == "image_caption_selection"


def read(source: sources.Source, batch_size: int = 4, workers: int = 0) -> tuple[list[torch.Tensor], list[int], list[Broken]]:
    images, targets, broken = [], [], []
    for batch in source.loader(batch_size, workers):
        broken += batch.broken
        if batch.images is not None:
            images += list(batch.images)
            targets += batch.targets.tolist()
    return images, targets, broken


def test_shards_give_the_samples_in_order(shards: Path) -> None:
    source = sources.build("wds/any", to_tensor, root=str(shards))
    images, targets, broken = read(source)
    assert source.size is None and source.classes == CLASSES and source.templates == ["a {c} thing.", "a photo in {c}"]
    assert targets == [i % 6 for i in [*range(0, 30, 2), *range(1, 30, 2)]] and not broken
    assert torch.equal(images[1], to_tensor(picture(2, 2)))
    limited = sources.build("wds/any", to_tensor, root=str(shards), limit=5)
    assert read(limited, workers=4)[1] == targets[:5]


def test_more_workers_than_shards_are_not_started(shards: Path) -> None:
    source = sources.build("wds/any", to_tensor, root=str(shards))
    assert source.loader(4, 64).num_workers == min(2, os.cpu_count() or 1)
    assert sorted(read(source, workers=64)[1]) == sorted(i % 6 for i in range(30))


def test_samples_without_image_or_label_and_pickles_are_broken(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "executed",))

    image, evil = png(picture(0, 0)), pickle.dumps(Evil())
    buffer = io.BytesIO()
    np.save(buffer, np.array([Evil()]), allow_pickle=True)
    samples = [
        {"png": image, "cls": b"3"},
        {"cls": b"1"},
        {"png": image},
        {"png": image, "cls": b"two"},
        {"png": image, "npy": buffer.getvalue()},
        {"png": image, "cls": b"4", "pyd": evil, "pkl": evil, "pth": evil},
        {"JPG".lower(): image, "cls": b"5"},
    ]
    source = sources.build("wds/any", to_tensor, root=str(write_shards(tmp_path / "d", samples, shards=1)))
    _, targets, broken = read(source)
    assert targets == [3, 4, 5]
    assert [sample.name[-1] for sample in broken] == ["1", "2", "3", "4"]
    assert not (tmp_path / "executed").exists()


def test_an_image_folder_is_read_through_our_own_way(faces: Path, tmp_path: Path) -> None:
    shutil.copytree(faces, tmp_path / "f")
    source = sources.build("fer2013", to_tensor, root=str(tmp_path / "f"))
    assert (source.size, len(source.classes)) == (28, 7)
    (tmp_path / "f/test/0/2.png").write_bytes(b"")
    images, targets, broken = read(source)
    assert (len(images), len(targets)) == (27, 27)
    assert [Path(sample.name).name for sample in broken] == ["2.png"]


def test_the_fingerprint_sees_files_names_prompts_and_limit(faces: Path, tmp_path: Path) -> None:
    shutil.copytree(faces, tmp_path / "f")

    def mark(**options: object) -> str:
        return sources.build("fer2013", to_tensor, root=str(tmp_path / "f"), **options).fingerprint  # type: ignore[arg-type]

    (tmp_path / "t.json").write_text('{"fer2013": ["just {c}"]}')
    marks = [mark(), mark(limit=3), mark(custom_template_file=str(tmp_path / "t.json"))]
    assert mark() == marks[0]
    (tmp_path / "f/test/0/2.png").write_bytes((tmp_path / "f/test/0/1.png").read_bytes())
    marks.append(mark())
    (tmp_path / "f/test/0/2.png").unlink()
    marks.append(mark())
    assert len(set(marks)) == 5


def test_prompt_files_that_clip_benchmark_ships_are_found_by_name(faces: Path) -> None:
    source = sources.build("fer2013", to_tensor, root=str(faces), custom_template_file="cupl_prompts.json")
    assert isinstance(source.templates, dict)


def test_embedded_scenes_by_name() -> None:
    for name, size in (("embedded", 4000), ("embedded-heldout", 2000)):
        source = sources.build(name, to_tensor)
        assert source.size == size and len(source.classes) >= 64
    few = sources.build("embedded", to_tensor, limit=3)
    assert [tuple(image.shape) for image in read(few)[0]] == [(3, 112, 112)] * 3
