"""examples/ray_encode.py on a local Ray with two actors: the features of a plain loop, whatever dies on the way.

`make test-ray` installs Ray and runs this.
"""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tokensieve
from tests.support.paths import ROOT
from tokensieve import UserError, embedded
from tokensieve.data.images import open_image
from tokensieve.embedded.datasets import EmbeddedScenes
from tokensieve.models import loading

ray = pytest.importorskip("ray", reason="Ray is not installed; make test-ray installs it")
pq = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.slow
SCRIPT = ROOT / "examples" / "ray_encode.py"


@pytest.fixture(scope="module")
def script() -> Any:
    """The example as a module; its classes travel to the actors as they do from a script."""
    spec = importlib.util.spec_from_file_location("ray_encode", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["ray_encode"] = module
    spec.loader.exec_module(module)
    ray.cloudpickle.register_pickle_by_value(module)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return module


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (Ray reads this name; its 15 would starve the actors on a busy machine)
    ray.init(num_cpus=2, include_dashboard=False, logging_level="warning", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """28 images in two folders, and two files that only look like images."""
    folder = tmp_path_factory.mktemp("photos")
    scenes = EmbeddedScenes("val")
    for index in range(28):
        path = folder / "ab"[index % 2] / f"{index:02}.png"
        path.parent.mkdir(exist_ok=True)
        scenes[index][0].save(path)
    (folder / "a" / "broken.jpg").write_bytes(b"\xff\xd8no image")
    (folder / "b" / "cut.png").write_bytes((folder / "a" / "00.png").read_bytes()[:200])
    return folder


def plain_loop(images: dict[str, Any], plan: str, number: Any) -> dict[str, torch.Tensor]:
    """The features of images one by one."""
    loaded = loading.load(embedded.MODEL, embedded.default_weights(embedded.MODEL))
    features = {}
    with torch.no_grad(), tokensieve.apply(loaded.model, plan) as handle:
        for name, image in images.items():
            with handle.call(samples=torch.tensor([number(name)])):
                features[name] = loaded.model.encode_image(loaded.transform(image)[None])[0]
    return features


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """All rows by their ids; each id is there once."""
    rows = [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def check(rows: dict[str, dict[str, Any]], expected: dict[str, torch.Tensor], tokens: int) -> None:
    for name, feature in expected.items():
        found = torch.tensor(rows[name]["embedding"])
        assert torch.allclose(found, feature, atol=1e-5 * float(feature.abs().max())), name
        assert rows[name]["tokens"] == tokens and rows[name]["error"] is None


def test_an_actor_is_killed_on_the_way(script: Any, cluster: None, photos: Path, tmp_path: Path) -> None:
    out, mark, plan = tmp_path / "features", tmp_path / "killed", "random@2:90 + cover@4:32"

    class Mortal(script.Encoder):  # type: ignore[misc, name-defined]
        """Its actor is killed once, in the middle of a part that is not the first."""

        def _encode_batch(self, names: list[str], read: list[Any]) -> list[dict[str, Any]]:
            if list(out.glob("*.parquet")) and not mark.exists():
                mark.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGKILL)
            rows: list[dict[str, Any]] = super()._encode_batch(names, read)
            return rows

    words = [str(photos), "--plan", plan, "--output", str(out), "--part_size", "6", "--batch_size", "4", "--actors", "2"]
    assert script.run(script.parse(words), Mortal) == 0
    assert int(mark.read_text()) != os.getpid()
    names = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png") if path.name != "cut.png")
    images = {name: open_image(photos / name) for name in names}
    rows = read(out)
    assert len(rows) == 30 and len(list(out.iterdir())) == 5 + 1  # no file is left of the actor that died
    check(rows, plain_loop(images, plan, script.number), tokens=32)
    for name in ("a/broken.jpg", "b/cut.png"):
        assert rows[name]["embedding"] is None and rows[name]["error"]

    # started again: what is lost or new is encoded, and nothing else
    first, *others = sorted(out.glob("*.parquet"))
    before = {path: path.stat().st_mtime_ns for path in others}
    first.unlink()
    EmbeddedScenes("val")[40][0].save(photos / "b" / "new.png")
    try:
        assert script.run(script.parse(words)) == 0
    finally:
        (photos / "b" / "new.png").unlink()
    again = read(out)
    assert len(again) == 31 and again["b/new.png"]["tokens"] == 32
    assert {path: path.stat().st_mtime_ns for path in others} == before
    check(again, {name: torch.tensor(row["embedding"]) for name, row in rows.items() if row["embedding"]}, tokens=32)
    with pytest.raises(UserError, match=r"holds features of plan random@2:90 \+ cover@4:32"):
        script.run(script.parse([str(photos), "--plan", "none", "--output", str(out)]))


def test_a_shard_is_cut_off(script: Any, cluster: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenes, images = EmbeddedScenes("val"), {}
    for shard in range(3):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for index in range(5 * shard, 5 * shard + 5):
                content = io.BytesIO()
                scenes[index][0].save(content, "PNG")
                member = tarfile.TarInfo(f"{index:03}.png")
                member.size = content.tell()
                tar.addfile(member, io.BytesIO(content.getvalue()))
                images[f"{shard}.tar/{index:03}"] = scenes[index][0]
    whole = (tmp_path / "2.tar").read_bytes()
    (tmp_path / "2.tar").write_bytes(whole[: len(whole) // 2])
    out = tmp_path / "features"
    words = [str(tmp_path / "*.tar"), "--plan", "none", "--output", str(out), "--actors", "2"]
    assert script.run(script.parse(words)) == 1  # what can be read is written
    assert "not read" in capsys.readouterr().err and len(read(out)) == 10
    (tmp_path / "2.tar").write_bytes(whole)
    assert script.run(script.parse(words)) == 0
    assert "2 shards are encoded already, 1 parts are left" in capsys.readouterr().out
    check(read(out), plain_loop(images, "none", script.number), tokens=196)


def test_errors_come_before_any_actor(script: Any, tmp_path: Path) -> None:
    for words, told in (
        ([str(tmp_path), "--plan", "none"], "neither a folder with images nor a pattern"),
        ([str(tmp_path), "--plan", "grid@99:8"], "no layer 99"),
        ([str(tmp_path), "--plan", "none", "--model", "ViT-B-99"], "no model"),
    ):
        with pytest.raises(UserError, match=told):
            script.run(script.parse([*words, "--output", str(tmp_path / "out")]))
