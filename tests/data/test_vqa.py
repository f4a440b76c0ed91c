"""Questions from files: what is read, what does not fit together, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import vqa_files
from tokensieve.data import vqa
from tokensieve.data.images import BrokenImage
from tokensieve.errors import UserError


def test_vqav2_is_read_as_it_is_published(tmp_path: Path) -> None:
    vqa_files.vqav2(tmp_path)
    data = vqa.load("vqav2", root=tmp_path, split="val")
    assert len(data) == 8 and data.check() == []
    item = data[1]
    assert item.id == "9001" and item.kind == "other" and item.answers.count("red") == 7 and item.answer == "red"
    assert (
        item.image.mode == "RGB" and item.file == "COCO_val2014_000000000009.jpg" and item.question == "what colour is this ?"
    )
    assert len(vqa.load("vqav2", root=tmp_path, split="val", limit=3)) == 3


def test_the_files_may_be_named_and_the_images_lie_flat(tmp_path: Path) -> None:
    vqa_files.vqav2(tmp_path / "all")
    (tmp_path / "all" / "val2014").rename(tmp_path / "flat")
    named = {
        "questions": tmp_path / "all" / "v2_OpenEnded_mscoco_val2014_questions.json",
        "annotations": tmp_path / "all" / "v2_mscoco_val2014_annotations.json",
        "images": tmp_path / "flat",
    }
    assert vqa.load("vqav2", **named)[0].id == "9000"  # the split is the files'
    for flag in named:
        with pytest.raises(UserError, match=f"there is no .*gone.*--{flag}.*visualqa.org"):
            vqa.load("vqav2", **{**named, flag: tmp_path / "gone"})


def test_gqa_is_read_as_it_is_published(tmp_path: Path) -> None:
    vqa_files.gqa(tmp_path)
    data = vqa.load("gqa", root=tmp_path, split="val")
    assert [(item.id, item.kind, item.answers) for item in data] == [
        ("00", "query", ["red"]),
        ("01", "verify", ["yes"]),
        ("02", "query", ["blue"]),
    ]
    assert data.check() == []


def test_a_jsonl_has_one_answer_or_several(tmp_path: Path) -> None:
    file = vqa_files.jsonl(
        tmp_path,
        [
            {"image": "a/0.png", "question": "what ?", "answers": ["red", "blue", "blue"], "kind": "colour", "id": 7},
            {"image": "a/1.png", "question": "how many ?", "answer": 2},
        ],
    )
    data = vqa.load(f"jsonl:{file}")
    assert [(item.id, item.kind, item.answer) for item in data] == [("7", "colour", "blue"), ("2", "", "2")]
    assert vqa.load("jsonl", questions=file, images=tmp_path)[0].file == "a/0.png"


@pytest.mark.parametrize("split", ["test", "test-dev"])
def test_a_split_without_published_answers_is_refused(tmp_path: Path, split: str) -> None:
    with pytest.raises(UserError, match=r"not published.*--split val or train"):
        vqa.load("vqav2", root=tmp_path, split=split)
    with pytest.raises(UserError, match=r"not published.*--split testdev or val or train"):
        vqa.load("gqa", root=tmp_path, split="test")
    with pytest.raises(UserError, match="Did you mean 'val'"):
        vqa.load("vqav2", root=tmp_path, split="vall")


def test_what_does_not_fit_together_is_said_all_at_once(tmp_path: Path) -> None:
    annotations = vqa_files.vqav2(tmp_path, images=3)
    asked = json.loads((tmp_path / "v2_OpenEnded_mscoco_val2014_questions.json").read_text())["questions"]
    asked[0]["question"] = " "
    asked.append({"image_id": 77, "question": "what is this ?", "question_id": 77000})  # no image, no annotation
    asked.append(asked[1])
    vqa_files.published(tmp_path, "val2014", asked, annotations)
    data = vqa.load("vqav2", root=tmp_path, split="val")
    with pytest.raises(UserError) as caught:
        data.check()
    said = str(caught.value)
    assert "1 of 8 questions have no image" in said and "COCO_val2014_000000000077.jpg" in said
    assert "1 questions have no answer" in said and "1 images have no question" in said and "9001" in said
    assert "1 question ids come more than once" in said and "cocodataset.org" in said
    with pytest.raises(UserError, match="have no answer"):
        data.check(allowed=0.5)  # a missing image may be let pass, a missing answer not


def test_a_missing_image_may_be_let_pass_and_is_then_broken(tmp_path: Path) -> None:
    vqa_files.vqav2(tmp_path)
    gone = tmp_path / "val2014" / "COCO_val2014_000000000010.jpg"
    gone.rename(tmp_path / "val2014" / "COCO_val2014_000000000999.jpg")
    data = vqa.load("vqav2", root=tmp_path, split="val")
    with pytest.raises(UserError, match="2 of 8 questions have no image"):
        data.check(allowed=0.1)
    remarks = data.check(allowed=0.25)
    assert "2 of 8 questions have no image" in remarks[0] and "1 images have no question about them" in remarks[1]
    with pytest.raises(BrokenImage, match=r"000000000010\.jpg .question 10000"):
        data[2]
    assert vqa.load("vqav2", root=tmp_path, split="val", limit=2).check()[0].count("have no question about them") == 1


def test_annotations_of_other_questions_are_remarked(tmp_path: Path) -> None:
    annotations = vqa_files.vqav2(tmp_path, images=1)
    asked = json.loads((tmp_path / "v2_OpenEnded_mscoco_val2014_questions.json").read_text())["questions"]
    vqa_files.published(tmp_path, "val2014", asked[:1], annotations)
    assert "1 annotations have no question: 9001" in vqa.load("vqav2", root=tmp_path, split="val").check()[0]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"image": "../secret.png", "question": "q", "answer": "a"}, "outside"),
        ({"image": "/etc/passwd", "question": "q", "answer": "a"}, "outside"),
        ({"image": "a/../../b.png", "question": "q", "answer": "a"}, "outside"),
        ({"question": "q", "answer": "a"}, "no image"),
        ({"image": "a/0.png", "answer": "a"}, "no question"),
        ({"image": "a/0.png", "question": "q"}, "no answers"),
        ({"image": "a/0.png", "question": "q", "answers": {"a": 1}}, "no answers"),
        ([1], "not a table"),
    ],
)
def test_a_wrong_line_of_a_jsonl_is_named(tmp_path: Path, line: object, said: str) -> None:
    file = vqa_files.jsonl(tmp_path, [{"image": "a/0.png", "question": "q", "answer": "a"}, line])  # type: ignore[list-item]
    with pytest.raises(UserError, match=f"line 2: .*{said}"):
        vqa.load(f"jsonl:{file}")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"name": "vqa2"}, "Did you mean 'vqav2'"),
        ({"name": "embedded-questions", "images": "x"}, "drawn by the program"),
        ({"name": "gqa", "annotations": "x"}, "leave --annotations x out"),
        ({"name": "mmbench", "images": "x", "split": "dev"}, "leave --images x out"),
        ({"name": "jsonl"}, "needs a file"),
        ({"name": "vqav2", "split": "val"}, "needs --questions, or --dataset_root"),
        ({"name": "gqa", "split": "val", "root": "nowhere"}, "there is no val_balanced_questions.json in nowhere"),
    ],
)
def test_mistakes_are_explained(flags: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        vqa.load(**flags)  # type: ignore[arg-type]


def test_files_of_another_kind_are_explained(tmp_path: Path) -> None:
    vqa_files.vqav2(tmp_path)
    questions, answers = (
        tmp_path / f"v2_{name}.json" for name in ("OpenEnded_mscoco_val2014_questions", "mscoco_val2014_annotations")
    )
    with pytest.raises(UserError, match="It has annotations: is it the file for --annotations"):
        vqa.load("vqav2", questions=answers, annotations=questions, images=tmp_path)
    questions.write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        vqa.load("vqav2", root=tmp_path, split="val")
    vqa_files.gqa(tmp_path / "gqa")
    file = tmp_path / "gqa" / "val_balanced_questions.json"
    file.write_text(json.dumps({"1": {"imageId": "../x", "question": "q", "answer": "a"}}))
    with pytest.raises(UserError, match="no id of GQA"):
        vqa.load("gqa", root=tmp_path / "gqa", split="val")


def test_the_fingerprint_follows_questions_and_images(tmp_path: Path) -> None:
    file = vqa_files.jsonl(tmp_path)
    before = vqa.load(f"jsonl:{file}").fingerprint
    assert vqa.load(f"jsonl:{file}").fingerprint == before != vqa.load(f"jsonl:{file}", limit=2).fingerprint
    (tmp_path / "a" / "1.png").write_bytes(b"other")
    assert vqa.load(f"jsonl:{file}").fingerprint != before


def test_the_embedded_questions_come_with_their_kinds() -> None:
    data = vqa.load("embedded-questions", split="val", limit=5)
    assert [item.kind for item in data] == ["colour", "shape", "count", "position", "presence"]
    assert all(item.answer == item.answers[0] for item in data) and data.check() == []
    assert len(vqa.load("embedded-questions-all", split="test")) == 2000 == len(vqa.load("embedded"))
