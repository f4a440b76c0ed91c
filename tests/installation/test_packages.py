"""What is installed: versions without imports, the extras of pyproject.toml, and one line for what is missing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tokensieve.errors import UserError
from tokensieve.installation import packages
from tokensieve.installation.packages import EXTRAS, Package, extra_of, missing_package, naming_extras

tomllib = pytest.importorskip("tomllib")  # Python 3.11
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~ ]", one, maxsplit=1)[0] for one in requirements}


def test_extras_are_those_of_the_project() -> None:
    for extra in EXTRAS:
        assert set(extra.packages.values()) == names(PROJECT["optional-dependencies"][extra.name]), extra.name
    assert not names(PROJECT["dependencies"]) & {name for extra in EXTRAS for name in extra.packages.values()}


def test_the_extra_that_is_named_is_the_one_that_fits_best() -> None:
    found = {package: extra_of(package).name for extra in EXTRAS for package in extra.packages}  # type: ignore[union-attr]
    assert found["matplotlib"] == "plots" and found["transformers"] == "vlm" and found["open_clip"] == "clip"
    assert found["optuna"] == "search" and found["timm"] == "timm" and extra_of("nothing_of_ours") is None


def test_only_missing_packages_of_extras_are_translated() -> None:
    told = missing_package(ModuleNotFoundError("No module named 'optuna.trial'", name="optuna.trial"))
    assert str(told).endswith('tokensieve search and tune: pip install "tokensieve[search]"') and "\n" not in str(told)
    assert missing_package(ImportError("cannot import name 'x' from 'optuna'", name="optuna")) is None
    assert missing_package(ModuleNotFoundError("No module named 'numpy'", name="numpy")) is None
    with pytest.raises(ModuleNotFoundError), naming_extras():
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")
    with pytest.raises(UserError, match="wandb is not installed"), naming_extras():
        raise ModuleNotFoundError("No module named 'wandb'", name="wandb")


def test_versions_against_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "numpy>=1.26",
        "rich",
        'optuna>=99; extra == "search"',
        'ruff; extra == "dev"',
        'tokensieve[search]; extra == "all"',
    ]
    installed = {"numpy": "2.0.0", "rich": None, "optuna": "5.0"}
    monkeypatch.setattr(packages.metadata, "requires", lambda name: lines)
    monkeypatch.setattr(packages, "version", installed.get)
    numpy, rich, optuna = packages.packages()
    assert (numpy, rich) == (Package("numpy", ">=1.26", "2.0.0", ()), Package("rich", "", None, ()))
    assert numpy.is_good and not rich.is_good and optuna.extras == ("search",) and not optuna.is_good


def test_versions_import_no_library() -> None:
    code = (
        "import sys\nfrom tokensieve.installation.packages import main_versions\nprint(sorted(main_versions()))\n"
        "print([name for name in ('torch', 'transformers', 'open_clip', 'timm') if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == ["['Python', 'open_clip', 'timm', 'tokensieve', 'torch', 'transformers']", "[]"]


# ------------------------------------------------------------------------------------------------------ missing packages

BLOCKED = """
import json, sys
for name in {packages}:
    sys.modules[name] = None
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from tokensieve.cli import main
said = []
for words in {commands}:
    with redirect_stderr(StringIO()) as err, redirect_stdout(StringIO()) as out:
        code = main(words)
    said.append([code, err.getvalue(), out.getvalue()])
print(json.dumps(said))
"""

SMALL = ["--limit", "8", "--batch_size", "8", "--num_workers", "0", "--quiet", "--output", "out.json"]
TRAIN = ["train", "learned_selector", "--output", "run", "--quiet"]
TUNE = ["tune", "--limit", "8", "--budget_minutes", "0.01"]


def run_without(blocked: list[str], commands: list[list[str]], folder: Path) -> list[tuple[int, str, str]]:
    code = BLOCKED.format(packages=blocked, commands=commands)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return [tuple(one) for one in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.parametrize(
    ("blocked", "extra", "commands"),
    [
        (["open_clip"], "clip", [["eval", *SMALL], ["bench", "--model", "ViT-B-32"], ["show", "embedded:3"]]),
        (["clip_benchmark"], "clip", [["eval", "--dataset", "cifar10", "--model", "sieve-vit-8", *SMALL]]),
        (["transformers"], "vlm", [["eval", "--task", "vqa", *SMALL], ["bench", "--model_type", "vlm"]]),
        (["timm"], "timm", [["eval", "--model_type", "timm", "--model", "test_vit", "--task", "linear_probe", *SMALL]]),
        (["accelerate"], "train", [["train", "embedded_vlm", "--output", "run", "--quiet"]]),
        (["tensorboard"], "train", [TRAIN]),
        (
            ["wandb"],
            "wandb",
            [[*TRAIN, "--wandb", "project"], ["search", "embedded_vlm", "--output", "s", "--wandb", "project"]],
        ),
        (["optuna"], "search", [TUNE, ["search", "embedded_vlm", "--output", "s"]]),
        (["matplotlib"], "plots", [["show", "embedded:3"]]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and isinstance(value[0], str) else "",
)
@pytest.mark.slow
def test_a_missing_package_is_one_line_with_its_extra(
    blocked: list[str], extra: str, commands: list[list[str]], tmp_path: Path
) -> None:
    for words, (code, err, out) in zip(commands, run_without(blocked, commands, tmp_path), strict=True):
        last = err.strip().splitlines()[-1]
        assert code == 2 and last.startswith("tokensieve: error: ") and not out, (words, err)
        assert f'pip install "tokensieve[{extra}]"' in last and "Traceback" not in err, (words, err)


@pytest.mark.slow
def test_the_base_alone_prints_checks_and_explains(tmp_path: Path) -> None:
    """What needs no model works without any extra, doctor included."""
    blocked = sorted({name for extra in EXTRAS for name in extra.packages} | {"huggingface_hub", "tokenizers"})
    commands = [
        ["methods"],
        ["methods", "visionzip", "--json"],
        ["configs", "copy", "embedded_clip"],
        ["validate", "embedded_clip", "embedded_reid", "--quiet"],
        ["completion", "bash"],
        ["doctor", "--json"],
    ]
    said = run_without(blocked, commands, tmp_path)
    assert [code for code, _, _ in said] == [0] * len(commands), said
    state = {finding["name"]: finding["state"] for finding in json.loads(said[-1][2])["findings"]}
    assert state["torch" if "torch" in state else "CPU"] == "ok" and state["cover@4:60"] == "absent"
    assert (tmp_path / "embedded_clip.yaml").exists()
