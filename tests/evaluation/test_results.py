"""Result files are whole, valid, never lost; the CSV has clip_benchmark's columns, then ours, in a fixed order."""

from __future__ import annotations

import argparse
import csv
import json
import math
import multiprocessing
import os
from pathlib import Path

import pytest

from tokensieve import provenance
from tokensieve.cli import main
from tokensieve.errors import UserError
from tokensieve.evaluation import results
from tokensieve.files import check_writable, slug, write_json, write_text

A, B, C = "a" * 32, "b" * 32, "c" * 32  # keys


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


def test_every_run_gets_a_file_of_its_own_and_its_name_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    names = [results.write_result(tmp_path / "r.JSON", result(key=key)).name for key in (A, B, B, A, A)]
    assert names == ["r.JSON", "r_bbbbbbbb.JSON", "r_bbbbbbbb-2.JSON", "r_aaaaaaaa.JSON", "r_aaaaaaaa-2.JSON"]
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4 and said[0].endswith(f"r.JSON is taken; this result is in {tmp_path}/r_bbbbbbbb.JSON")
    assert len(results.read_results([str(tmp_path)])) == 5


@pytest.mark.parametrize("content", ["not json", "[1]", '{"run": 3}', ""])
def test_a_file_that_is_no_result_stays_as_it_is(tmp_path: Path, content: str) -> None:
    (tmp_path / "r.json").write_text(content)
    assert results.write_result(tmp_path / "r.json", result(key=A)) == tmp_path / "r_aaaaaaaa.json"
    assert (tmp_path / "r.json").read_text() == content


def test_a_link_is_a_name_that_is_taken_if_it_leads_somewhere(tmp_path: Path) -> None:
    (tmp_path / "r.json").symlink_to("elsewhere/there.json")
    assert results.write_result(tmp_path / "r.json", result(key=A)) == tmp_path / "r.json"
    assert results.write_result(tmp_path / "r.json", result(key=A)) == tmp_path / "r_aaaaaaaa.json"
    assert (tmp_path / "r.json").is_symlink() and os.listdir(tmp_path / "elsewhere") == ["there.json"]
    assert len(results.read_results([str(tmp_path)])) == 2


