"""What all commands have in common: examples, --json, --quiet, versions, narrow terminals, no colours, completion, doctor."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import toy_plugin
from tests.support.paths import ROOT
from tokensieve import embedded
from tokensieve.cli import completion, main
from tokensieve.cli.parser import Parser, build_parser, parse
from tokensieve.cli.registry import COMMANDS, Command, Result, all_commands
from tokensieve.errors import UserError
from tokensieve.testing import doctor

OURS = list(all_commands())
EXAMPLES = [line for name in OURS for line in COMMANDS[name].examples]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------------------------------------------ help and examples


@pytest.mark.parametrize("name", OURS)
def test_help_ends_with_examples_and_fits(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    examples = COMMANDS[name].examples
    assert len(examples) >= 3 and all(line.startswith(f"tokensieve {name}") for line in examples)
    with pytest.raises(SystemExit):
        main([name, "--help"])
    said = capsys.readouterr().out
    assert said.endswith("".join(f"  {line}\n" for line in examples))
    before = said[: said.index("examples:\n")]
    assert max(map(len, before.splitlines())) <= 80
    assert all(f"--{flag}" in before for flag in ("json", "quiet", "debug", "plugin"))


@pytest.mark.parametrize("line", EXAMPLES)
def test_every_example_is_understood(line: str) -> None:
    words = shlex.split(line)[1:]
    if "--plugin" in words:
        Path(words[words.index("--plugin") + 1]).write_text("")
    with toy_plugin.loaded_plugins_are_forgotten():
        args = parse(words)
    assert args.command == words[0]
    if args.command == "validate" and "my.yaml" not in words:
        assert main(words) in (0, 2)
    if args.command in ("train", "search") and "my.yaml" not in words:
        from tokensieve import config
        from tokensieve.cli.overrides import read_overrides

        values = args.values if args.command == "search" else args.words[1:]
        config.load(args.config if args.command == "search" else args.words[0], read_overrides(values))


# ------------------------------------------------------------------------------------------------------ --json and --quiet

COMMAND_LINES = (
    ["methods"],
    ["methods", "tome"],
    ["configs"],
    ["configs", "show", "embedded_clip"],
    ["configs", "copy", "embedded_clip"],
    ["validate", "embedded_clip"],
    ["completion", "fish"],
    ["build", "result.json"],
    ["report", "result.json", "--images", "0"],
    ["leaderboard", "show", "--folder", str(ROOT / "benchmarks" / "results" / "leaderboard")],
)


@pytest.mark.parametrize("words", COMMAND_LINES, ids=" ".join)
def test_json_is_all_that_is_on_standard_output(words: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = {"dataset": "d", "model": "m", "pretrained": "p", "metrics": {"acc1": 0.5}}
    (here / "result.json").write_text(json.dumps(result))
    assert main([*words, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) and "Traceback" not in said.err
    for path in here.glob("embedded_clip*"):
        path.unlink()
    assert main(["--json", "--quiet", *words]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_json_of_an_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--limit", "8", "--batch_size", "8", "--num_workers", "0"]
    assert main(["eval", "--plan", "none", "--compare", "grid:60", *few, "--output", "{plan}.json", "--json"]) == 0
    said = capsys.readouterr()
    full, cut = json.loads(said.out)
    assert full["file"] == "none.json" and full["metrics"] and cut["reduction"]["tokens_out"] == 60
    assert "grid:60" in said.err  # the table
    flags = ["--model", embedded.MODEL, "--plan", "grid:60", "--repeats", "1", "--batch_size", "1"]
    assert main(["bench", *flags, "--json", "--quiet"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"][0]["plan"] == "grid:60"


def test_errors_leave_standard_output_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "nothing", "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("tokensieve: error: ")


def test_a_command_of_a_plugin_has_a_result_too(capsys: pytest.CaptureFixture[str]) -> None:
    def add_flags(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", metavar="FILE", help="its own")

    COMMANDS.add(Command("old", "x", "x", lambda parser: None, lambda args: 3), origin=__name__)
    COMMANDS.add(Command("own", "x", "x", add_flags, lambda args: print(args.json)), origin=__name__)
    COMMANDS.add(Command("new", "x", "x", lambda parser: None, lambda args: Result({"nan": float("nan")}, 1)), origin=__name__)
    try:
        assert main(["old", "--json"]) == 3 and json.loads(capsys.readouterr().out) == {"exit_code": 3}
        assert main(["own", "--json", "a.json"]) == 0 and capsys.readouterr().out == "a.json\n"
        assert main(["new", "--json"]) == 1 and json.loads(capsys.readouterr().out) == {"nan": None}
    finally:
        for name in ("old", "own", "new"):
            COMMANDS.remove(name)


@pytest.mark.parametrize("words", [["configs", "copy", "embedded_clip"], ["validate", "embedded_clip"]], ids=" ".join)
def test_quiet_says_nothing(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------------------ terminals


def test_tables_fit_80_columns_without_colours(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tokensieve.evaluation.tables import print_table

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    long = "resize(size=192) + cover@7:40 + anchor@9(k=10,m=50,alpha=0.5,rest=merge)"
    reduction = {"plan": long, "applied": True, "changed": True, "tokens_in": 196, "tokens_out": 60, "gflops": 12.345}
    reduction |= {"images_per_second": 100.0, "images_per_second_full": 50.0, "lost": 0.0123, "lost_stderr": 0.0023}
    run = {"n_samples": 2000, "device": "cpu", "dtype": "float32"}
    about = {"model": embedded.MODEL, "pretrained": embedded.PRETRAINED, "dataset": "embedded", "run": run}
    about["task"] = "zeroshot_classification"
    print_table([{**about, "metrics": {"acc1": 0.9445, "acc1_stderr": 0.0051}, "reduction": reduction}], "acc1")
    said = capsys.readouterr().out
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in said.splitlines()) <= 80
    assert not re.search(r"\x1b\[(?:[0-9;]*;)?(?:3|4|9|10)[0-7]", said)  # bold is no colour


# ------------------------------------------------------------------------------------------------------ completion

TYPED = (  # what is typed, some of what is offered, what is not
    ("tokensieve ", ["eval", "train", "configs", "--version"], ["--plan"]),
    ("tokensieve ev", ["eval"], ["train"]),
    ("tokensieve eval --pl", ["--plan", "--plugin"], ["--limit"]),
    ("tokensieve eval --plan co", ["cover", "cosine"], ["tome", "copy.txt"]),
    ("tokensieve --quiet eval --limit 10 --compare vi", ["visionzip", "vispruner"], ["video.txt"]),
    ("tokensieve eval --dataset embedded-c", ["embedded-captions"], ["embedded"]),
    ("tokensieve methods visionz", ["visionzip"], []),
    ("tokensieve train embedded_v", ["embedded_vlm"], ["embedded_clip"]),
    ("tokensieve train RGBNT201/D", ["RGBNT201/DeMo_SDTPS"], []),
    ("tokensieve configs sh", ["show"], ["copy"]),
    ("tokensieve show vid", ["video.txt"], ["visionzip"]),
    ("tokensieve eval --output co", ["copy.txt"], ["cover"]),
    ("tokensieve completion ", ["bash", "zsh", "fish"], []),
)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("copy.txt", "video.txt"):
        (here / name).touch()
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    tries = [
        f"COMP_WORDS=({' '.join(shlex.quote(word) for word in typed.split(' '))}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); "
        'COMPREPLY=(); _tokensieve; echo "${COMPREPLY[*]}"'
        for typed, _, _ in TYPED
    ]
    done = subprocess.run(["bash", "--norc"], input="\n".join([script, *tries]), capture_output=True, text=True)
    lines = done.stdout.split("\n")[:-1]
    assert done.stderr == "" and len(lines) == len(TYPED)
    for line, (typed, offered, not_offered) in zip(lines, TYPED, strict=True):
        assert set(offered) <= set(line.split()) and not set(not_offered) & set(line.split()), (typed, line)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_have_every_command_and_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name, words in completion.all_words().items():
        assert name in script
        assert all((f"-l {flag[2:]}" if shell == "fish" else flag) in script for flag in words.flags if flag.startswith("--"))
    if shutil.which(shell) is not None:
        done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


# ------------------------------------------------------------------------------------------------------ doctor


@pytest.mark.slow
def test_the_doctor_finds_nothing_wrong_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) in (0, 1)
    found = {(one["section"], one["name"]): one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["self-test", doctor.PLAN]["state"] == "ok" and "bit for bit" in found["self-test", doctor.PLAN]["text"]
    assert found["devices", "CPU"]["state"] == found["folders", "current"]["state"] == "ok"


def test_the_doctor_tells_what_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def examine() -> list[doctor.Finding]:
        return [
            doctor.Finding("versions", "numpy", doctor.BAD, "1.0, and numpy>=1.26 is needed"),
            doctor.Finding("extras", "plots", doctor.ABSENT, "for pictures " * 20),
        ]

    monkeypatch.setattr(doctor, "examine", examine)
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "problems: numpy" in said and max(map(len, said.splitlines())) <= 80
    assert main(["doctor", "--quiet"]) == 1
    said = capsys.readouterr().out
    assert "numpy" in said and "plots" not in said


def test_a_self_test_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise OSError("the weights are gone")

    monkeypatch.setattr(doctor, "_try_plan", broken)
    (found,) = doctor.self_test()
    assert (found.state, found.text) == (doctor.BAD, "OSError: the weights are gone")


def test_a_folder_that_cannot_be_written_is_a_finding(here: Path) -> None:
    if os.geteuid() == 0:
        folder = Path("/proc/self")
    else:
        folder = here / "closed"
        folder.mkdir(mode=0o500)
    assert doctor._folder("current", folder).state == doctor.BAD


# ------------------------------------------------------------------------------------------------------ parsing


def test_words_after_flags_belong_to_the_command() -> None:
    assert parse(["validate", "a.yaml", "--quiet", "b.yaml", "x=1"]).files == ["a.yaml", "b.yaml", "x=1"]
    assert parse(["train", "a.yaml", "--output", "o", "seed=1"]).words == ["a.yaml", "seed=1"]
    with pytest.raises(UserError, match="has no argument 'surprise'"):
        parse(["methods", "tome", "surprise"])


def test_flags_of_every_command_come_before_or_after_it() -> None:
    for words in (["--quiet", "--json", "methods"], ["methods", "--json", "--quiet"], ["--json", "methods", "--quiet"]):
        args = parse(words)
        assert args.quiet is True and args.as_json is True and args.debug is False
    parser, by_name = build_parser("methods")
    assert isinstance(parser, Parser) and by_name["methods"].has_flag("json")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("evaluate", "'eval'"),
        ("training", "'train'"),
        ("help", "'--help'"),
        ("version", "'--version'"),
        ("eval anchor:60", "--plan 'anchor:60'"),
        ("methods --quite", "'--quiet'"),
    ],
)
def test_what_was_probably_meant_is_named(words: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert f"Did you mean {meant}?" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "needed"), [("completion", "{bash,zsh,fish}"), ("leaderboard", "{show,add,page}"), ("show", "IMAGE")]
)
def test_what_is_missing_is_named(words: str, needed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    assert f"required: {needed} (see tokensieve {words} --help)" in capsys.readouterr().err
