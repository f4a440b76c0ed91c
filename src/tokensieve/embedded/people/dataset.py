"""People drawn by code in three modalities: visible light (RGB), near infrared (NI) and thermal (TI), for re-identification.

Who a person is (body, clothes, what the cloth does in near infrared, how much heat it lets through) comes from the pid alone;
pose, camera, background, light and what stands in the way come from (pid, camera, shot). All modalities of a shot are painted
at once, so they show the same geometry. The files have RGBNT201's layout and names, so that one reader reads both.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from tokensieve.embedded.people.attributes import VERSION
from tokensieve.embedded.people.camera import draw
from tokensieve.errors import UserError, did_you_mean
from tokensieve.terminal import progress

CAMERAS = 4
MODALITIES = ("RGB", "NI", "TI")
QUALITY = 93  # of the JPEG files
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Subset:
    """A split: its identities have the pids first, first + 1, ...; each camera takes `shots` pictures of each of them."""

    first: int
    identities: int
    shots: int

    @property
    def pids(self) -> range:
        return range(self.first, self.first + self.identities)


DATASETS: dict[str, dict[str, Subset]] = {  # name -> folder of RGBNT201's layout -> what is in it; no pid twice
    "embedded-reid": {"train_171": Subset(1, 171, 3), "test": Subset(172, 100, 3)},
    "embedded-reid-pretrain": {"train_171": Subset(1001, 600, 2)},
}


def _subsets(name: str) -> dict[str, Subset]:
    if name not in DATASETS:
        raise UserError(f"no drawn data set {name!r}; there are: {', '.join(DATASETS)}.{did_you_mean(name, DATASETS)}")
    return DATASETS[name]


def file_name(pid: int, camera: int, shot: int) -> str:
    """A file's name as in RGBNT201: the pid in 6 digits, the camera (counted from 1) as the 4th character of the 2nd field."""
    return f"{pid:06d}_cam{camera + 1}_0_{shot:02d}.jpg"


def shots(subset: Subset) -> Iterator[tuple[int, int, int]]:
    """(pid, camera, shot) of all pictures of a split."""
    return ((pid, camera, shot) for pid in subset.pids for camera in range(CAMERAS) for shot in range(subset.shots))


def write(root: Path, name: str) -> None:
    """Draw a data set into root/{train_171,test}/{RGB,NI,TI}/*.jpg, and last a manifest of what is there."""
    subsets = _subsets(name)
    total = sum(subset.identities * subset.shots * CAMERAS for subset in subsets.values())
    with progress.bar(total=total, desc=f"drawing {name} (once)", unit="shot", leave=False, mininterval=1) as bar:
        for split, subset in subsets.items():
            for modality in MODALITIES:
                (root / split / modality).mkdir(parents=True, exist_ok=True)
            for pid, camera, shot in shots(subset):
                for modality, pixels in draw(pid, camera, shot).images.items():
                    Image.fromarray(pixels).save(root / split / modality / file_name(pid, camera, shot), quality=QUALITY)
                bar.update()
    (root / MANIFEST).write_text(json.dumps(_manifest(name), indent=1))


def _manifest(name: str) -> dict[str, Any]:
    counts = {split: subset.identities * subset.shots * CAMERAS for split, subset in _subsets(name).items()}
    return {"name": name, "version": VERSION, "shots": counts}


def is_drawing(folder: Path, name: str) -> bool:
    """Whether a folder was written as this version's drawing, whatever has become of its files."""
    try:
        return bool(json.loads((folder / MANIFEST).read_text()) == _manifest(name))
    except (OSError, ValueError):
        return False


def _is_whole(folder: Path, name: str) -> bool:
    """Whether a folder holds this version's drawing, no file missing."""
    try:
        return is_drawing(folder, name) and all(
            sum(file.endswith(".jpg") for file in os.listdir(folder / split / modality)) == count
            for split, count in _manifest(name)["shots"].items()
            for modality in MODALITIES
        )
    except (OSError, ValueError):
        return False


def cache_folder() -> Path:
    """Where drawn files are kept: $TOKENSIEVE_CACHE, else tokensieve under the user's cache folder."""
    if os.environ.get("TOKENSIEVE_CACHE"):
        return Path(os.environ["TOKENSIEVE_CACHE"]).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokensieve"
    except RuntimeError as error:
        raise UserError("this user has no home folder: set TOKENSIEVE_CACHE to a folder that can be written") from error


def folder(name: str, root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of a drawn data set (under `root`, else the cache folder), drawn on first use, whole or not at all.

    Its name ends in the version, so that another version's drawing stays whole for whoever reads it.
    """
    _subsets(name)
    parent = Path(root) if root is not None else cache_folder()
    final = parent / f"{name}-v{VERSION}"
    if _is_whole(final, name):
        return final
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _sweep(parent, f".{final.name}-")
        with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=parent, ignore_cleanup_errors=True) as scratch:
            drawn = Path(scratch) / "new"
            write(drawn, name)
            if not _is_whole(final, name):  # no other process was faster
                if final.exists():  # files are missing
                    os.rename(final, Path(scratch) / "old")
                os.rename(drawn, final)
    except OSError as error:
        if not _is_whole(final, name):  # another process was faster by a hair
            raise UserError(
                f"cannot write the drawn data set {name} to {final} ({error.strerror or error}): "
                f"{'choose' if root is not None else 'set TOKENSIEVE_CACHE to'} a folder that can be written"
            ) from error
    return final


def _sweep(parent: Path, prefix: str) -> None:
    """Remove what drawings that were killed more than a day ago have left."""
    for left in parent.glob(f"{prefix}*"):
        if time.time() - left.stat().st_mtime > 24 * 3600:
            shutil.rmtree(left, ignore_errors=True)
