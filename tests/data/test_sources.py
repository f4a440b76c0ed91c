"""Data sets by name come in one shape, whole, and nothing in them is executed."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clip_benchmark.datasets.builder import build_dataset
from torchvision.transforms.functional import to_tensor

from tests.support.pictures import CLASSES, picture, png, write_shards
from tokensieve.data import clip_benchmark, streams
from tokensieve.data import registry as data_registry
from tokensieve.data.source import Batch, Broken, Source
from tokensieve.errors import UserError


def read(source: Source, batch_size: int = 4, workers: int = 0) -> tuple[list[torch.Tensor], list[int], list[Broken]]:
    images, targets, broken = [], [], []
    for batch in source.loader(batch_size, workers):
        broken += batch.broken
        if batch.images is not None:
            images += list(batch.images)
            targets += batch.targets.tolist()
    return images, targets, broken


def test_shards_give_the_samples_in_order(shards: Path) -> None:
    source = data_registry.build_source("wds/any", to_tensor, root=str(shards))
    images, targets, broken = read(source)
    assert source.size is None and source.classes == CLASSES and source.templates == ["a {c} thing.", "a photo in {c}"]
    assert targets == [i % 6 for i in [*range(0, 30, 2), *range(1, 30, 2)]] and not broken
    assert torch.equal(images[1], to_tensor(picture(2, 2)))
    limited = data_registry.build_source("wds/any", to_tensor, root=str(shards), limit=5)
    assert read(limited, workers=4)[1] == targets[:5]


def test_more_workers_than_shards_are_not_started(shards: Path) -> None:
    source = data_registry.build_source("wds/any", to_tensor, root=str(shards))
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
    source = data_registry.build_source("wds/any", to_tensor, root=str(write_shards(tmp_path / "d", samples, shards=1)))
    _, targets, broken = read(source)
    assert targets == [3, 4, 5]
    assert [sample.name[-1] for sample in broken] == ["1", "2", "3", "4"]
    assert not (tmp_path / "executed").exists()


def test_an_image_folder_is_read_through_our_own_way(faces: Path, tmp_path: Path) -> None:
    shutil.copytree(faces, tmp_path / "f")
    source = data_registry.build_source("fer2013", to_tensor, root=str(tmp_path / "f"))
    assert (source.size, len(source.classes)) == (28, 7)
    (tmp_path / "f/test/0/2.png").write_bytes(b"")
    images, targets, broken = read(source)
    assert (len(images), len(targets)) == (27, 27)
    assert [Path(sample.name).name for sample in broken] == ["2.png"]


def test_the_fingerprint_sees_files_names_prompts_and_limit(faces: Path, tmp_path: Path) -> None:
    shutil.copytree(faces, tmp_path / "f")

    def mark(**options: object) -> str:
        return data_registry.build_source("fer2013", to_tensor, root=str(tmp_path / "f"), **options).fingerprint  # type: ignore[arg-type]

    (tmp_path / "t.json").write_text('{"fer2013": ["just {c}"]}')
    marks = [mark(), mark(limit=3), mark(custom_template_file=str(tmp_path / "t.json"))]
    assert mark() == marks[0]
    (tmp_path / "f/test/0/2.png").write_bytes((tmp_path / "f/test/0/1.png").read_bytes())
    marks.append(mark())
    (tmp_path / "f/test/0/2.png").unlink()
    marks.append(mark())
    assert len(set(marks)) == 5


def test_prompt_files_that_clip_benchmark_ships_are_found_by_name(faces: Path) -> None:
    source = data_registry.build_source("fer2013", to_tensor, root=str(faces), custom_template_file="cupl_prompts.json")
    assert isinstance(source.templates, dict)


def test_embedded_scenes_by_name() -> None:
    for name, size in (("embedded", 4000), ("embedded-heldout", 2000)):
        source = data_registry.build_source(name, to_tensor)
        assert source.size == size and len(source.classes) >= 64
    few = data_registry.build_source("embedded", to_tensor, limit=3)
    assert [tuple(image.shape) for image in read(few)[0]] == [(3, 112, 112)] * 3


# --------------------------------------------------------------------------------------------------------------- captions


def stored_captions(folder: Path, broken: int | None = None) -> list[list[str]]:
    """Four images of two captions each, in a folder; the captions."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        picture(number, number).save(folder / f"{number}.jpg", quality=95)
        if number == broken:
            (folder / f"{number}.jpg").write_bytes(b"no image")
    return [[f"picture {number}, one", f"picture {number}, two"] for number in range(4)]


