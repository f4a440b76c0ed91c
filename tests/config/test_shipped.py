"""The training files that ship: found by name and by their path in a clone, copied without loss, and in the wheel."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tokensieve import config
from tokensieve.cli import main
from tokensieve.config import shipped
from tokensieve.errors import UserError

NAMES = list(shipped.shipped())


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_folder_of_a_clone_is_the_one_of_the_package() -> None:
    assert (ROOT / "configs").resolve() == shipped.FOLDER.resolve()
    assert "embedded_vlm" in NAMES and "RGBNT201/DeMo_SDTPS" in NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_found_by_its_name_and_its_path(name: str) -> None:
    path = shipped.shipped()[name]
    for text in (name, f"{name}{path.suffix}", f"configs/{name}{path.suffix}"):
        assert shipped.find(text) == path
    assert type(config.load(name)) is type(config.load(path))
    assert 20 < len(shipped.summary(path)) < 220


def test_a_file_on_the_disk_comes_first(here: Path) -> None:
    (here / "embedded_vlm").mkdir()
    assert shipped.find("embedded_vlm") == shipped.shipped()["embedded_vlm"]  # a folder of results is no file
    (here / "configs").mkdir()
    (here / "configs" / "embedded_vlm.yaml").write_text("task: clip\n")
    assert shipped.find("configs/embedded_vlm.yaml") == Path("configs/embedded_vlm.yaml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("embedded_vln", "Did you mean 'embedded_vlm'?"),
        ("DeMo_SDTPS", "may be MSVR310/DeMo_SDTPS, RGBNT100/DeMo_SDTPS or RGBNT201/DeMo_SDTPS"),
        ("elsewhere/embedded_vlm.yaml", "no file 'elsewhere/embedded_vlm.yaml'"),
        ("../configs/embedded_vlm.yaml", "no file '../configs/embedded_vlm.yaml'"),
        ("configs/../../pyproject", "no file"),
        ("", "no file"),
    ],
)
def test_what_is_no_file_is_told(text: str, says: str) -> None:
    with pytest.raises(UserError) as told:
        shipped.find(text or "nothing")
    assert says in str(told.value)


def test_a_copy_is_the_file_and_replaces_none(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine").mkdir()
    for words, path in ((["embedded_vlm"], "embedded_vlm.yaml"), (["RGBNT201/DeMo_SDTPS", "mine"], "mine/DeMo_SDTPS.yml")):
        assert main(["configs", "copy", *words]) == 0
        assert capsys.readouterr().out.strip() == path
        assert (here / path).read_bytes() == shipped.get(words[0]).read_bytes()
        (here / path).write_text("changed")
        assert main(["configs", "copy", *words]) == 2
        assert "is there already and stays as it is" in capsys.readouterr().err and (here / path).read_text() == "changed"
    (here / "link.yaml").symlink_to("nowhere.yaml")
    assert main(["configs", "copy", "embedded_vlm", "link.yaml"]) == 2
    assert sorted(path.name for path in here.iterdir()) == ["embedded_vlm.yaml", "link.yaml", "mine"]


def test_configs_lists_and_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    listed = capsys.readouterr().out
    assert all(f"{name}\n" in listed for name in NAMES) and max(map(len, listed.splitlines())) <= 80
    assert main(["configs", "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)] == NAMES
    assert main(["configs", "show", "embedded_clip"]) == 0
    assert capsys.readouterr().out == shipped.get("embedded_clip").read_text()
    for words, says in (
        (["show"], "which file?"),
        (["list", "embedded_clip"], "takes no name"),
        (["show", "a", "b"], "copy a b"),
    ):
        assert main(["configs", *words]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(here: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "src", "pyproject.toml", "README.md", "LICENSE"], cwd=ROOT, capture_output=True
    )
    names = [name for name in listed.stdout.decode().split("\0") if name]
    if listed.returncode or not names:
        pytest.skip("this is no clone of the repository")
    copy = here / "copy"  # a build leaves files in its folder, and takes old ones that it finds there
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(here), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No module named" in done.stderr:
        pytest.skip("the environment has no setuptools to build with")
    assert done.returncode == 0, done.stderr
    (wheel,) = here.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    missing = {name.removeprefix("src/") for name in names if name.startswith("src/tokensieve/")} - inside
    assert not missing, sorted(missing)
