"""Plug-ins on the command line: what a user's file or package adds is listed, validated, run and reported like our own."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import toy_plugin
from tests.support.paths import ROOT
from tests.support.processes import alone
from tokensieve.cli import main
from tokensieve.cli.parser import parse
from tokensieve.errors import UserError

Run = Callable[..., SimpleNamespace]
FILE = "toy_tokens.py"


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_clip: SimpleNamespace
) -> Iterator[Run]:
    """run(*words) -> .code .out .err: a command with the toy plug-in, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path(FILE).write_text(toy_plugin.SOURCE)

    def go(*words: object, plugin: str = FILE) -> SimpleNamespace:
        try:
            code = main([*map(str, words), "--plugin", plugin])
        except SystemExit as end:
            code = end.code
        printed = capsys.readouterr()
        return SimpleNamespace(code=code, out=printed.out, err=printed.err)

    with toy_plugin.loaded_plugins_are_forgotten():
        yield go


@pytest.fixture
def evaluate(run: Run, tiny_clip: SimpleNamespace, shards: Path) -> Run:
    """run("eval", ...) with the tiny model on the colour shards."""
    data = ["--dataset", "wds/colours", "--dataset_root", shards, "--model", tiny_clip.name, "--pretrained", tiny_clip.weights]
    few = ["--num_workers", "0", "--batch_size", "8", "--quiet"]

    def go(*flags: object) -> SimpleNamespace:
        given = [flag for flag in flags if str(flag).startswith("--")]
        defaults = [(data[place], data[place + 1]) for place in range(0, len(data), 2)]
        return run("eval", *flags, *(word for pair in defaults if pair[0] not in given for word in pair), *few)

    return go


def test_what_a_plugin_adds_is_listed(run: Run) -> None:
    listed = run("--help")
    assert listed.code == 0 and "greet" in listed.out and "print a greeting" in listed.out
    flags = run("eval", "--help").out
    assert "--toy_threshold" in flags and "toy_task" in flags
    assert "toy_first" in run("methods").out


def test_a_command_of_a_plugin_runs(run: Run) -> None:
    assert run("greet").out == "hello world\n"
    assert run("greet", "--name", "tokens").out == "hello tokens\n"
    wrong = run("greet", "--nmae", "x")
    assert wrong.code == 2 and "Did you mean '--name'" in wrong.err


def test_a_task_and_a_method_of_a_plugin_run_and_are_reported(evaluate: Run, run: Run) -> None:
    flags = ["--task", "toy_task", "--toy_threshold", "0.25", "--plan", "toy_first@2:6", "--compare", "none"]
    done = evaluate(*flags, "--output", "out/{plan}.json")
    assert done.code == 0, done.err
    rows = {row["reduction"]["plan"]: row for row in (json.loads(path.read_text()) for path in Path("out").glob("*.json"))}
    row = rows["toy_first@2:6"]
    assert row["task"] == "toy_task" and row["metrics"]["toy_count"] == 30 and 0 <= row["metrics"]["toy_share"] <= 1
    assert row["reduction"]["tokens_out"] == 6 and row["run"]["toy_threshold"] == 0.25
    assert list(row["run"]["plugins"]) == [FILE] and row["run"]["arguments"]["plugin"] == [FILE]
    assert run("build", "out").code == 0
    table = list(csv.DictReader(Path("benchmark.csv").read_text().splitlines()))
    names = list(table[0])
    assert names.index("model_fullname") < names.index("toy_share") < names.index("toy_count") < names.index("plan")
    assert run("report", "out", "--images", "0").code == 0
    page = Path("report.html").read_text()
    assert "toy_share, %" in page and "toy_count, %" not in page
    assert f"--plugin {FILE}" in page and "--toy_threshold 0.25" in page and "toy_first@2:6" in page


def test_a_data_set_of_a_plugin_runs_and_decides_its_task(evaluate: Run) -> None:
    assert evaluate("--dataset", "toy_images", "--plan", "toy_first@2:6", "--output", "own.json").code == 0
    row = json.loads(Path("own.json").read_text())
    assert (row["dataset"], row["task"], row["metrics"]["toy_count"]) == ("toy_images", "toy_task", 10)
    flags = ["--dataset", "toy_images", "--task", "zeroshot_classification", "--dump_classnames", "--output", "labels.json"]
    assert evaluate(*flags).code == 0
    row = json.loads(Path("labels.json").read_text())
    assert row["classnames"] == ["red", "blue"] and row["metrics"]["acc1"] in [n / 10 for n in range(11)]