def write_caption_set(name: str, root: Path, broken: int | None = None) -> list[list[str]]:
    """The files of one of clip_benchmark's caption sets as it looks for them; the captions by sample."""
    if name == "mscoco_captions":
        captions = stored_captions(root / "val2014", broken)
        images = [{"id": number, "file_name": f"{number}.jpg"} for number in range(4)]
        told = [(number, text) for number in range(4) for text in captions[number]]
        entries = [{"id": place, "image_id": number, "caption": text} for place, (number, text) in enumerate(told)]
        (root / "coco_test_karpathy.json").write_text(json.dumps({"images": images, "annotations": entries}))
    elif name in ("flickr30k", "flickr8k"):
        captions = stored_captions(root, broken)
        lines = [f"{number}.jpg,{text}" for number in range(4) for text in captions[number]]
        (root / f"{name}_test_karpathy.txt").write_text("\n".join(["image,caption", *lines]))
    elif name.startswith("sugar_crepe/"):
        captions = stored_captions(root / "val2017", broken)
        entries = {
            str(3 * number): {"filename": f"{number}.jpg", "caption": one, "negative_caption": two}
            for number, (one, two) in enumerate(captions)
        }
        (root / f"{name.split('/')[1]}.json").write_text(json.dumps(entries))
    else:
        captions = [told[:1] for told in stored_captions(root / "images", broken)]
        file = {"crossmodal3600": "crossmodal3600_captions", "flickr30k-200": "flickr30k_200"}.get(name, name)
        paths = [str(root / "images" / f"{number}.jpg") for number in range(4)]
        content = {"image_paths": paths, "annotations": [told[0] for told in captions]}
        language = "eng_Latn" if name.endswith("200") else "en"
        (root / f"{file}-{language}.json").write_text(json.dumps(content))
    return captions


CAPTION_FILES = [name for name in clip_benchmark.CAPTIONS if name != "winoground"]


@pytest.mark.parametrize("name", CAPTION_FILES)
def test_caption_sets_are_read_as_clip_benchmark_reads_them(name: str, tmp_path: Path) -> None:
    captions = write_caption_set(name, tmp_path)
    language = "eng_Latn" if name.endswith("200") else "en"
    task = data_registry.task_of(name)
    source = data_registry.build_source(
        name, to_tensor, root=str(tmp_path), task=task, language=language, needs_class_names=False
    )
    theirs = build_dataset(name, root=str(tmp_path), transform=to_tensor, language=language, task=task, download=False)
    (batch,) = source.loader(4, 0)
    assert source.captions and source.size == len(theirs) == 4
    assert batch.targets == captions == [theirs[index][1] for index in range(4)]
    assert torch.equal(batch.images, torch.stack([theirs[index][0] for index in range(4)]))

    write_caption_set(name, tmp_path, broken=2)
    (batch,) = data_registry.build_source(
        name, to_tensor, root=str(tmp_path), task=task, language=language, needs_class_names=False
    ).loader(4, 0)
    assert batch.targets == [captions[0], captions[1], captions[3]] and batch.samples.tolist() == [0, 1, 3]
    assert [Path(sample.name).name for sample in batch.broken] == ["2.jpg"]


@pytest.mark.parametrize("name", clip_benchmark.CAPTIONS)
def test_caption_sets_that_are_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokensieve.models.loading.hub.reachable", lambda *hosts: False)
    monkeypatch.setattr("subprocess.call", lambda *command, **options: pytest.fail(f"a command is run: {command}"))
    message = (
        "needs|pip install"
        if name == "winoground"
        else r"needs .* is not fetched.*--dataset_root.*embedded-(captions|selection)"
    )
    with pytest.raises(UserError, match=message) as caught:
        data_registry.build_source(name, to_tensor, root=str(tmp_path / "none"), task=data_registry.task_of(name))
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_captions_from_a_file_of_ones_own(tmp_path: Path) -> None:
    write_caption_set("flickr8k", tmp_path / "d")
    (tmp_path / "mine.txt").write_text("image,caption\n1.jpg,mine, all mine\n")
    options: dict[str, Any] = {"root": str(tmp_path / "d"), "task": "zeroshot_retrieval", "needs_class_names": False}
    source = data_registry.build_source("flickr8k", to_tensor, annotation_file=str(tmp_path / "mine.txt"), **options)
    assert [batch.targets for batch in source.loader(4, 0)] == [[["mine, all mine"]]]
    with pytest.raises(UserError, match=r"--annotation_file nothing.txt: there is no such file"):
        data_registry.build_source("flickr8k", to_tensor, annotation_file="nothing.txt", **options)


