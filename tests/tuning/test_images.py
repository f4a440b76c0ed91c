"""Images of users: damaged ones are counted and listed, too few are an error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tokensieve.data.own.files import list_files
from tokensieve.errors import UserError
from tokensieve.tuning.images import SHOWN, Request, describe_unreadable, find_images, read_questions


def damage(folder: Path) -> list[str]:
    """A truncated image, an empty file and a text with an image's name."""
    whole = (folder / "01.png").read_bytes()
    (folder / "truncated.png").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.jpg").write_bytes(b"")
    (folder / "text.jpeg").write_text("no image")
    return ["truncated.png", "empty.jpg", "text.jpeg"]


def test_damaged_images_are_listed_and_left_out(photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with a space, ümlaut"
    shutil.copytree(photos, folder)
    broken = damage(folder)
    found = find_images(Request("m", [str(folder)]))
    assert len(found) == 14 and found.available == 17
    assert sorted(Path(file).name for file in found.unreadable) == sorted(broken)
    text = describe_unreadable(found.unreadable)
    assert text.startswith("3 cannot be read: ") and "\n" not in text and all(name in text for name in broken)


def test_the_list_is_cut() -> None:
    text = describe_unreadable({f"{number}.png": "why" for number in range(SHOWN + 4)})
    assert text.startswith(f"{SHOWN + 4} cannot be read") and text.endswith("and 4 more")


def test_a_limit_takes_a_random_sample_that_depends_on_the_seed(photos: Path) -> None:
    some = [find_images(Request("m", [str(photos)], limit=9, seed=seed)).items for seed in (0, 0, 1)]
    assert some[0] == some[1] != some[2] and len(set(some[0])) == 9
    assert some[0] != sorted(some[0])


def test_too_few_images_are_one_line(photos: Path, tmp_path: Path) -> None:
    for number in (1, 2, 4):
        shutil.copy(photos / f"{number:02d}.png", tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=r"3 readable images, but at least 8 are needed \(3 cannot be read") as caught:
        find_images(Request("m", [str(tmp_path)]))
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="no such file or folder"):
        list_files([str(tmp_path / "nowhere")])


def test_files_and_folders_count_once(photos: Path) -> None:
    assert len(list_files([str(photos), str(photos / "01.png")])) == 14


def test_test_splits_choose_nothing(photos: Path, tmp_path: Path) -> None:
    for split in ("test", "train"):
        shutil.copytree(photos, tmp_path / "data" / split)
    rows = [f"{split},{file}" for split in ("test", "train", "dev") for file in list_files([str(photos)])]
    (tmp_path / "t.csv").write_text("\n".join(["split,image", *rows]))
    (tmp_path / "only.csv").write_text("\n".join(["split,image", *(row for row in rows if row.startswith("test"))]))
    for name in (f"folder:{tmp_path / 'data'}", str(tmp_path / "data"), f"csv:{tmp_path / 't.csv'}"):
        found = find_images(Request("m", [name]))
        assert found.available == 14 and found.remark.endswith(": the split train")
    assert all("/train/" in file for file in find_images(Request("m", [f"images:{tmp_path / 'data'}"])).items)
    assert find_images(Request("m", [f"csv:{tmp_path / 'only.csv'}"])).remark.endswith(": the split test")
    shutil.copytree(photos, tmp_path / "data" / "val")
    assert find_images(Request("m", [f"folder:{tmp_path / 'data'}"])).remark.endswith(": the split val")
    assert find_images(Request("m", [str(photos)])).remark == ""
    assert len(list_files([str(tmp_path / "data")])) == 3 * 14


def test_questions(tmp_path: Path) -> None:
    file = tmp_path / "q.txt"
    file.write_text("What is it?\n\n  Which colour? \n", encoding="utf-8")
    assert read_questions(str(file)) == ["What is it?", "Which colour?"]
    file.write_text("\n \n")
    with pytest.raises(UserError, match="holds no question"):
        read_questions(str(file))
    with pytest.raises(UserError, match="one question a line"):
        read_questions(str(tmp_path / "none.txt"))
