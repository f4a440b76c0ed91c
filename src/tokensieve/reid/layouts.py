"""The published layouts of re-identification data sets: folders, file names, exclusion rule. This module imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokensieve.errors import UserError, did_you_mean

MODALITIES = ("RGB", "NI", "TI")
SPLITS = ("train", "val", "query", "gallery")
ROOT = "root"  # what --dataset_root is when it is not given
STRIP = (768, 128)  # width and height of RGBNT100's files
JUNK_ID = -1  # the identity of what is none
OVERLAP_MESSAGE = "identities both in training and test"


@dataclass(frozen=True)
class Layout:
    """How a data set lies in its folder, and how its files are named."""

    summary: str  # one line, for help and docs
    splits: Mapping[str, str]  # train, query, gallery (or some of them): their folders
    folders: Mapping[str, str]  # modality: the folder of its files; none: a file is a strip of all modalities
    pattern: re.Pattern[str]  # of a file's name: pid, camera and, if there is one, scene
    cameras: int  # of the published data set
    rule: str = "camera"  # a right answer of the query's own camera (scene) does not count
    first_camera: int = 1
    by_identity: bool = False  # there is a folder for each identity, which holds those of the modalities
    inner: str = ""  # the folder that holds the splits, within that of the data set
    advice: str = ""  # where to get the data
    scan: Callable[[Layout], dict[str, Any]] | None = None  # of data that is not in folders: the Scan of each split


_PEOPLE = Layout(
    "people in three modalities, in its published folders",
    splits={"train": "train_171", "query": "test", "gallery": "test"},
    folders={modality: modality for modality in MODALITIES},
    pattern=re.compile(r"^(?P<pid>\d{6})[^_]*_[^_]{3}(?P<camera>\d)", re.ASCII),
    cameras=4,
)
_VEHICLES = {"train": "bounding_box_train", "gallery": "bounding_box_test"}
_ON_REQUEST = "is given on request by the authors of"
LAYOUTS = {
    "RGBNT201": replace(
        _PEOPLE, advice=f"RGBNT201 {_ON_REQUEST} 'Robust Multi-Modality Person Re-identification' (Zheng et al., AAAI 2021)"
    ),
    "RGBNT100": Layout(
        "vehicles in three modalities, in its published folders",
        splits={**_VEHICLES, "query": "query"},
        folders={},
        pattern=re.compile(r"(?P<pid>[-\d]+)_c(?P<camera>[-\d]+)", re.ASCII),
        cameras=8,
        inner="rgbir",
        advice=f"RGBNT100 {_ON_REQUEST} 'Multi-Spectral Vehicle Re-Identification: A Challenge' (Li et al., AAAI 2020)",
    ),
    "MSVR310": Layout(
        "vehicles in three modalities and several scenes, in its published folders",
        splits={**_VEHICLES, "query": "query3"},
        folders={"RGB": "vis", "NI": "ni", "TI": "th"},
        pattern=re.compile(r"^(?P<pid>\d{4})..(?P<scene>\d{3})..(?P<camera>\d)", re.ASCII),
        cameras=8,
        rule="scene",
        first_camera=0,
        by_identity=True,
        advice=f"MSVR310 {_ON_REQUEST} 'Multi-spectral Vehicle Re-identification with Cross-directional Consistency Network "
        "and a High-quality Benchmark' (Zheng et al., 2022)",
    ),
    "embedded-reid": replace(_PEOPLE, summary="people drawn by code in three modalities"),
    "embedded-reid-pretrain": replace(
        _PEOPLE, summary="more drawn people, for training before the others", splits={"train": "train_171"}
    ),
}
NAMES = tuple(LAYOUTS)
OWN_PREFIXES = ("folder:", "csv:")  # of the user's own data (own.py)
EMBEDDED = tuple(name for name in NAMES if name.startswith("embedded-"))


def find_layout(name: str) -> Layout:
    if name not in LAYOUTS:
        raise UserError(
            f"there is no re-identification data {name!r}: known are {', '.join(NAMES)}.{did_you_mean(name, NAMES)}"
        )
    return LAYOUTS[name]