@pytest.mark.parametrize("same_key", [True, False])
def test_of_eight_writers_of_one_name_nothing_is_lost(tmp_path: Path, same_key: bool) -> None:
    fork = multiprocessing.get_context("fork")

    def write(writer: int) -> None:
        for number in range(25):
            row = result(key=A if same_key else f"{writer:04x}{number:04x}{A}", extra=[writer, number])
            results.write_result(tmp_path / "r.json", row)

    writers = [fork.Process(target=write, args=(writer,)) for writer in range(8)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    assert all(process.exitcode == 0 for process in writers)
    assert len(os.listdir(tmp_path)) == 200
    found = results.read_results([str(tmp_path)])
    assert sorted(row["extra"] for row in found) == [[writer, number] for writer in range(8) for number in range(25)]
    assert sum(row["run"]["newest"] for row in found) == (1 if same_key else 200)


def test_runs_are_found_under_every_name(tmp_path: Path) -> None:
    assert results.find_run(tmp_path / "none" / "r.json", A) is None
    for key, number in ((A, 1), (B, 2), (A, 3), (B, 4)):
        row = result(key=key, extra=number)
        row["run"]["time"] = f"2026-01-0{number}T00:00:00+00:00"
        results.write_result(tmp_path / "r.json", row)
    (tmp_path / "r.json.1").write_text(json.dumps(result(key=C)))  # as earlier versions kept it
    (tmp_path / "r_cccccccc.json").write_text("damaged")
    (tmp_path / "r_other.json").write_text(json.dumps(result(key="d" * 32)))  # of another name

    def found(key: str) -> tuple[str, object] | None:
        stored = results.find_run(tmp_path / "r.json", key)
        return stored and (stored.path.name, stored.result.get("extra"))

    assert [found(key) for key in (A, B, C)] == [("r_aaaaaaaa.json", 3), ("r_bbbbbbbb-2.json", 4), ("r.json.1", None)]
    assert found("d" * 32) is None and found("b" * 8 + "0" * 24) is None


# ---------------------------------------------------------------------------------------------------------------- newest


def stamped(folder: Path, name: str, key: str | None, time: object, changed: int = 0) -> None:
    """A result file with these times."""
    row = result(extra=name)
    row["run"] = {"key": key, "time": time} if key else {}
    (folder / name).write_text(json.dumps(row))
    os.utime(folder / name, (changed, changed))


def newest(folder: Path) -> dict[str, bool | None]:
    return {row["extra"]: row["run"].get("newest") for row in results.read_results([str(folder)])}


def test_the_newest_of_equal_settings_is_marked(tmp_path: Path) -> None:
    stamped(tmp_path, "a.json", A, "2026-01-02T00:00:00+00:00", 9)
    stamped(tmp_path, "b.json", A, "2026-01-02T02:00:00+00:00", 1)
    stamped(tmp_path, "c.json", A, "2026-01-02T02:30:00+01:00", 7)  # half past one
    stamped(tmp_path, "d.json", B, "2025-01-01T00:00:00+00:00")
    stamped(tmp_path, "e.json", None, None)
    assert newest(tmp_path) == {"a.json": False, "b.json": True, "c.json": False, "d.json": True, "e.json": None}


@pytest.mark.parametrize("time", [None, 3, "", "yesterday", "2026-13-01", {}, ["2026-01-01"]])
def test_without_a_time_that_of_the_file_counts_then_its_name(tmp_path: Path, time: object) -> None:
    for name in ("r_aaaaaaaa-10.json", "r.json", "r_aaaaaaaa-9.json", "r_aaaaaaaa.json"):
        stamped(tmp_path, name, A, time, 5)
    assert newest(tmp_path)["r_aaaaaaaa-10.json"] is True
    stamped(tmp_path, "a.json", A, time, 6)
    assert [name for name, is_newest in newest(tmp_path).items() if is_newest] == ["a.json"]


def test_a_result_is_never_dated_before_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    times = []
    for clock in (1e9, 5e8, 0.0, -5.0, 2e9):  # it is set back, and set right
        monkeypatch.setattr("tokensieve.evaluation.results.time.time", lambda clock=clock: clock)
        row = result(key=A)
        row["run"]["time"] = results.time_after(results.find_run(path, A))
        results.write_result(path, row)
        times.append(row["run"]["time"])
    assert times == sorted(set(times)) and times[0] == "2001-09-09T01:46:40.000000+00:00" and times[-1] > "2033"
    for odd in ("9999-12-31T23:59:59.999999+00:00", "0001-01-01T00:00:00+23:59"):
        stamped(tmp_path, "odd.json", A, odd)
        assert results.time_after(results.find_run(tmp_path / "odd.json", A)).startswith("2033")


def test_folders_are_read_with_capital_suffixes_and_files_of_earlier_versions(tmp_path: Path) -> None:
    for name in ("a.json", "b.JSON", "a.json.1", "b.JSON.12", "c.json.x", "d.txt"):
        stamped(tmp_path, name, None, None)
    assert sorted(newest(tmp_path)) == ["a.json", "a.json.1", "b.JSON", "b.JSON.12"]


def test_what_lies_beside_a_named_file_is_mentioned(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for _ in range(6):
        results.write_result(tmp_path / "r.json", result(key=A))
    (tmp_path / "r_other.json").write_text(json.dumps(result()))
    capsys.readouterr()
    assert len(results.read_results([str(tmp_path / "r.json"), str(tmp_path / "r_aaaaaaaa.json")])) == 2
    said = capsys.readouterr().err
    assert said == (
        "tokensieve: not read: r_aaaaaaaa-2.json, r_aaaaaaaa-3.json, r_aaaaaaaa-4.json and 1 more, other runs of the same "
        f"name. To read all, give the folder {tmp_path}.\n"
    )
    twice = [str(tmp_path), str(tmp_path / "r.json"), f"{tmp_path}/../{tmp_path.name}/r.json"]
    assert len(results.read_results(twice)) == 7 and not capsys.readouterr().err


def test_build_marks_the_newest(tmp_path: Path) -> None:
    stamped(tmp_path, "a.json", A, "2026-01-02")
    stamped(tmp_path, "b.json", A, "2026-01-01")
    assert main(["build", str(tmp_path), "--output", str(tmp_path / "out.csv")]) == 0
    with open(tmp_path / "out.csv", newline="") as file:
        assert [(row["extra"], row["run_newest"]) for row in csv.DictReader(file)] == [("a.json", "True"), ("b.json", "False")]


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
        "extra zzz run_key run_newest run_seed"
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


def test_cells_that_a_spreadsheet_would_run_are_texts(tmp_path: Path) -> None:
    cells = {
        "one": "=1+1",
        "two": "+x",
        "three": "@x",
        "four": "\tx",
        "five": "\rx",
        "six": "-x",
        "seven": "x=1",
        "=eight": -0.5,
    }
    row = result(**cells, nine="-0.5", ten=-1, model="=cmd()")
    (tmp_path / "r.json").write_text(json.dumps(row))
    assert main(["build", str(tmp_path), "--output", str(tmp_path / "out.csv")]) == 0
    with open(tmp_path / "out.csv", newline="") as file:
        (read,) = csv.DictReader(file)
    names = ("one", "two", "three", "four", "five", "six", "seven", "'=eight", "nine", "ten", "model", "model_fullname")
    wanted = ["'=1+1", "'+x", "'@x", "'\tx", "'\rx", "'-x", "x=1", "-0.5", "-0.5", "-1", "'=cmd()", "'=cmd() p"]
    assert [read[name] for name in names] == wanted


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
