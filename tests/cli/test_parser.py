"""The command line: quick help, exact flags, and mistakes answered in one line with the nearest word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import tokensieve
from tokensieve import cli
from tokensieve.cli import main
from tokensieve.cli.parser import parse
from tokensieve.cli.registry import all_commands
from tokensieve.config.search import Manager
from tokensieve.errors import UserError


def refused(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        parse(argv)
    return str(caught.value)


HEAVY = ("torch", "open_clip", "transformers", "timm", "clip_benchmark", "matplotlib", "PIL", "numpy", "rich")


@pytest.mark.parametrize("argv", [["--help"], ["eval", "--help"], ["show", "--help"], ["methods", "--nothing"]])
def test_parsing_and_help_import_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys\nfrom tokensieve.cli.parser import parse\nfrom tokensieve.errors import UserError\n"
        f"try:\n    parse({argv})\nexcept (SystemExit, UserError):\n    pass\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--enable_pruning" in done.stdout or argv[0] != "eval"


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "tokensieve", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[0] == f"tokensieve {tokensieve.__version__}"
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == [
        "Python",
        "torch",
        "transformers",
        "open_clip",
        "timm",
    ]
    done = subprocess.run([sys.executable, "-m", "tokensieve", "evla"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Did you mean 'eval'" in done.stderr


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0
    assert "COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize("command", list(all_commands()))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0 and command in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["buidl", "x"], "Did you mean 'build'"),
        (["eval", "--enable_prunning"], "Did you mean '--enable_pruning'"),
        (["eval", "--batch_sise=4"], "Did you mean '--batch_size'"),
        (["eval", "--batch", "4"], "'--batch'"),  # no abbreviations: a new flag must not change what one means
        (["eval", "surprise"], "'surprise'"),
        (["--enable_pruning"], "'--enable_pruning'"),
        (["eval", "--task", "zeroshot_clasification"], "Did you mean 'zeroshot_classification'"),
        (["eval", "--model_type", "open_clap"], "Did you mean 'open_clip'"),
        (["eval", "--batch_size", "0"], "at least 1"),
        (["eval", "--batch_size", "many"], "not a whole number"),
        (["eval", "--num_workers", "-1"], "at least 0"),
        (["eval", "--limit", "0"], "at least 1"),
        (["eval", "--normalize", "maybe"], "neither True nor False"),
        (["eval", "--max_broken", "2"], "from 0 to 1"),
        (["eval", "--max_broken", "half"], "not a number"),
        (["eval", "--dataset"], "expected at least one argument"),
        (["eval", "--val_split", "a", "--val_proportion", "0.1"], "not allowed with"),
        (["build"], "files"),
    ],
)
def test_mistakes(argv: list[str], says: str) -> None:
    message = refused(*argv)
    assert says in message and "\n" not in message


def test_lists_and_values_of_eval() -> None:
    line = (
        "eval --dataset a b --model m1 m2 --pretrained p1 p2 --language en de --plan anchor@6(k=10,m=50) "
        "--compare random:60 tome@*:-8 --recall_k 1 5 10 --load_clfs x y --normalize False --num_workers 0 --quiet"
    )
    args = parse(line.split())
    assert (args.dataset, args.model, args.pretrained, args.language) == (["a", "b"], ["m1", "m2"], ["p1", "p2"], ["en", "de"])
    assert (args.plan, args.compare) == ("anchor@6(k=10,m=50)", ["random:60", "tome@*:-8"])
    assert (args.recall_k, args.load_clfs, args.num_workers) == ([1, 5, 10], ["x", "y"], 0)
    assert args.normalize is False and args.quiet is True


@pytest.mark.parametrize(("word", "means"), [("True", True), ("1", True), ("False", False), ("false", False), ("0", False)])
def test_normalize_means_what_it_says(word: str, means: bool) -> None:
    assert parse(["eval", "--normalize", word]).normalize is means


def test_amp_is_undecided_until_the_device_is_known() -> None:
    assert [parse(["eval", *flags]).amp for flags in ([], ["--amp"], ["--no_amp"])] == [None, True, False]


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture) -> None:
    for argv in (["build", "nowhere.json", "--debug"], ["--debug", "build", "nowhere.json"]):
        assert main(argv) == 2
        said = capsys.readouterr().err
        assert "Traceback" in said and said.splitlines()[-1].startswith("tokensieve: error: cannot read nowhere.json")
    assert main(["build", "nowhere.json"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "dispatch", interrupted)
    assert main(["methods"]) == 130


def test_methods_lists_every_method(capsys: pytest.CaptureFixture) -> None:
    assert main(["methods"]) == 0
    said = capsys.readouterr().out
    for method in tokensieve.list_methods():
        assert f"{method.name:<13} {method.summary}\n" in said
    assert "alpha=0.5" in said and "attention" in said


def test_every_method_has_a_page_with_a_plan_to_copy(capsys: pytest.CaptureFixture) -> None:
    for method in tokensieve.list_methods():
        assert main(["methods", method.name]) == 0
        said = capsys.readouterr().out
        assert said.startswith(f"{method.name}: {method.summary}\n") and all(name in said for name in method.options)
        plan = said.split("Plan with its own place and budget:")[1].split()[0]
        if method.part is None and not method.on_image:
            assert str(tokensieve.Plan.parse(plan)) == plan
    assert main(["methods", "tomee"]) == 2
    assert "tome" in capsys.readouterr().err


def test_a_closed_pipe_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "tokensieve", "methods"], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_bench_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokensieve.measuring import vision

    got: dict = {}
    monkeypatch.setattr(vision, "run", lambda *values, **named: got.update(values=values, **named))
    flags = (
        "--model M --pretrained P --plan a b --batch_size 1 4 --repeats 3 --device cpu --output o.json --image_size 64 --quiet"
    )
    assert main(["bench", *flags.split()]) == 0
    assert got["values"] == ("M", "P", ["a", "b"], [1, 4], 3, "cpu", "o.json", True)
    assert got["image_size"] == 64 and got["threads"] is None and got["crossing"] is False
    assert main(["bench", "--threads", "2", "--break_even"]) == 0
    assert got["values"][4] == 10 and got["threads"] == 2 and got["crossing"] is True


def test_bench_suite_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokensieve.measuring import suite

    got: list = []
    monkeypatch.setattr(suite, "run", lambda *values: got.append(values))
    assert main(["bench", "--suite"]) == 0
    flags = "--quick --model M --batch_size 4 --repeats 3 --device cpu --threads 2 --quiet"
    assert main(["bench", "--suite", *flags.split()]) == 0
    assert got == [
        (None, None, None, False, None, "results/bench_suite.json", False, None),
        ("M", [4], 3, True, "cpu", "results/bench_suite.json", True, 2),
    ]


def test_bench_runs(tiny_clip: SimpleNamespace, tmp_path: Path) -> None:
    flags = ["--plan", "random:6", "--batch_size", "2", "--repeats", "2", "--output", str(tmp_path / "bench.json"), "--quiet"]
    assert main(["bench", "--model", tiny_clip.name, *flags]) == 0
    assert json.loads((tmp_path / "bench.json").read_text())["rows"][0]["plan"] == "random:6"


def test_bench_against_an_earlier_one(tiny_clip: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    earlier = tmp_path / "earlier.json"
    rows = [{"model": tiny_clip.name, "plan": plan, "batch_size": 2, "speedup": 1e6} for plan in ("random:6", "grid:6")]
    earlier.write_text(json.dumps({"rows": rows}))
    flags = ["--plan", "random:6", "--batch_size", "2", "--repeats", "2", "--quiet", "--against", str(earlier)]
    assert main(["bench", "--model", tiny_clip.name, *flags]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("slower: tiny-clip, random:6, batch 2: 1000000.00x, now ")
    assert said[1:] == [
        "missing: tiny-clip, grid:6, batch 2",
        f"against {earlier}: 1 slower, 0 faster, 0 rows the same, 1 rows missing, 0 new",
    ]


@pytest.mark.parametrize("searches", [False, True])
def test_train_trains_or_searches_as_the_file_says(monkeypatch: pytest.MonkeyPatch, searches: bool) -> None:
    from tokensieve import config, search, training

    got: dict = {}
    monkeypatch.setattr(config, "load", lambda path, overrides: SimpleNamespace(searches=searches, manager_settings=Manager()))
    monkeypatch.setattr(training, "run", lambda *values, **named: got.update(training=values, **named) or Path("out"))
    monkeypatch.setattr(search, "run", lambda *values, **named: got.update(search=values, **named))
    monkeypatch.setattr(search, "summary", lambda folder: {})
    assert main(["train", "c.yaml", "--resume", "--output", "out", "--wandb", "project", "--quiet"]) == 0
    expected = {"search": ("c.yaml",)} if searches else {"training": ("c.yaml",), "resume": True}
    assert got == {**expected, "quiet": True, "output": "out", "overrides": {}, "wandb": "project"}


@pytest.mark.parametrize("module", ["train", "train_net"])
def test_a_module_is_the_command_train(tmp_path: Path, module: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("task: clip\noutput: o\nphases: []\n")
    done = subprocess.run([sys.executable, "-m", f"tokensieve.{module}", str(path)], capture_output=True, text=True)
    assert done.returncode == 2 and f"{path}: line 3: phases: " in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words, resume",
    [
        ("c.yaml", False),
        ("c.yaml --resume", True),
        ("--resume c.yaml", True),
        ("c.yaml --resume 200", 200),
        ("--resume 200 c.yaml", 200),
        ("--config_file c.yaml --resume", True),
    ],
)
def test_train_resumes_from_the_last_checkpoint_or_from_that_of_a_step(
    monkeypatch: pytest.MonkeyPatch, words: str, resume: bool | int
) -> None:
    from tokensieve import config, training

    got: list = []
    monkeypatch.setattr(config, "load", lambda path, overrides: SimpleNamespace(searches=False, manager_settings=Manager()))
    monkeypatch.setattr(training, "run", lambda path, resume, **_: got.append((path, resume)) or Path("out"))
    assert main(["train", *words.split()]) == 0
    assert got == [("c.yaml", resume)] and type(got[0][1]) is type(resume)


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "c.yaml", "SOLVER.SEED", "2", "MODEL.SDTPS_BETA", "0.3", "--quiet"],
        ["train", "--config_file", "c.yaml", "--quiet", "SOLVER.SEED", "2", "MODEL.SDTPS_BETA", "0.3"],
        ["train", "c.yaml", "SOLVER.SEED=2", "MODEL.SDTPS_BETA=0.3"],
        ["train", "c.yaml", "SOLVER.SEED", "2", "--quiet", "MODEL.SDTPS_BETA=0.3"],
    ],
)
def test_train_takes_values_of_keys_after_the_file(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    from tokensieve import config, training

    got: dict = {}
    monkeypatch.setattr(
        config, "load", lambda path, overrides: SimpleNamespace(searches=False, output=Path("out"), manager_settings=Manager())
    )
    monkeypatch.setattr(training, "run", lambda path, **named: got.update(path=path, **named) or Path("out"))
    assert main(argv) == 0
    assert (got["path"], got["overrides"]) == ("c.yaml", {"SOLVER.SEED": "2", "MODEL.SDTPS_BETA": "0.3"})
    assert got["output"] is None and main([*argv[:1], "--exp_name", "first", *argv[1:]]) == 0
    assert got["output"] == str(Path("out") / "first")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["train"], "which CONFIG?"),
        (["train", "c.yaml", "SOLVER.SEED"], "SOLVER.SEED has no value; after the file comes KEY=VALUE"),
        (["train", "c.yaml", "SOLVER.SEED=1", "SOLVER.SEED", "2"], "SOLVER.SEED is given twice, with 1 and with 2"),
        (["train", "c.yaml", "--output", "a", "--exp_name", "b"], "both name the folder"),
    ],
)
def test_mistakes_of_train(
    argv: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokensieve import config

    monkeypatch.setattr(
        config, "load", lambda path, overrides: SimpleNamespace(searches=False, output=Path("out"), manager_settings=Manager())
    )
    assert main(argv) == 2
    assert says in capsys.readouterr().err