def test_a_data_set_of_several_images_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pairs(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple:
            return torch.full((2, 3, 4, 4), float(index)), [f"{index} one", f"{index} two"]

    monkeypatch.setattr("clip_benchmark.datasets.winoground.WinoGround", lambda root, transform: Pairs())
    monkeypatch.setattr("tokensieve.models.loading.hub.reachable", lambda *hosts: True)
    source = data_registry.build_source("winoground", to_tensor, task="image_caption_selection", needs_class_names=False)
    (batch,) = source.loader(4, 0)
    assert source.captions and batch.images.shape == (3, 2, 3, 4, 4) and batch.targets[2] == ["2 one", "2 two"]


def test_retrieval_shards(tmp_path: Path) -> None:
    samples = [{"png": png(picture(i % 6, i)), "txt": f"number {i}\nit is é {i}".encode()} for i in range(5)]
    samples[2]["txt"] = b""
    root = str(write_shards(tmp_path / "d", samples, shards=1, kind="retrieval"))
    source = data_registry.build_source("wds/mine", to_tensor, root=root, task="zeroshot_retrieval", needs_class_names=False)
    (batch,) = source.loader(8, 0)
    assert source.captions and batch.targets == [[f"number {i}", f"it is é {i}"] for i in (0, 1, 3, 4)]
    assert [sample.reason for sample in batch.broken] == ["ValueError: it has no caption"]


def test_labels_without_prompts_are_enough_for_a_linear_probe(tmp_path: Path) -> None:
    samples = [{"png": png(picture(i % 6, i)), "cls": str(i % 6).encode()} for i in range(4)]
    root = write_shards(tmp_path / "d", samples)
    for file in root.glob("*.txt"):
        file.unlink()
    assert sorted(
        read(data_registry.build_source("wds/any", to_tensor, root=str(root), task="linear_probe", needs_class_names=False))[1]
    ) == [
        0,
        1,
        2,
        3,
    ]
    with pytest.raises(UserError, match="no class names"):
        data_registry.build_source("wds/any", to_tensor, root=str(root))


# ------------------------------------------------------------------------------------------- many processes, and parts


def everything(batch: Batch) -> tuple:
    """What must be the same whoever reads the batch."""
    images = None if batch.images is None else batch.images.numpy().tobytes()
    targets = batch.targets.tolist() if isinstance(batch.targets, torch.Tensor) else batch.targets
    return batch.number, images, targets, [sample.name for sample in batch.broken], batch.samples.tolist()


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 images in 3 shards, 3 of them broken."""
    samples = [{"png": png(picture(i % 6, i)) if i % 13 != 5 else b"x", "cls": str(i % 6).encode()} for i in range(37)]
    return write_shards(tmp_path_factory.mktemp("wds") / "spoilt", samples, shards=3)


@pytest.mark.parametrize("limit", [None, 17])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["stream", "folder", "captions"])
def test_the_ranks_together_read_what_one_process_reads(
    kind: str, workers: int, limit: int | None, spoilt: Path, faces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    if kind == "stream":
        source = data_registry.build_source("wds/any", to_tensor, root=str(spoilt), limit=limit)
    elif kind == "folder":
        shutil.copytree(faces, tmp_path / "f")
        (tmp_path / "f/test/2/2.png").write_bytes(b"")
        source = data_registry.build_source("fer2013", to_tensor, root=str(tmp_path / "f"), limit=limit)
    else:
        source = data_registry.build_source(
            "embedded-captions", to_tensor, limit=limit or 21, task="zeroshot_retrieval", needs_class_names=False
        )
    alone = [everything(batch) for batch in source.loader(4, workers)]
    assert [batch[0] for batch in alone] == sorted({batch[0] for batch in alone})
    assert sum(len(batch[3]) + len(batch[4]) for batch in alone) == (
        limit or {"stream": 37, "folder": 28, "captions": 21}[kind]
    )
    for world in (2, 3) if workers else (2, 3, 20):
        ranks = [[everything(batch) for batch in source.loader(4, workers, rank=rank, world=world)] for rank in range(world)]
        assert sorted(itertools.chain(*ranks), key=lambda batch: batch[0]) == alone
        if kind != "stream":
            assert all(batch[0] % world == rank for rank, batches in enumerate(ranks) for batch in batches)


def test_samples_keep_their_numbers(spoilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)

    def numbered(**options: Any) -> dict[int, bytes]:
        workers, size = options.pop("workers", 0), options.pop("size", 4)
        source = data_registry.build_source("wds/any", to_tensor, root=str(spoilt), **options)
        return {
            int(number): image.numpy().tobytes()
            for batch in source.loader(size, workers)
            if batch.images is not None
            for number, image in zip(batch.samples, batch.images, strict=True)
        }

    whole = numbered()
    assert len(whole) == 34 and all(0 <= number < 2**62 for number in whole)
    assert numbered(workers=2, size=5) == whole
    assert numbered(limit=9).items() <= whole.items()


def test_samples_of_another_rank_are_not_decoded(spoilt: Path) -> None:
    seen = []

    def transform(image: Any) -> torch.Tensor:
        seen.append(image)
        return to_tensor(image)

    source = data_registry.build_source("wds/any", transform, root=str(spoilt))
    read_by_both = sum(len(batch.samples) for rank in (0, 1) for batch in source.loader(4, 0, rank=rank, world=2))
    assert read_by_both == len(seen) == 34


def test_every_rank_hears_of_a_damaged_shard(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(file: Any) -> Any:
        for number in range(6):
            yield str(number), {"png": png(picture(0, number)), "cls": b"0"}
        raise OSError("the disk is gone")

    monkeypatch.setattr(streams, "read_samples", damaged)
    source = Source(streams.WebSamples([str(shards / "test/0.tar")], to_tensor, captions=False), [], [], "")
    for rank in range(3):
        last = list(source.loader(4, 0, rank=rank, world=3))[-1]
        assert [(sample.reason, sample.fatal) for sample in last.broken] == [("the disk is gone; fetch it again", True)]


def test_parts_are_those_of_random_split(faces: Path, shards: Path) -> None:
    source = data_registry.build_source("fer2013", to_tensor, root=str(faces), limit=25)
    first, second = source.split(0.3, torch.Generator().manual_seed(5))
    torch.manual_seed(5)
    theirs = torch.utils.data.random_split(range(25), [0.7, 0.3])  # type: ignore[arg-type]
    for part, expected in zip((first, second), theirs, strict=True):
        assert torch.cat([batch.samples for batch in part.loader(4, 0)]).tolist() == list(expected.indices)
    again = source.split(0.3, torch.Generator().manual_seed(5))
    other = source.split(0.3, torch.Generator().manual_seed(6))
    assert again[0].fingerprint == first.fingerprint
    assert len({source.fingerprint, first.fingerprint, second.fingerprint, other[0].fingerprint}) == 4
    for proportion, message in ((0.0, "above 0"), (1.0, "below 1"), (0.001, "leaves nothing")):
        with pytest.raises(UserError, match=message):
            source.split(proportion, torch.Generator())
    with pytest.raises(UserError, match="give --val_split"):
        data_registry.build_source("wds/any", to_tensor, root=str(shards)).split(0.5, torch.Generator())


class Counted(torch.utils.data.IterableDataset):
    """A stream of another package: its workers take turns."""

    classes, templates = ("zero", "one"), ("a {c}",)

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return ((torch.full((3, 2, 2), float(i)), i % 2) for i in range(worker, 11, workers))


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_of_other_packages(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clip_benchmark.datasets.builder.build_dataset", lambda name, **options: Counted())
    source = data_registry.build_source("tfds/any", to_tensor, root=str(tmp_path))
    alone = [everything(batch) for batch in source.loader(3, workers)]
    ranks = [everything(batch) for rank in (0, 1) for batch in source.loader(3, workers, rank=rank, world=2)]
    assert source.size is None and sorted(ranks) == alone
    for batch in source.loader(3, workers):
        assert batch.images[:, 0, 0, 0].tolist() == batch.samples.tolist()
