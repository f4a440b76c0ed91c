"""The published layouts of question files: what is read from each, where files are found, and what is said if one is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import vqa_files
from tests.support.pictures import picture
from tokensieve.data import registry as data_registry
from tokensieve.data import vqa
from tokensieve.data.images import BrokenImage
from tokensieve.errors import UserError


def test_textvqa_is_read_as_it_is_published(tmp_path: Path) -> None:
    file = vqa_files.textvqa(tmp_path)
    data = vqa.load("textvqa", root=tmp_path, split="val")
    assert data.check() == [] and data.scoring == "open"
    assert [(item.id, item.file, len(item.answers)) for item in data] == [
        ("34602", "003a8ae2ef43b901.jpg", 10),
        ("34603", "003a8ae2ef43b901.jpg", 10),
        ("34604", "4a7f.jpg", 10),
    ]
    assert data[2].answers.count("dog") == 2
    picture(0, 0).save(tmp_path / "train_images" / "training.jpg")  # the folder holds the images of both splits
    assert vqa.load(f"textvqa:{file}").check() == []


def test_pope_has_three_subsets_that_may_be_read_alone(tmp_path: Path) -> None:
    vqa_files.pope(tmp_path)
    data = vqa.load("pope", root=tmp_path)
    labels = " ".join(vqa_files.POPE.values()).split()
    assert [item.answer for item in data] == labels and data.scoring == "yes_no" and data.check() == []
    assert [item.kind for item in data] == ["random"] * 4 + ["popular"] * 4 + ["adversarial"] * 2
    assert data[0].id == "random 1" and data[1].file == "COCO_val2014_000000000000.jpg"
    assert [item.kind for item in vqa.load("pope", root=tmp_path, split="adversarial")] == ["adversarial"] * 2
    alone = vqa.load(f"pope:{tmp_path / 'coco' / 'coco_pope_popular.json'}")  # images are beside its folder
    assert [item.kind for item in alone] == ["popular"] * 4
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"question": "is there a dog ?", "image": "COCO_val2014_000000000001.jpg", "label": "no"}))
    assert [(item.question, item.kind) for item in vqa.load(f"pope:{own}")] == [("is there a dog ?", "")]


def test_scienceqa_has_the_questions_with_an_image_and_their_hints(tmp_path: Path) -> None:
    vqa_files.scienceqa(tmp_path)
    data = vqa.load("scienceqa", root=tmp_path)
    assert [item.id for item in data] == ["4", "5", "12"] and data.check() == [] and data.scoring == "choice"
    assert data[0].question == "what colour is this ?\nA. red\nB. green" and data[0].answer == "A"
    assert data[1].question == "Context: the dog is red\nwhat colour is this ?\nA. red\nB. green\nC. blue"
    assert data[1].answer == "B" and data[1].choices == ("red", "green", "blue") and data[1].kind == "natural science"
    assert [item.file for item in vqa.load("scienceqa", root=tmp_path, split="minitest")] == ["test/5/image.png"]
    by_split = vqa.load(f"scienceqa:{tmp_path / 'problems.json'}", images=tmp_path / "images" / "test")
    assert [item.file for item in by_split] == ["4/image.png", "5/image.png", "12/image.png"]


@pytest.mark.parametrize("copies", [False, True])
def test_mmbench_has_options_hints_and_images_of_other_rows(tmp_path: Path, copies: bool) -> None:
    file = vqa_files.mmbench(tmp_path, copies=copies)
    data = vqa.load("mmbench", root=tmp_path, split="dev")
    assert [item.id for item in data] == ["0", "1", "2"] and [item.answer for item in data] == ["A", "B", "D"]
    assert data[0].question == "what is word0 ?\nA. red\nB. green\nC. blue\nD. dog" and data[0].kind == "kind 0"
    assert data[1].question == "look at\nthe dog\nwhat is word1 ?\nA. yes\nB. no" and data[1].choices == ("yes", "no")
    assert [item.file for item in data] == ["0", "1", "1"] and data[2].image.tobytes() == picture(1, 1).tobytes()
    remarks = data.check()
    assert len(remarks) == copies and all("7 rows repeat questions with rotated options" in remark for remark in remarks)
    assert len(vqa.load(f"mmbench:{file}", limit=2)) == 2


def test_all_rotations_of_the_options_have_their_answer_in_its_new_place(tmp_path: Path) -> None:
    vqa_files.mmbench(tmp_path / "plain")
    data = vqa.load("mmbench", root=tmp_path / "plain", split="dev", limit=2).in_all_rotations()
    assert [(item.id, item.turn, item.choices, item.answer) for item in data] == [
        ("0", 0, ("red", "green", "blue", "dog"), "A"),
        ("0", 1, ("green", "blue", "dog", "red"), "D"),
        ("0", 2, ("blue", "dog", "red", "green"), "C"),
        ("0", 3, ("dog", "red", "green", "blue"), "B"),
        ("1", 0, ("yes", "no"), "B"),
        ("1", 1, ("no", "yes"), "A"),
    ]
    assert data.check() == [] and data.fingerprint != vqa.load("mmbench", root=tmp_path / "plain", split="dev").fingerprint
    vqa_files.mmbench(tmp_path / "copies", copies=True)
    ours, theirs = (vqa.load("mmbench", root=tmp_path / name, split="dev").in_all_rotations() for name in ("plain", "copies"))
    assert [item.question for item in ours] == [item.question for item in theirs]


def test_only_multiple_choice_has_rotations(tmp_path: Path) -> None:
    vqa_files.gqa(tmp_path)
    for data in (vqa.load("gqa", root=tmp_path, split="val"), vqa.load("embedded")):
        with pytest.raises(UserError, match=r"--circular: the questions of .* have no options"):
            data.in_all_rotations()


def test_a_path_after_the_name_is_a_folder_or_a_file(tmp_path: Path) -> None:
    vqa_files.vqav2(tmp_path / "v")
    by_folder = vqa.load(f"vqav2:{tmp_path / 'v'}", split="val")
    questions = tmp_path / "v" / "v2_OpenEnded_mscoco_val2014_questions.json"
    assert by_folder.fingerprint == vqa.load("vqav2", root=tmp_path / "v", split="val").fingerprint
    by_file = vqa.load(f"vqav2:{questions}", root="nowhere")  # the split is the file's, annotations and images are beside it
    assert [item.id for item in by_file] == [item.id for item in by_folder]
    vqa_files.gqa(tmp_path / "g", split="testdev")
    inside = tmp_path / "g" / "questions1.2"
    inside.mkdir()
    (tmp_path / "g" / "testdev_balanced_questions.json").rename(inside / "testdev_balanced_questions.json")
    assert len(vqa.load(f"gqa:{tmp_path / 'g'}", split="testdev")) == 3
    assert vqa.load(f"gqa:{inside / 'testdev_balanced_questions.json'}")[0].file == "n0.jpg"
    with pytest.raises(UserError, match=r"names the file of the questions: leave --questions other\.json out"):
        vqa.load(f"vqav2:{questions}", questions="other.json")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gqa:/data/gqa", "gqa"),
        ("gqa:/data/gqa1.2", "gqa"),
        ("pope:/data/coco_pope_random.json", "pope_coco_pope_random"),
        ("jsonl:mine.jsonl", "mine"),
        ("wds/imagenet/x", "imagenet_x"),
        ("vqav2", "vqav2"),
    ],
)
def test_names_of_result_files_have_no_paths(name: str, expected: str) -> None:
    assert data_registry.file_name(name) == expected


@pytest.mark.parametrize("name", ["vqav2", "gqa", "textvqa", "pope", "scienceqa", "mmbench"])
def test_a_missing_file_is_one_line_that_says_where_to_get_it(tmp_path: Path, name: str) -> None:
    for given, split in ((name, "val"), (f"{name}:{tmp_path}", "val"), (f"{name}:{tmp_path / 'gone'}", "val")):
        split = {"pope": "random", "mmbench": "dev"}.get(name, split)
        with pytest.raises(UserError, match=rf"^{name}: there is no .*https://.*--dataset {name}:") as caught:
            vqa.load(given, root=tmp_path / "root", split=split)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="has no split 'tset': there are"):
        vqa.load(name, root=tmp_path, split="tset")


def test_files_without_answers_are_refused(tmp_path: Path) -> None:
    for name, scored in (("textvqa", "val or train"), ("mmbench", "dev")):
        with pytest.raises(UserError, match=f"answers of {name}'s split 'test' are not published.*--split {scored}"):
            vqa.load(name, root=tmp_path)
    file = vqa_files.textvqa(tmp_path / "t")
    content = json.loads(file.read_text())
    for entry in content["data"]:
        del entry["answers"]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"answers of textvqa's file TextVQA_0.5.1_val.json are not published"):
        vqa.load(f"textvqa:{file}")
    columns = tuple(name for name in vqa_files.COLUMNS if name != "answer")
    with pytest.raises(UserError, match=r"answers of mmbench's file mmbench_dev_20230712.tsv are not published"):
        vqa.load(f"mmbench:{vqa_files.mmbench(tmp_path, columns)}")
    vqa_files.vqav2(tmp_path / "v", part="test2015")
    with pytest.raises(UserError, match=r"answers of vqav2's file v2_OpenEnded_mscoco_test2015_questions.json are not"):
        vqa.load(f"vqav2:{tmp_path / 'v' / 'v2_OpenEnded_mscoco_test2015_questions.json'}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choices": "red"}, "question 5 is not as published: its choices are not a list"),
        ({"answer": 3}, "question 5 is not as published: its answer 3 is not the number of one of its 3 choices"),
        ({"image": "../../../x.png"}, "is outside"),
        ({"choices": None}, "question 5 has no choices"),
    ],
)
def test_a_wrong_problem_of_scienceqa_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    problems = vqa_files.scienceqa(tmp_path)
    problems["5"] |= {"image": "image.png"} | change
    for name in [name for name, value in change.items() if value is None]:
        del problems["5"][name]
    (tmp_path / "problems.json").write_text(json.dumps(problems))
    with pytest.raises(UserError, match=message):
        vqa.load("scienceqa", root=tmp_path)


def test_files_of_scienceqa_that_do_not_fit_together_are_explained(tmp_path: Path) -> None:
    problems = vqa_files.scienceqa(tmp_path)
    (tmp_path / "problems.json").write_text(json.dumps({"11": problems["11"]}))
    with pytest.raises(UserError, match=r"question 4 is missing, but pid_splits.json has it in test"):
        vqa.load("scienceqa", root=tmp_path)
    (tmp_path / "pid_splits.json").write_text(json.dumps({"test": ["11"]}))
    with pytest.raises(UserError, match="none of its 1 questions has an image"):
        vqa.load("scienceqa", root=tmp_path)
    with pytest.raises(UserError, match=r"pid_splits.json has no val"):
        vqa.load("scienceqa", root=tmp_path, split="val")
    (tmp_path / "problems.json").write_text("[]")
    with pytest.raises(UserError, match="not a table of questions"):
        vqa.load("scienceqa", root=tmp_path)
    (tmp_path / "pid_splits.json").unlink()
    with pytest.raises(UserError, match=r"there is no .*pid_splits.json"):
        vqa.load("scienceqa", root=tmp_path)


def test_a_missing_column_and_a_wrong_answer_of_mmbench_are_named(tmp_path: Path) -> None:
    columns = tuple(name for name in vqa_files.COLUMNS if name not in ("image", "B"))
    with pytest.raises(UserError, match="it has no column B, image"):
        vqa.load(f"mmbench:{vqa_files.mmbench(tmp_path, columns)}")
    file = vqa_files.mmbench(tmp_path)
    file.write_text(file.read_text().replace("\tB\tc\t", "\tC\tc\t"))
    with pytest.raises(UserError, match="question 1 has the answer 'C', and 2 options"):
        vqa.load(f"mmbench:{file}")
    file.write_text(file.read_text().replace("\tC\tc\t", "\t\tc\t"))
    with pytest.raises(UserError, match=r"1 questions have no answer"):
        vqa.load(f"mmbench:{file}").check()


def test_an_image_of_mmbench_that_is_none_is_broken(tmp_path: Path) -> None:
    file = vqa_files.mmbench(tmp_path)
    lines = file.read_text().split("\n")
    image = lines[1].split("\t")[vqa_files.COLUMNS.index("image")]
    file.write_text(file.read_text().replace(image, image[:40]))
    data = vqa.load(f"mmbench:{file}")
    with pytest.raises(BrokenImage, match=r"^0 \(question 0\): "):
        data[0]
    assert data[1].image.size == picture(1, 1).size


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"image": "a.jpg", "text": "q"}, "it has no label"),
        ({"image": "a.jpg", "label": "no"}, "it has no text"),
        ({"text": "q", "label": "no"}, "it has no image"),
        ({"image": "../a.jpg", "text": "q", "label": "no"}, "outside"),
    ],
)
def test_a_wrong_line_of_pope_is_named(tmp_path: Path, line: dict[str, str], message: str) -> None:
    vqa_files.pope(tmp_path)
    (tmp_path / "coco" / "coco_pope_popular.json").write_text(json.dumps(line))
    with pytest.raises(UserError, match=rf"coco_pope_popular.json: 1 lines are wrong; line 1: .*{message}"):
        vqa.load("pope", root=tmp_path)


def test_a_file_of_another_layout_is_explained(tmp_path: Path) -> None:
    vqa_files.gqa(tmp_path / "gqa")
    file = tmp_path / "gqa" / "val_balanced_questions.json"
    for name, message in (("vqav2", 'no list "questions"'), ("textvqa", 'no list "data"'), ("mmbench", "no column index")):
        with pytest.raises(UserError, match=message):
            vqa.load(f"{name}:{file}")
    with pytest.raises(UserError, match="it has no image"):
        vqa.load(f"pope:{file}")
    file.write_text('{"1": {}}')
    with pytest.raises(UserError, match="question 1 has no imageId, question, answer"):
        vqa.load(f"gqa:{file}")