def test_results_of_other_thresholds_are_other_sections(evaluate: Run, run: Run) -> None:
    for threshold in ("0.25", "0.75"):
        assert evaluate("--task", "toy_task", "--toy_threshold", threshold, "--output", f"out/{threshold}.json").code == 0
    assert run("report", "out", "--images", "0").code == 0
    page = Path("report.html").read_text()
    assert "toy_threshold 0.25</h2>" in page and "toy_threshold 0.75</h2>" in page


def test_a_declared_flag_is_part_of_the_result_and_of_its_key(evaluate: Run) -> None:
    flags = ["--task", "toy_task", "--skip_existing", "--output", "one.json"]
    assert "skipped" not in evaluate(*flags).err and "skipped" in evaluate(*flags).err
    first = json.loads(Path("one.json").read_text())["run"]
    assert "skipped" not in evaluate(*flags, "--toy_threshold", "0.25").err
    (other,) = Path().glob("one_*.json")
    second = json.loads(other.read_text())["run"]
    assert (first["toy_threshold"], second["toy_threshold"]) == (0.5, 0.25) and first["key"] != second["key"]


def test_a_task_that_needs_class_names_gets_them(evaluate: Run) -> None:
    Path("names.json").write_text(json.dumps({"toy_images": ["warm", "cold"]}))
    flags = ["--dataset", "toy_images", "--custom_classname_file", "names.json", "--dump_classnames", "--output", "one.json"]
    Path(FILE).write_text(toy_plugin.SOURCE.replace('contents="labels",', 'contents="labels", needs_class_names=True,'))
    assert evaluate(*flags).code == 0
    assert json.loads(Path("one.json").read_text())["classnames"] == ["warm", "cold"]


def test_the_source_of_a_plugin_is_part_of_the_key(evaluate: Run) -> None:
    flags = ["--plan", "toy_first@2:6", "--skip_existing", "--output", "one.json"]
    assert "skipped" not in evaluate(*flags).err and "skipped" in evaluate(*flags).err
    key = json.loads(Path("one.json").read_text())["run"]["key"]
    with toy_plugin.loaded_plugins_are_forgotten():
        toy_plugin.plugins._loaded.pop(str(Path(FILE).resolve()))
        sys.modules.pop("tokensieve_plugin_toy_tokens")
        Path(FILE).write_text(f"{toy_plugin.SOURCE}\n# another version\n")
        assert "skipped" not in evaluate(*flags).err
    (other,) = Path().glob("one_*.json")
    assert json.loads(other.read_text())["run"]["key"] != key


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--task", "toy_taks"], "Did you mean 'toy_task'"),
        (["--task", "toy_task", "--toy_threshold", "2"], "--toy_threshold: 2 is not from 0 to 1"),
        (["--task", "toy_task", "--toy_treshold", "0.5"], "Did you mean '--toy_threshold'"),
        (["--task", "toy_task", "--dataset", "embedded-captions"], "has captions, but the task toy_task needs labels"),
        (["--task", "toy_task", "--dataset", "embedded-questions"], "has questions, but the task toy_task needs labels"),
        (["--dataset", "toy_imagse"], "Did you mean 'toy_images'"),
        (["--dataset", "toy_images", "--task", "captioning"], "toy_images has labels, but the task captioning needs captions"),
        (["--plan", "toy_frist:6"], "Did you mean 'toy_first"),
    ],
)
def test_mistakes_about_what_a_plugin_adds_are_explained(evaluate: Run, flags: list[str], expected: str) -> None:
    done = evaluate(*flags)
    assert done.code == 2 and expected in done.err and done.err.startswith("tokensieve: error: ")
    assert "Traceback" not in done.err and not list(Path().glob("*.json"))


def test_a_flag_of_a_plugin_without_its_task_is_mentioned(evaluate: Run) -> None:
    done = evaluate("--toy_threshold", "0.25")
    assert done.code == 0 and "--toy_threshold has no effect on zeroshot_classification" in done.err


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("def broken(:\n  pass", "SyntaxError"),
        ("raise RuntimeError('first line\\nsecond line')", "RuntimeError: first line second line"),
        (toy_plugin.TASK.replace('"toy_task",', '"vqa",').replace("import Task\n", "import Task\nimport torch\n"), "'vqa'"),
    ],
)
def test_a_broken_plugin_is_one_line(run: Run, source: str, expected: str) -> None:
    Path("broken.py").write_text(source)
    done = run("methods", plugin="broken.py")
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1
    assert done.err.startswith("tokensieve: error: the plug-in broken.py cannot be loaded") and expected in done.err


def test_plugins_that_are_missing(run: Run) -> None:
    done = run("methods", plugin="absent.py")
    assert done.code == 2 and "absent.py" in done.err and done.err.count("\n") == 1
    with pytest.raises(UserError, match="--plugin needs the path"):
        parse(["methods", "--plugin"])
    with pytest.raises(UserError, match="--plugin needs the path"):
        parse(["methods", "--plugin", "--debug"])


