"""Objects of the user's own: a folder for each modality, or a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.own_data import table
from tokensieve.data import registry
from tokensieve.data.images import BrokenImage
from tokensieve.errors import UserError
from tokensieve.reid import data as reid_data

MODALITIES = ("RGB", "NI", "TI")


def objects(folder: Path, names: list[str], modalities: tuple[str, ...] = MODALITIES) -> Path:
    """An image of each of these names in the folder of each modality."""
    for modality in modalities:
        (folder / modality).mkdir(parents=True, exist_ok=True)
        for number, name in enumerate(names):
            Image.fromarray(np.full((32, 16, 3), 20 * number, np.uint8)).save(folder / modality / name)
    return folder


NAMES = ["0001_c1_000.png", "0001_c2_000.jpg", "2_cam1.png", "2_cam2_b.png", "0003_s001_v1_000.png", "0003_s002_v4_000.png"]


def test_a_folder_is_recognised_by_its_modalities(tmp_path: Path) -> None:
    name = f"folder:{objects(tmp_path / 'people', NAMES)}"
    assert registry.contents_of(name) == "objects" and registry.task_of(name) == "reid"
    query, gallery = (reid_data.load(name, split=split) for split in ("query", "gallery"))
    assert [(shot.pid, shot.camera) for shot in gallery.shots] == [(1, 0), (1, 1), (3, 0), (3, 3), (2, 0), (2, 1)]
    assert [shot.name for shot in query.shots] == [shot.name for shot in gallery.shots] and gallery.rule == "camera"
    assert set(gallery.read(0)) == set(MODALITIES) and not gallery.notes
    (tmp_path / "classes" / "cat").mkdir(parents=True)
    assert registry.contents_of(f"folder:{tmp_path / 'classes'}") == "labels"


def test_splits_missing_modalities_and_camera_0(tmp_path: Path) -> None:
    objects(tmp_path / "train", ["1_c0_a.png", "2_c1_a.png"], ("RGB", "TI"))
    objects(tmp_path / "test", ["5_c0_a.png", "5_c1_a.png", "odd.png"], ("RGB", "TI"))
    (tmp_path / "test" / "TI" / "5_c0_a.png").unlink()
    name = f"folder:{tmp_path}"
    train = reid_data.load(name, split="train", modalities=("RGB", "TI"))
    assert [(shot.pid, shot.camera) for shot in train.shots] == [(1, 0), (2, 1)]
    gallery = reid_data.load(name, split="gallery", modalities=("RGB", "TI"))
    assert len(gallery) == 1 and len(gallery.incomplete) == 1 and gallery.misnamed == ["test/RGB/odd.png"]
    assert len(reid_data.load(name, split="gallery", modalities=("RGB",))) == 2
    with pytest.raises(UserError, match=r"cannot be read from .* folders missing"):
        reid_data.load(name, split="gallery")


def test_a_table_gives_the_same_as_a_folder(tmp_path: Path) -> None:
    objects(tmp_path, NAMES)
    rows = [[*(f"{modality}/{name}" for modality in MODALITIES), who, where] for name, who, where in zip(
        NAMES, ["ann", "ann", "bob", "bob", "cid", "cid"], [1, 2, 1, 2, 1, 4], strict=True)]  # fmt: skip
    name = f"csv:{table(tmp_path / 't.csv', [*MODALITIES, 'pid', 'camera'], rows)}"
    assert registry.contents_of(name) == "objects"
    data = reid_data.load(name, split="gallery")
    assert [(shot.pid, shot.camera) for shot in data.shots] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 3)]
    (tmp_path / "NI" / NAMES[0]).unlink()
    with pytest.raises(BrokenImage, match="No such file"):
        data.read(0)
    folder = reid_data.load(f"folder:{tmp_path}", split="gallery")
    assert np.array_equal(np.asarray(folder.read(0)["RGB"]), np.asarray(data.read(1)["RGB"]))


@pytest.mark.parametrize(
    ("columns", "row", "message"),
    [
        (["RGB", "pid"], ["a.png", "1"], "has no column camera .*it has|has no column camera"),
        (
            ["RGB", "pid", "camera", "split"],
            ["a.png", "1", "1", "exam"],
            "the split 'exam' is none of gallery, query, test, train",
        ),
        (["RGB", "pid", "camera"], ["a.png", "", "1"], "line 2 has no identity"),
        (["RGB", "pid", "camera"], ["", "1", "1"], "line 2 has no image"),
    ],
)
def test_wrong_tables(tmp_path: Path, columns: list[str], row: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        reid_data.load(f"csv:{table(tmp_path / 't.csv', columns, [row])}", split="gallery")


def test_what_is_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no data for re-identification: it needs a folder for each modality"):
        reid_data.load(f"folder:{tmp_path}", split="gallery")
    objects(tmp_path, NAMES)
    with pytest.raises(UserError, match="has no split 'train': there are query, gallery"):
        reid_data.load(f"folder:{tmp_path}", split="train")
    with pytest.raises(UserError, match="there is no folder"):
        reid_data.load("folder:nowhere", split="gallery")
