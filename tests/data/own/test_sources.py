"""The user's own images as sources: what is in them, what is left out, what their fingerprints depend on."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms.functional import to_tensor

from tests.support.own_data import class_folders, table
from tests.support.pictures import picture
from tokensieve.data import registry
from tokensieve.data.images import open_photo
from tokensieve.data.own.files import list_files, pick_numbers
from tokensieve.data.source import Broken, Source
from tokensieve.errors import UserError


def build(name: str, **options: object) -> Source:
    return registry.build_source(name, to_tensor, **options)


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    folder = class_folders(tmp_path / "photos", each=5, endings=(".png", ".JPG", ".webp", ".bmp", ".tiff"))
    deep = folder / "red" / "a" / "ü b"
    deep.mkdir(parents=True)
    picture(0, 99).save(deep / "x.jpeg")
    (folder / "red" / ".hidden.png").write_bytes(b"no image")
    (folder / "red" / "film.mov").write_bytes(b"no image")
    (folder / "empty").mkdir()
    picture(0, 98).save(folder / "top.png")
    (folder / "red" / "round").symlink_to(folder / "red")  # a circle
    source = build(f"folder:{folder}/")
    assert source.classes == ["blue", "green", "red"] and len(source) == 16 and "{c}" in source.templates[0]
    labels = [source.samples[index][1] for index in range(16)]
    assert labels == [0] * 5 + [1] * 5 + [2] * 6
    text = "; ".join(source.notes)
    assert "1 .mov" in text and "no folder of a class: 1" in text and "without an image: empty" in text


def test_splits_are_folders_that_are_all_named_so(tmp_path: Path) -> None:
    for split, each in (("train", 3), ("validation", 2), ("test", 1)):
        class_folders(tmp_path / split, each)
    name = f"folder:{tmp_path}"
    assert [len(build(name, split=split)) for split in ("train", "val", "test")] == [9, 6, 3]
    assert len(build(f"images:{tmp_path}", split="val", needs_class_names=False)) == 6
    class_folders(tmp_path, 1, ["a class"])
    assert build(name).classes == ["a class", "test", "train", "validation"]
    with pytest.raises(UserError, match="no split 'train': sort its images into folders"):
        build(name, split="train")


def test_class_names_and_prompts_beside_the_images(tmp_path: Path) -> None:
    class_folders(tmp_path, 1, ["n1", "n2"])
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    (tmp_path / "templates.txt").write_text("satellite photo of {c}\n")
    source = build(f"folder:{tmp_path}")
    assert source.classes == ["cat", "dog"] and source.templates == ["satellite photo of {c}"]
    assert build(f"folder:{tmp_path}", class_names=["x", "y"]).classes == ["x", "y"]
    (tmp_path / "templates.txt").unlink()
    with pytest.raises(UserError, match="prompts in en, not in 'zh': write them to"):
        build(f"folder:{tmp_path}", language="zh")


def test_one_class_is_an_error_unless_there_are_more_names(tmp_path: Path) -> None:
    class_folders(tmp_path, 2, ["cat"])
    with pytest.raises(UserError, match="one class only"):
        build(f"folder:{tmp_path}")
    assert build(f"folder:{tmp_path}", class_names=["dog", "cat"]).samples[0][1] == 1
    assert len(build(f"folder:{tmp_path}", needs_class_names=False)) == 2  # a task that does not use them


def test_several_rows_of_an_image_are_its_captions(tmp_path: Path) -> None:
    class_folders(tmp_path, 2, ["a"])
    rows = [["a/0.png", "one"], ["a/1.png", "two"], ["a/../a/0.png", "three"], ["a/0.png", "one"]]
    source = build(f"csv:{table(tmp_path / 't.csv', ['image', 'caption'], rows)}", contents="captions", needs_class_names=False)
    assert [source.samples[index][1] for index in range(2)] == [["one", "three"], ["two"]] and source.captions
    assert "count once: 1" in source.notes[0]


def test_labels_of_a_table(tmp_path: Path) -> None:
    class_folders(tmp_path, 3, ["a"])
    rows = [["a/0.png", "dog"], ["a/1.png", "cat"], ["a/2.png", "dog"], ["a/2.png", "dog"], ["a/none.png", "cat"]]
    source = build(f"csv:{table(tmp_path / 't.csv', ['file', 'class'], rows)}")
    assert source.classes == ["cat", "dog"] and len(source) == 4 and "count once: 1" in source.notes[0]
    assert isinstance(source.samples[3], Broken) and "No such file" in source.samples[3].reason
    for bad, message in (
        ([["a/0.png", "dog"], ["a/0.png", "cat"]], "line 3: a/0.png has two labels, dog and cat"),
        ([["a/0.png", "dog"], ["a/1.png", " "]], "line 3 has no label"),
        ([["x.png", "dog"], ["y.png", "cat"]], "none of the 2 images .* is there, the first would be .*x.png"),
    ):
        with pytest.raises(UserError, match=message):
            build(f"csv:{table(tmp_path / 't.csv', ['file', 'class'], bad)}")


def test_fingerprints_tell_data_apart(tmp_path: Path) -> None:
    one, other = class_folders(tmp_path / "one"), class_folders(tmp_path / "other")
    first = build(f"folder:{one}").fingerprint
    assert first == build(f"folder:{one}").fingerprint != build(f"folder:{other}").fingerprint
    picture(2, 77).save(one / "red" / "new.png")
    changed = build(f"folder:{one}").fingerprint
    os.utime(one / "red" / "new.png", (1, 1))
    assert len({first, changed, build(f"folder:{one}").fingerprint}) == 3


def test_photos_are_upright_and_sixteen_bits_are_scaled(tmp_path: Path) -> None:
    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[:, :3] = 255  # white at the left
    for orientation, white in ((1, "left"), (3, "right"), (6, "top"), (8, "bottom")):
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
        seen = np.asarray(open_photo(tmp_path / "a.png"))[..., 0]
        assert seen.shape == ((4, 6) if white in ("left", "right") else (6, 4))
        half = {"left": seen[:, :3], "right": seen[:, 3:], "top": seen[:3], "bottom": seen[3:]}[white]
        assert half.min() == 255 and seen.mean() == 127.5
    Image.fromarray(np.full((4, 4), 65535, np.uint16)).save(tmp_path / "b.png")
    assert np.asarray(open_photo(tmp_path / "b.png")).min() == 255


def test_arguments_that_name_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    class_folders(Path("photos"), 2)
    table(Path("t.csv"), ["image", "label"], [["photos/red/0.png", "red"], ["photos/red/0.png", "red"]])
    assert len(list_files(["photos"])) == len(list_files(["folder:photos", "images:photos/red", "photos/red/0.png"])) == 6
    assert list_files(["csv:t.csv"]) == [Path("photos/red/0.png")]
    assert pick_numbers("folder:photos:3", 6, 8) == ("folder:photos", [3], "")
    assert pick_numbers("folder:photos", 6, 4)[1:] == (
        [0, 1, 2, 3],
        "folder:photos: the first 4 of 6; folder:photos:N is another",
    )
    with pytest.raises(UserError, match="there are folder:photos:0 to folder:photos:5"):
        pick_numbers("folder:photos:6", 6, 8)
    with pytest.raises(UserError, match="no such file or folder"):
        list_files(["nowhere"])


def test_names_without_a_prefix_say_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    class_folders(Path("photos"), 1)
    table(Path("t.csv"), ["image", "label"], [["a", "b"]])
    with pytest.raises(UserError, match=r"photos is a folder: give folder:photos .* or images:photos"):
        registry.dataset_names(["photos"])
    with pytest.raises(UserError, match=r"t.csv is a table: give csv:t.csv"):
        registry.dataset_names(["t.csv"])


def test_names_of_result_files() -> None:
    assert registry.file_name("folder:/data/my photos/") == "folder_data_my photos"
    assert registry.file_name("csv:../a/pairs.csv") == "csv_.._a_pairs"
    assert registry.file_name("images:a") != registry.file_name("images:b/a")
