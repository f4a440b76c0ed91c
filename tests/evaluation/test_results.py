"""Result files are whole, valid, never lost; the CSV has clip_benchmark's columns, then ours, in a fixed order."""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
from pathlib import Path

import pytest

from tokensieve import provenance
from tokensieve.cli import main
from tokensieve.errors import UserError
from tokensieve.evaluation import results
from tokensieve.files import check_writable, slug, write_json, write_text


def result(plan: str = "none", key: str = "a", **changes: object) -> dict:
    reduction = {
        "plan": plan,
        "applied": plan != "none",
        "reason": None,
        "layers": [{"layer": "2", "tokens_in": 24, "tokens_out": 6}],
        "tokens_in": 24,
        "tokens_out": 6,
        "notes": ["one", "two"],
    }
    base = {
        "dataset": "d",
        "model": "m",
        "pretrained": "p",
        "task": "zeroshot_classification",
        "metrics": {"acc1": 0.5, "acc5": math.nan, "mean_per_class_recall": 0.25, "acc1_stderr": 0.1},
        "language": "en",
        "reduction": reduction,
        "run": {"seed": 0, "key": key},
    }
    return {**base, **changes}


def test_numbers_that_are_not_finite_become_null() -> None:
    assert provenance.to_json_value({"a": math.nan, "b": [math.inf, 1.5, {"c": -math.inf}], 3: (1, "x")}) == {
        "a": None,
        "b": [None, 1.5, {"c": None}],
        "3": [1, "x"],
    }


def test_a_result_file_is_valid_json_without_nan(tmp_path: Path) -> None:
    results.write_result(tmp_path / "r.json", result())
    text = (tmp_path / "r.json").read_text()
    assert "NaN" not in text
    assert json.loads(text)["metrics"]["acc5"] is None


def test_another_run_in_the_same_file_is_kept_and_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "r.json"
    for key in ("a", "b", "c"):
        results.write_result(path, result(key=key))
    assert [results.stored_key(tmp_path / name) for name in ("r.json", "r.json.1", "r.json.2")] == ["c", "a", "b"]
    assert "r.json.1" in capsys.readouterr().err


def test_the_same_run_replaces_its_own_file(tmp_path: Path) -> None:
    results.write_result(tmp_path / "r.json", result())
    results.write_result(tmp_path / "r.json", result())
    assert os.listdir(tmp_path) == ["r.json"]


@pytest.mark.parametrize("content", ["not json", "[1]", '{"run": 3}', ""])
def test_a_file_that_is_no_result_is_kept_too(tmp_path: Path, content: str) -> None:
    (tmp_path / "r.json").write_text(content)
    results.write_result(tmp_path / "r.json", result())
    assert (tmp_path / "r.json.1").read_text() == content