def test_a_plugin_may_stand_anywhere_and_several_times(run: Run) -> None:
    Path("other.py").write_text(toy_plugin.COMMAND.replace('"greet"', '"salute"').replace("hello", "salute"))
    assert main(["--plugin", FILE, "salute", "--plugin=other.py"]) == 0
    assert parse(["--plugin", FILE, "greet", "--plugin=other.py"]).plugin == [FILE, "other.py"]
    assert parse(["greet"]).plugin is None


FLAGS = [
    ('Flag("recall_k", "x")', "declares --recall_k, which is another flag of the task zeroshot_retrieval"),
    ('Flag("limit", "x")', "declares --limit, which is a flag of all tasks"),
    ('Flag("toy", "x", aliases=("limit",))', "declares --limit, which is a flag of all tasks"),
    ('Flag("toy", "x", aliases=("recall_k",))', "declares --recall_k, which is another flag of the task zeroshot_retrieval"),
    ('Flag("test_split", "x")', "declares --test_split, which is a flag of all tasks"),
    ('Flag("debug", "x")', "declares --debug, which is a flag of all tasks"),
    ('Flag("help", "x")', "declares --help, which is a flag of all tasks"),
    ('Flag("plugin", "x")', "declares --plugin, which is a flag of all tasks"),
    ('Flag("command", "x")', "declares --command, which is a flag of all tasks"),
    ('Flag("toy", "x", options={"dest": "limit"})', "declares --toy with dest='limit'"),
    ('Flag("toy", "x"), Flag("toy", "y")', "declares --toy, which is another flag of the task toy_task"),
    ('Flag("toy", "x", options={"nothing": 1})', "declares --toy, which cannot be added: "),
    ('Flag("toy", "x", options={"required": True})', "cannot be added: the following arguments are required: --toy"),
    ('Flag("toy", "x", "one", {"type": int})', "cannot be added: argument --toy: invalid int value: 'one'"),
]


def task_with(flags: str) -> str:
    before, _, after = toy_plugin.TASK.partition("        flags=(")
    return f"import torch\n{before}        flags=({flags},), order=1,\n    ),\n{after[after.index('    origin=') :]}"


@pytest.mark.parametrize(("flags", "expected"), FLAGS)
def test_a_flag_that_cannot_be_added_is_an_error(run: Run, flags: str, expected: str) -> None:
    Path("taken.py").write_text(task_with(flags))
    done = run("eval", plugin="taken.py")
    assert done.code == 2 and expected in done.err and done.err.count("\n") == 1
    assert f"the task toy_task of the plug-in {Path('taken.py').resolve()} " in done.err
    assert run("methods", plugin="taken.py").code == 0


