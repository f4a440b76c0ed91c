"""Fixtures of evaluations: the command on the tiny model, and the embedded model with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import open_clip
import pytest

from tests.support.evaluation import Run
from tokensieve import embedded
from tokensieve.cli import main


@pytest.fixture
def run(
    tiny_clip: SimpleNamespace,
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> Run:
    """run(*flags) -> .code .out .err, .results that it wrote (by file name) and all .files; the tiny model on the colour shards
    unless flags say else."""
    monkeypatch.chdir(tmp_path)

    def go(*flags: object, quiet: bool = True, expect: int = 0) -> SimpleNamespace:
        given = [str(flag) for flag in flags]
        defaults = {
            "--model": tiny_clip.name,
            "--pretrained": tiny_clip.weights,
            "--dataset": "wds/colours",
            "--dataset_root": str(shards),
            "--num_workers": "0",
            "--batch_size": "8",
        }
        if "--pretrained_model" in given:
            defaults.pop("--model")
            defaults.pop("--pretrained")
        rest = [word for flag, value in defaults.items() if flag not in given for word in (flag, value)]
        before = set(tmp_path.rglob("*.json"))
        code = main(["eval", *given, *rest, *(["--quiet"] if quiet else [])])
        said = capsys.readouterr()
        assert code == expect, said.err
        files = {str(p.relative_to(tmp_path)): p for p in sorted(tmp_path.rglob("*.json*"))}
        read = {
            name: json.loads(path.read_text())
            for name, path in files.items()
            if path.name.startswith("colours") and path.suffix == ".json" and path not in before
        }
        return SimpleNamespace(code=code, out=said.out, err=said.err, files=list(files), results=read)

    return go


@pytest.fixture
def untrained(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded model with random weights, so that nothing here depends on how far its training is."""
    from safetensors.torch import save_model

    embedded.register()
    path = tmp_path_factory.mktemp("weights") / "w.safetensors"
    save_model(open_clip.create_model(embedded.MODEL), str(path))
    monkeypatch.setattr(embedded, "weights_path", lambda tag: path)