def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.json").write_text("old")

    def no_space(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(UserError, match="No space left"):
        write_text(tmp_path / "r.json", "new")
    assert os.listdir(tmp_path) == ["r.json"]
    assert (tmp_path / "r.json").read_text() == "old"


def test_written_files_have_ordinary_permissions(tmp_path: Path) -> None:
    write_text(tmp_path / "r.json", "x")
    (tmp_path / "plain").write_text("x")
    assert (tmp_path / "r.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_check_writable(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder" / "r.json")
    assert not (tmp_path / "new").exists(), "nothing is made before there is something to write"
    write_json(tmp_path / "new" / "folder" / "r.json", {})
    with pytest.raises(UserError, match="File name too long"):
        check_writable(tmp_path / ("x" * 300))
    with pytest.raises(UserError, match="is a folder"):
        check_writable(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        check_writable(tmp_path / "file" / "r.json")


def test_slugs_are_file_names_and_different() -> None:
    plans = ["none", "tome@*:-8", "tome@*:8", "tome@*:8%", "evit@3,6,9:70%", "a@6(k=10,m=50) + b@-2:4", "anchor@out(rest=zero)"]
    slugs = [slug(plan) for plan in plans]
    assert len(set(slugs)) == len(plans)
    assert not set('/\\:*?"<>| ').intersection("".join(slugs))


NAMES = {name: name[0] for name in ("dataset", "pretrained", "pretrained_full_path", "model", "language", "task")}


def test_result_names(tmp_path: Path) -> None:
    def name(template: str, several: bool = False) -> str:
        return str(results.result_path(template, plan="random:6", several_plans=several, **NAMES))

    assert name(results.DEFAULT_OUTPUT) == "d_p_m_l_t.json"
    assert name(results.DEFAULT_OUTPUT, several=True) == "d_p_m_l_t_random-6.json"
    assert name("x/{plan}/{dataset}.json", several=True) == "x/random-6/d.json"
    assert name(f"{tmp_path}") == f"{tmp_path}/d_p_m_l_t.json"
    assert name("new_folder/") == "new_folder/d_p_m_l_t.json"
    with pytest.raises(UserError, match=r"\{modle\}.*Did you mean 'model'"):
        name("{modle}.json")
    with pytest.raises(UserError, match="not a template"):
        name("{model.json")


def test_csv_columns_have_one_order(tmp_path: Path) -> None:
    first = result(plan="random:6")
    second = result(metrics={"zzz": 1.0, "mean_average_precision": 0.1, "mean_average_precision_stderr": 0.2}, extra=[1])
    (tmp_path / "b.json").write_text(json.dumps(first))  # with NaN, as clip_benchmark writes it
    (tmp_path / "a.json").write_text(json.dumps(second))
    (tmp_path / "other.json").write_text("[]")
    assert main(["build", str(tmp_path), "--output", str(tmp_path / "out.csv")]) == 0
    with open(tmp_path / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert " ".join(rows[0]) == (
        "dataset model pretrained task language model_fullname acc1 acc1_stderr acc5 mean_per_class_recall "
        "mean_average_precision mean_average_precision_stderr plan applied reason layers tokens_in tokens_out notes "
        "extra zzz run_key run_seed"
    )
    assert rows[0]["mean_average_precision"] == "0.1" and rows[0]["acc1"] == ""
    assert rows[1]["model_fullname"] == "m p" and rows[1]["acc5"] == ""
    assert (rows[1]["layers"], rows[1]["notes"]) == ("2:24->6", "one; two")


def test_csv_agrees_with_clip_benchmark(tmp_path: Path) -> None:
    """Every cell that clip_benchmark's own build writes is in ours, under the same column."""
    from clip_benchmark import cli as theirs

    plain = {k: v for k, v in result().items() if k not in ("reduction", "run")}
    plain["metrics"] = {"acc1": 0.5, "acc5": 0.75, "mean_per_class_recall": 0.25}
    for name, dataset in (("x", "one"), ("y", "two")):
        (tmp_path / f"{name}.json").write_text(json.dumps({**plain, "dataset": dataset}))
    files = [str(tmp_path / "x.json"), str(tmp_path / "y.json")]
    theirs.main_build(argparse.Namespace(files=files, output=str(tmp_path / "theirs.csv")))
    assert main(["build", *files, "--output", str(tmp_path / "ours.csv")]) == 0

    def rows(name: str) -> list[dict[str, str]]:
        with open(tmp_path / name, newline="") as file:
            return list(csv.DictReader(file))

    assert rows("ours.csv") == rows("theirs.csv")


def test_build_keeps_a_csv_that_says_something_else(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "r.json").write_text(json.dumps(result()))
    (tmp_path / "out.csv").write_text("mine")
    arguments = ["build", str(tmp_path / "r.json"), "--output", str(tmp_path / "out.csv")]
    assert main(arguments) == 0
    assert (tmp_path / "out.csv.1").read_text() == "mine"
    assert main(arguments) == 0  # the same content: nothing to keep
    assert not (tmp_path / "out.csv.2").exists()


@pytest.mark.parametrize(
    ("content", "says"), [(None, "cannot read"), ("{", "is not JSON"), ("{}", "is not a result"), ("[]", "is not a result")]
)
def test_build_names_a_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "r.json").write_text(content)
    assert main(["build", str(tmp_path / "r.json"), "--output", str(tmp_path / "out.csv")]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize("command", ["build", "report"])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reduction": [1]}, "its reduction is a list"),
        ({"reduction": "anchor:60"}, "its reduction is a str"),
        ({"run": ["seed"]}, "its run is a list"),
        ({"run": 3}, "its run is a int"),
        ({"reduction": {"layers": [1, 2]}}, "its layers are not a list of cuts"),
        ({"reduction": {"layers": [{"layer": 2}]}}, "its layers are not a list of cuts"),
        ({"reduction": {"notes": 3}}, "its notes are not"),
        ({"reduction": {"notes": [3]}}, "its notes are not"),
        ({"metrics": {"acc1": 10**400}}, "its 'acc1' is no measurement"),
        ({"metrics": {"acc1": 1e307}}, "its 'acc1' is no measurement"),
        ({"reduction": {"tokens_out": -(10**400)}}, "its 'tokens_out' is no measurement"),
        ({"model": "\ud800"}, "surrogates not allowed"),
    ],
)
def test_malformed_parts_are_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture, command: str, changes: dict, says: str
) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "odd.json"
    good.write_text(json.dumps(result()))
    bad.write_text(json.dumps(result(**changes)))
    options = ["--output", str(tmp_path / "out")] + (["--images", "0"] if command == "report" else [])
    assert main([command, str(bad), *options]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"tokensieve: error: {bad} is not ") and says in said and said.count("\n") == 1
    assert main([command, str(tmp_path), *options]) == 0
    said = capsys.readouterr().err
    assert said.startswith(f"tokensieve: left out: {bad} is not ") and says in said and said.count("\n") == 1


def test_json_without_end_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "r.json").write_text("[" * 100_000)
    assert main(["build", str(tmp_path / "r.json"), "--output", str(tmp_path / "out.csv")]) == 2
    assert "is not JSON" in capsys.readouterr().err


def test_parts_that_are_empty_or_elsewhere_are_no_mistake(tmp_path: Path) -> None:
    odd = result(reduction=None, run=None, notes="mine", layers=[1, 2])
    (tmp_path / "r.json").write_text(json.dumps(odd))
    assert main(["build", str(tmp_path), "--output", str(tmp_path / "out.csv")]) == 0
    with open(tmp_path / "out.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["notes"], row["layers"]) == ("mine", "[1, 2]")


def test_build_of_an_empty_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["build", str(tmp_path)]) == 2
    assert "no result" in capsys.readouterr().err
