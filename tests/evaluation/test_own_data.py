"""`tokensieve eval` on a user's own data: every form and task, results that are not mixed up, the ranking of single images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.own_data import class_folders, table
from tests.support.pictures import CLASSES, picture
from tokensieve.cli import main
from tokensieve.embedded.datasets import EmbeddedQuestions, EmbeddedScenes
from tokensieve.errors import UserError
from tokensieve.evaluation.results import read_results

Eval = Callable[..., SimpleNamespace]


@pytest.fixture
def evaluate(
    tiny_clip: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> Eval:
    """evaluate(*flags) -> .code .out .err, and .results by file name; the tiny model unless flags say else."""
    monkeypatch.chdir(tmp_path)

    def go(*flags: object, expect: int = 0) -> SimpleNamespace:
        given = list(map(str, flags))
        model = [] if "--model" in given else ["--model", tiny_clip.name, "--pretrained", tiny_clip.weights]
        before = set(tmp_path.glob("*.json"))
        code = main(["eval", *given, *model, "--num_workers", "0", "--batch_size", "4"])
        said = capsys.readouterr()
        assert code == expect, said.err
        new = {path.name: json.loads(path.read_text()) for path in set(tmp_path.glob("*.json")) - before}
        return SimpleNamespace(code=code, out=said.out, err=said.err, results=new)

    return go


def test_folders_under_several_plans(evaluate: Eval, tmp_path: Path) -> None:
    class_folders(tmp_path / "my photos")
    done = evaluate("--dataset", "folder:my photos/", "--compare", "grid@2:6")
    names = sorted(done.results)
    assert len(names) == 2 and all(name.startswith("folder_my photos_") for name in names)
    result = done.results[names[0]]
    assert result["dataset"] == "folder:my photos/" and result["task"] == "zeroshot_classification"
    assert result["run"]["n_samples"] == 9 and 0 <= result["metrics"]["acc1"] <= 1 and result["run"]["data"]


def test_skip_existing_never_takes_the_numbers_of_other_data(evaluate: Eval, tmp_path: Path) -> None:
    class_folders(tmp_path / "a")
    class_folders(tmp_path / "b")
    flags = ("--skip_existing", "--output", "same.json", "--dataset")
    first = evaluate(*flags, "folder:a")
    assert len(first.results) == 1 and "skipped" in evaluate(*flags, "folder:a").err
    assert len(evaluate(*flags, "folder:b").results) == 1
    picture(0, 50).save(tmp_path / "a" / "red" / "new.png")
    assert len(evaluate(*flags, "folder:a").results) == 1
    assert len(evaluate(*flags, "folder:a", "--classnames", "rose", "leaf", "sky").results) == 1


def test_images_in_splits(evaluate: Eval, tmp_path: Path) -> None:
    class_folders(tmp_path / "a" / "test", 1)
    class_folders(tmp_path / "a" / "train", 2)
    done = evaluate("--dataset", "images:a", "--plan", "none")
    assert "images:a: only the split test is read" in done.err
    (result,) = done.results.values()
    assert result["run"]["n_samples"] == 3


def test_images_alone(evaluate: Eval, tmp_path: Path) -> None:
    class_folders(tmp_path / "a")
    done = evaluate("--dataset", "images:a", "--compare", "grid@2:6", "--classnames", *CLASSES[:4])
    by_plan = {result["reduction"]["plan"]: result for result in done.results.values()}
    assert by_plan["none"]["task"] == "fidelity" and by_plan["none"]["metrics"]["agreement"] == 1
    assert by_plan["none"]["metrics"]["distance"] == pytest.approx(0, abs=1e-6)
    cut = by_plan["grid@2:6"]
    assert 0 < cut["metrics"]["distance"] < 2 and cut["metrics"]["cosine"] == pytest.approx(1 - cut["metrics"]["distance"])
    assert cut["reduction"]["lost"] == pytest.approx(cut["metrics"]["distance"], abs=1e-6)
    assert "nearest class as that of the full model" in done.out
    evaluate("--dataset", "images:a", "--classnames", *CLASSES[:4], "--save_predictions", "--output", "p.json")
    (file,) = tmp_path.glob("p*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted(line["file"] for line in lines) == sorted(
        str(path.relative_to(tmp_path)) for path in tmp_path.glob("a/*/*.png")
    )
    assert all(line["correct"] and line["label"] in CLASSES for line in lines)
    without = evaluate("--dataset", "images:a", "--output", "x.json").results["x.json"]
    assert "agreement" not in without["metrics"]
    labelled = evaluate("--dataset", "folder:a", "--task", "fidelity", "--output", "y.json").results["y.json"]
    assert labelled["metrics"]["agreement"] == 1  # of the classes of the data


def test_flags_without_effect_are_named(evaluate: Eval, tmp_path: Path) -> None:
    class_folders(tmp_path / "a")
    assert "--images has no effect on zeroshot_classification" in evaluate("--dataset", "folder:a", "--images", "a").err
    table(tmp_path / "t.csv", ["image", "caption"], [["a/red/0.png", "x"], ["a/red/1.png", "y"]])
    done = evaluate("--dataset", "csv:t.csv", "--recall_k", 1, "--classnames", "x", "y")
    assert "--classnames has no effect on zeroshot_retrieval" in done.err


def test_captions_and_labels_in_tables(evaluate: Eval, tmp_path: Path) -> None:
    class_folders(tmp_path / "in" / "a", 4, ["x"])
    captions = [[f"a/x/{n}.png", f"caption {n} {word}"] for n in range(4) for word in ("one", "two")]
    table(tmp_path / "in" / "pairs.csv", ["image", "caption"], captions, "utf-8-sig", ";")
    (result,) = evaluate("--dataset", "csv:in/pairs.csv", "--recall_k", 1).results.values()
    assert result["task"] == "zeroshot_retrieval" and result["run"]["n_samples"] == 4
    both = [[f"a/x/{n}.png", f"caption {n}", "cat" if n % 2 else "dog"] for n in range(4)]
    table(tmp_path / "in" / "both.csv", ["image", "caption", "label"], both)
    (labels,) = evaluate("--dataset", "csv:in/both.csv").results.values()
    assert labels["task"] == "zeroshot_classification"
    (found,) = evaluate("--dataset", "csv:in/both.csv", "--task", "zeroshot_retrieval", "--recall_k", 1).results.values()
    assert found["metrics"].keys() == result["metrics"].keys()


def test_a_linear_probe_of_splits(evaluate: Eval, tmp_path: Path) -> None:
    class_folders(tmp_path / "a", 4, ["x"])
    rows = [[f"a/x/{n}.png", n % 2, "train" if n < 2 else "test"] for n in range(4)]
    table(tmp_path / "t.csv", ["image", "label", "split"], rows)
    flags = ("--task", "linear_probe", "--fewshot_epochs", 1, "--dataset")
    (result,) = evaluate(*flags, "csv:t.csv").results.values()
    assert result["run"]["samples"] == {"train": 2, "test": 2} and 0 <= result["metrics"]["lp_acc1"] <= 1
    assert "has no split 'train'" in evaluate(*flags, "folder:a", expect=2).err


@pytest.mark.slow
def test_questions_in_a_table(evaluate: Eval, tmp_path: Path) -> None:
    drawn = EmbeddedQuestions("test")
    rows = []
    for number in range(6):
        image, question = drawn[number]
        image.save(tmp_path / f"{number}.png")
        rows.append([f"{number}.png", question.text, f"{question.answer}|something else"])
    table(tmp_path / "q.csv", ["image", "question", "answers"], rows)
    (result,) = evaluate("--dataset", "csv:q.csv", "--model", "sieve-llava-8", "--vqa_prompt", "{question}").results.values()
    assert result["task"] == "vqa" and result["run"]["n_samples"] == 6 and result["metrics"]["vqa_score"] > 0.1
    table(tmp_path / "r.csv", ["image", "question"], [["0.png", "what?"]])
    assert "has no column answer" in evaluate("--dataset", "csv:r.csv", "--model", "sieve-llava-8", expect=2).err


def test_damaged_images_are_counted_and_listed(evaluate: Eval, tmp_path: Path) -> None:
    class_folders(tmp_path / "a")
    (tmp_path / "a" / "red" / "half.png").write_bytes((tmp_path / "a" / "red" / "0.png").read_bytes()[:200])
    assert "half.png" in (failed := evaluate("--dataset", "folder:a", expect=2)).err and "--max_broken" in failed.err
    done = evaluate("--dataset", "folder:a", "--max_broken", 0.2)
    (result,) = done.results.values()
    assert (result["run"]["n_samples"], result["run"]["n_skipped"]) == (9, 1) and "cannot read a/red/half.png" in done.err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("folder:nowhere", "there is no folder nowhere"),
        ("images:nowhere", "there is no folder nowhere"),
        ("csv:nowhere.csv", "there is no file nowhere.csv"),
        ("folder:", "names no folder"),
        ("folder:empty", "no folder of a class with images; there is no image in it"),
        ("images:empty", "there is no image in empty"),
        ("empty", "is a folder: give folder:empty"),
        ("folder:../../\ud800", "is no name of a data set"),
    ],
)
def test_what_is_not_there_is_one_line_without_the_network(evaluate: Eval, tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    error = evaluate("--dataset", name, expect=2).err.strip()
    assert message in error and "\n" not in error and "network" not in error and "Traceback" not in error


def test_names_that_no_file_can_have(evaluate: Eval, tmp_path: Path) -> None:
    class_folders(tmp_path / "a{x}%s'\"; rm -rf *")
    done = evaluate("--dataset", "folder:a{x}%s'\"; rm -rf *")
    assert len(done.results) == 1
    class_folders(tmp_path / "long" / "x" / ("y" * 200) / ("z" * 200))
    assert len(evaluate("--dataset", f"folder:long/x/{'y' * 200}/{'z' * 200}").results) == 1
    class_folders(tmp_path / "a\nb")
    assert "printable" in evaluate("--dataset", "folder:a\nb", expect=2).err


# ---------------------------------------------------------------------------------------------------------------- single images


def test_the_ranking_of_single_images(evaluate: Eval, tmp_path: Path) -> None:
    class_folders(tmp_path / "a", 2)
    (tmp_path / "a" / "red" / "broken.png").write_bytes(b"no image")
    flags = ("--images", "a", "--classnames", "red", "green", "--plan", "none", "--compare", "grid@2:6", "--output", "r.json")
    assert "1 of 7 images" in evaluate(*flags, expect=2).err
    done = evaluate(*flags, "--max_broken", 0.2, "--recall_k", 3, "--k_anchors", 4, "--split", "train")
    for flag in ("recall_k", "k_anchors", "split", "num_workers"):
        assert f"--{flag}" in done.err
    stored = done.results["r.json"]
    assert len(stored["images"]) == 6 and list(stored["unreadable"]) == ["a/red/broken.png"]
    assert "cannot read a/red/broken.png" in done.err and "6 images, 1 cannot be read" in done.out
    for image in stored["images"]:
        assert set(image["plans"]) == {"none", "grid@2:6"} and image["image"] in done.out
        for ranking in image["plans"].values():
            shares = [item["probability"] for item in ranking]
            assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1, abs=1e-5)
    assert stored["plans"]["grid@2:6"]["tokens_out"] == 6 and stored["plans"]["grid@2:6"]["applied"]


def test_rankings_as_json_and_in_a_run_folder(evaluate: Eval, tmp_path: Path) -> None:
    class_folders(tmp_path / "a", 1)
    flags = ("--images", "a", "--classnames", "red", "green", "--run_folder", "runs")
    (first,) = json.loads(evaluate(*flags, "--json").out)
    old = (tmp_path / "runs" / "rankings.json").read_text()
    assert len(first["images"]) == 3 and json.loads(old)["images"] == first["images"]
    (second,) = json.loads(evaluate(*flags, "--json").out)
    assert second["file"] != first["file"] and (tmp_path / "runs" / "rankings.json").read_text() == old
    (alone,) = json.loads(evaluate(*flags[:-2], "--json").out)
    assert alone["images"] == first["images"] and "file" not in alone
    assert "eval --images a --classnames red green" in (tmp_path / "runs" / "arguments.yaml").read_text()
    with pytest.raises(UserError, match="no result in runs"):
        read_results(["runs"])


def test_the_embedded_model_recognises_its_shapes(evaluate: Eval, tmp_path: Path) -> None:
    scenes = EmbeddedScenes("test")
    image, label = scenes[0]
    image.save(tmp_path / "a.png")
    other = scenes.classes[(label + 20) % len(scenes.classes)]
    classes = [other, scenes.classes[label]]
    evaluate("--images", "a.png", "--classnames", *classes, "--model", "sieve-vit-8", "--output", "r.json")
    (entry,) = json.loads((tmp_path / "r.json").read_text())["images"]
    assert entry["plans"]["none"][0]["class"] == scenes.classes[label] and len(entry["plans"]) == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--images", "a"), "--images with no class names: give --classnames"),
        (("--images", "a", "--classnames", "cat"), "with one class name"),
        (("--images", "a", "--classnames", "cat", "cat"), "'cat' comes twice"),
        (("--images", "none.png", "--classnames", "a", "b"), "no such file or folder"),
        (("--images", "empty", "--classnames", "a", "b"), "there is no image in it"),
        (("--images", "a", "--classnames", "a", "b", "--model", "sieve-llava-8"), "models of the type vlm do not do that"),
    ],
)
def test_wrong_rankings_are_one_line(evaluate: Eval, tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    class_folders(tmp_path / "a", 1)
    (tmp_path / "empty").mkdir()
    error = evaluate(*flags, expect=2).err.strip()
    assert message in error and "\n" not in error