@pytest.fixture
def install(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """install(source): a package with this source has an entry point."""
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.delitem(sys.modules, "toy_package", raising=False)

    def install(source: str) -> None:
        Path("toy_package.py").write_text(source)
        entry = EntryPoint("toy", "toy_package", toy_plugin.plugins.GROUP)
        monkeypatch.setattr(toy_plugin.plugins, "entry_points", lambda group: [entry])
        monkeypatch.setattr(toy_plugin.plugins, "_is_started", False)
        monkeypatch.setattr(toy_plugin.plugins, "_is_done", False)

    yield install
    sys.modules.pop("toy_package", None)


@pytest.mark.parametrize(("flags", "expected"), FLAGS)
def test_a_flag_of_a_package_that_cannot_be_added_stops_nothing(
    install: Callable[[str], None], capsys: pytest.CaptureFixture[str], flags: str, expected: str
) -> None:
    install(task_with(flags))
    assert main(["methods"]) == 0 and capsys.readouterr().err == ""
    assert parse(["eval", "--limit", "3", "--recall_k", "1"]).limit == 3
    err = capsys.readouterr().err
    assert err.startswith("tokensieve: the task toy_task of the plug-in toy (toy_package) declares --") and expected in err
    assert err.endswith("; the task is left out\n") and err.count("\n") == 1
    with pytest.raises(UserError, match="'toy_task' is not one of"):
        parse(["eval", "--task", "toy_task"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('parser.add_argument("--help")', "ArgumentError: argument --help: conflicting option string: --help"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_command_of_a_package_with_wrong_flags_stops_no_other(
    install: Callable[[str], None], capsys: pytest.CaptureFixture[str], body: str, expected: str
) -> None:
    install(toy_plugin.COMMAND.replace('parser.add_argument("--name", default="world")', body))
    assert main(["methods"]) == main([]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and "print a greeting" in printed.out
    assert main(["greet"]) == 2
    message = f"the flags of the command greet of the plug-in toy (toy_package) are wrong: {expected}"
    assert capsys.readouterr().err == f"tokensieve: error: {message}\n"


@pytest.mark.parametrize(
    ("build", "expected"),
    [("nowhere:build", "cannot be imported: No module named 'nowhere'"), ("{__name__}:biuld", "has no 'biuld'")],
)
def test_a_declaration_of_what_is_not_there_is_named(evaluate: Run, build: str, expected: str) -> None:
    Path(FILE).write_text(toy_plugin.SOURCE.replace("{__name__}:build_toy_images", build))
    done = evaluate("--dataset", "toy_images")
    assert done.code == 2 and done.err.startswith("tokensieve: error: ") and done.err.count("\n") == 1
    assert f"of the data set 'toy_images' (the plug-in {Path(FILE).resolve()})" in done.err and expected in done.err


def test_help_texts_are_printed_as_they_are(run: Run) -> None:
    """argparse would expand %(default)s, and fail or leave out words at another %."""
    task = toy_plugin.TASK.replace("of the toy task (default: 0.5)", "5% or 100%d of %(default)s")
    command = toy_plugin.COMMAND.replace("print a greeting", "a 100% greeting")
    Path("percent.py").write_text("import torch\n" + task + command)
    assert "5% or 100%d of %(default)s" in run("eval", "--help", plugin="percent.py").out
    assert "a 100% greeting" in run("--help", plugin="percent.py").out
    assert "with vlm anchor@out:50%;" in " ".join(run("bench", "--help", plugin="percent.py").out.split())


SPAWNED = """
import multiprocessing
import open_clip
from tokensieve.cli import main
from tokensieve.plugins import load_plugin
from tokensieve.training.loader import read_ahead

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    open_clip.add_model_config({config!r})
    print([main(words) for words in {commands!r}])
    print([label for _, label in read_ahead(load_plugin({file!r}).ToyImages(str), 1)])
"""


@pytest.mark.slow
def test_spawned_workers_read_the_data_of_plugins(tmp_path: Path, tiny_clip: SimpleNamespace) -> None:
    """As on macOS and Windows, where the workers of a loader start without what the parent has loaded."""
    (tmp_path / FILE).write_text(toy_plugin.SOURCE)
    tiny = ["--model", tiny_clip.name, "--pretrained", tiny_clip.weights, "--num_workers", "1", "--batch_size", "4", "--quiet"]
    commands = [["eval", "--plugin", FILE, "--dataset", "toy_images", "--task", "toy_task", *tiny, "--output", "own.json"]]
    config = str(Path(tiny_clip.weights).parent / "tiny-clip.json")
    (tmp_path / "run.py").write_text(SPAWNED.format(config=config, commands=commands, file=FILE))
    done = alone(["run.py"], tmp_path)
    assert done.stdout.splitlines() == ["[0]", str([0, 1] * 5)], done.stderr
    assert json.loads((tmp_path / "own.json").read_text())["metrics"]["toy_count"] == 10


@pytest.mark.slow
def test_plugins_of_installed_packages_are_found(tmp_path: Path, tiny_clip: SimpleNamespace, shards: Path) -> None:
    """A package and its metadata in a folder on the path, as an installer leaves them."""
    site = tmp_path / "site"
    (site / "toy_package").mkdir(parents=True)
    (site / "toy_package" / "__init__.py").write_text(toy_plugin.SOURCE)
    for name, module in (("toy", "toy_package"), ("bad", "bad_package")):
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[tokensieve.plugins]\n{name} = {module}\n")
    (site / "bad_package.py").write_text("raise RuntimeError('no\\nluck')")
    path = os.pathsep.join([str(site), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    config = Path(tiny_clip.weights).parent / "tiny-clip.json"
    flags = ["--model", tiny_clip.name, "--pretrained", tiny_clip.weights, "--dataset", "wds/c", "--dataset_root", str(shards)]
    evaluation = [
        "eval",
        *flags,
        "--task",
        "toy_task",
        "--plan",
        "toy_first:6",
        "--num_workers",
        "0",
        "--quiet",
        "--output",
        "r.json",
    ]
    code = (
        "import open_clip\nfrom tokensieve.cli import main\n"
        f"open_clip.add_model_config({str(config)!r})\n"
        f"codes = [main(['greet', '--name', 'entry points']), main(['methods']), main({evaluation})]\nprint(codes)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "hello entry points" and lines[-1] == "[0, 0, 0]" and "toy_first" in done.stdout, done.stderr
    messages = [line for line in done.stderr.splitlines() if "bad" in line]
    assert messages == ["tokensieve: the plug-in bad (bad_package) cannot be loaded: RuntimeError: no luck"]
    assert list(json.loads((tmp_path / "r.json").read_text())["run"]["plugins"]) == ["toy"]
