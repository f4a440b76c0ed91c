"""Objects seen in several modalities by several cameras, to be found again: three published data sets, two embedded ones.

    RGBNT201   {train_171,test}/{RGB,NI,TI}/000001_cam1_0_00.jpg          query = gallery = test
    RGBNT100   rgbir/{bounding_box_train,query,bounding_box_test}/0001_c1_0001.jpg     one strip: RGB, NI, TI, 256 wide each
    MSVR310    {bounding_box_train,query3,bounding_box_test}/0001/{vis,ni,th}/0001_s001_v1_000.jpg
    embedded-reid, embedded-reid-pretrain     people drawn by code (people.py), in RGBNT201's layout

The identity, the camera and (MSVR310) the scene are read from a file's name; the same name, up to its ending, is the same shot
in every modality. `check()` says all that is missing or misnamed; so do the notes of what `load()` returns. `load(split="val")`
gives identities of the training set that are held out for choosing checkpoints. 16-bit and float images, as thermal cameras
write them, are scaled by their own range.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from PIL import Image
from torch.utils.data import Dataset

from tokensieve.data import people
from tokensieve.data.images import BrokenImage, by_own_range, decode
from tokensieve.errors import UserError, nearest
from tokensieve.results import digest, stamp

T = TypeVar("T")
MODALITIES = ("RGB", "NI", "TI")
EMBEDDED = ("embedded-reid", "embedded-reid-pretrain")
NAMES = ("RGBNT201", "RGBNT100", "MSVR310", *EMBEDDED)
SPLITS = ("train", "val", "query", "gallery")
ROOT = "root"  # what --dataset_root is when it is not given
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff")
STRIP = (768, 128)  # width and height of RGBNT100's files
JUNK = -1  # the identity of what is none
EXAMPLES = 3  # of every kind of fault are named
OVERLAP = "identities both in training and test"

ADVICE = {
    "RGBNT201": "RGBNT201 is given on request by the authors of 'Robust Multi-Modality Person Re-identification' (Zheng et "
    "al., AAAI 2021)",
    "RGBNT100": "RGBNT100 is given on request by the authors of 'Multi-Spectral Vehicle Re-Identification: A Challenge' (Li et "
    "al., AAAI 2020)",
    "MSVR310": "MSVR310 is given on request by the authors of 'Multi-spectral Vehicle Re-identification with Cross-directional "
    "Consistency Network and a High-quality Benchmark' (Zheng et al., 2022)",
}


@dataclass(frozen=True)
class Layout:
    """How a data set lies in its folder, and how its files are named."""

    splits: Mapping[str, str]  # train, query, gallery (or some of them): their folders
    folders: Mapping[str, str]  # modality: the folder of its files; none: a file is a strip of all modalities
    pattern: re.Pattern[str]  # of a file's name: pid, camera and, if there is one, scene
    cameras: int  # of the published data set
    rule: str = "camera"  # a right answer of the query's own camera (scene) does not count
    first_camera: int = 1
    by_identity: bool = False  # there is a folder for each identity, which holds those of the modalities
    inner: str = ""  # the folder that holds the splits, within that of the data set


_PEOPLE = Layout(
    splits={"train": "train_171", "query": "test", "gallery": "test"},
    folders={modality: modality for modality in MODALITIES},
    pattern=re.compile(r"^(?P<pid>\d{6})[^_]*_[^_]{3}(?P<camera>\d)", re.ASCII),
    cameras=4,
)
_VEHICLES = {"train": "bounding_box_train", "gallery": "bounding_box_test"}
LAYOUTS = {
    "RGBNT201": _PEOPLE,
    "RGBNT100": Layout(
        splits={**_VEHICLES, "query": "query"},
        folders={},
        pattern=re.compile(r"(?P<pid>[-\d]+)_c(?P<camera>[-\d]+)", re.ASCII),
        cameras=8,
        inner="rgbir",
    ),
    "MSVR310": Layout(
        splits={**_VEHICLES, "query": "query3"},
        folders={"RGB": "vis", "NI": "ni", "TI": "th"},
        pattern=re.compile(r"^(?P<pid>\d{4})..(?P<scene>\d{3})..(?P<camera>\d)", re.ASCII),
        cameras=8,
        rule="scene",
        first_camera=0,
        by_identity=True,
    ),
    "embedded-reid": _PEOPLE,
    "embedded-reid-pretrain": replace(_PEOPLE, splits={"train": "train_171"}),
}


@dataclass(frozen=True)
class Shot:
    """One moment of one object, seen by one camera in one or more modalities."""

    pid: int
    camera: int  # from 0
    scene: int | None
    files: dict[str, str] = field(hash=False)  # modality: path; of a strip it is the same for all
    name: str = ""  # relative path of the first file


class ReidData(Dataset[dict[str, Image.Image]]):
    """The shots of a split, in the order of their names. An image that cannot be read is a BrokenImage when it is asked for.

    incomplete, misnamed: the names of shots that were left out, since a modality is missing or the name tells nothing.
    notes: what is wrong with the data set, in sentences.
    """

    def __init__(
        self,
        name: str,
        split: str,
        shots: Sequence[Shot],
        cameras: int,
        modalities: Sequence[str],
        notes: Sequence[str],
        incomplete: Sequence[str] = (),
        misnamed: Sequence[str] = (),
    ) -> None:
        self.name, self.split, self.shots, self.cameras = name, split, list(shots), cameras
        self.modalities, self.notes = tuple(modalities), list(notes)
        self.incomplete, self.misnamed = list(incomplete), list(misnamed)
        self.rule = LAYOUTS[name].rule
        self.pids = sorted({shot.pid for shot in shots})

    def __len__(self) -> int:
        return len(self.shots)

    def __getitem__(self, index: int) -> dict[str, Image.Image]:
        return self.read(index)

    @property
    def identities(self) -> int:
        """How many."""
        return len(self.pids)

    @property
    def left_out(self) -> dict[str, str]:
        """The shots that were left out, and why."""
        return dict.fromkeys(self.incomplete, "a modality is missing") | dict.fromkeys(self.misnamed, "misnamed")

    @property
    def groups(self) -> list[int]:
        """Each shot's camera or scene, whichever the exclusion rule asks for."""
        return [shot.camera if self.rule == "camera" else shot.scene or 0 for shot in self.shots]

    @cached_property
    def fingerprint(self) -> str:
        """Of the names, sizes and times of all files, wherever the folder is; drawn ones go by the version of the drawing."""
        drawn = self.name in EMBEDDED  # the same pictures, whenever they were written
        what = 1 if drawn else 2  # size; and time
        files = [(shot.name, [(m, *stamp(file)[:what]) for m, file in shot.files.items()]) for shot in self.shots]
        return digest([self.name, self.split, self.modalities, people.VERSION if drawn else None, files])

    def read(self, index: int, modalities: Sequence[str] | None = None) -> dict[str, Image.Image]:
        """The images of a shot in RGB, by modality (default: those the data was loaded with)."""
        shot = self.shots[index]
        wanted = self.modalities if modalities is None else tuple(modalities)
        if absent := [m for m in wanted if m not in shot.files]:
            raise BrokenImage(f"{shot.name}: there is no file of {' and '.join(absent)}")
        if not LAYOUTS[self.name].folders:
            parts = _decoded(shot, MODALITIES[0], _parts)
            return {m: parts[m] for m in wanted}
        return {m: _decoded(shot, m, eight_bits) for m in wanted}


def load(
    name: str,
    root: str | os.PathLike[str] | None = ROOT,
    split: str = "train",
    val_identities: int = 0,
    modalities: Sequence[str] = MODALITIES,
    whole: bool = True,
) -> ReidData:
    """A split of a data set: train, val, query or gallery.

    root: the folder of the data set, or the one that holds it.
    val_identities: so many identities of the training set are split "val" (both query and gallery) and not in split "train":
        of n identities in sorted order those at (i + 1/2) n / val_identities, rounded down.
    modalities: a shot that lacks one of them is left out and told of; with whole=False it stays.
    """
    layout = _layout(name)
    splits = [known for known in SPLITS if known in (*layout.splits, "val")]
    if split not in splits:
        raise UserError(f"{name} has no split {split!r}: there are {', '.join(splits)}.{_near(split, splits)}")
    if not modalities or (unknown := [m for m in modalities if m not in MODALITIES]):
        raise UserError(f"there is no modality {unknown[0] if modalities else ''!r}: known are {', '.join(MODALITIES)}.")
    folder = folder_of(name, root)
    scans = _scan_all(name, folder)
    scan = scans[layout.splits["train" if split == "val" else split]]
    lacking = {shot.name for shot in scan.shots if whole and not all(m in shot.files for m in modalities)}
    ours = scan.shots
    if split in ("train", "val") and len(lacking) < len(ours):  # identities are chosen whatever modalities are asked for
        held_out = _held_out(name, split, sorted({shot.pid for shot in ours}), val_identities)
        ours = [shot for shot in ours if (shot.pid in held_out) == (split == "val")]
    shots = [shot for shot in ours if shot.name not in lacking]
    if not shots:
        advice = f" {ADVICE[name]}; unpack it and give its folder as --dataset_root." if name in ADVICE else ""
        raise UserError(f"{name} ({split}) cannot be read from {folder}: {'; '.join(_faults(layout, scans))}.{advice}")
    notes = [f"{name}: {fault}" for fault in _faults(layout, scans, modalities, strips=False)]
    incomplete = [shot.name for shot in ours if shot.name in lacking]
    misnamed = [] if split == "val" else scan.misnamed  # of nobody knows whom: of the training set
    for what, names in (("lack a modality", incomplete), ("are misnamed", misnamed)):
        if names:
            notes.append(f"{name} ({split}): left out, shots that {what}: {len(names)} ({_few(names)})")
    if scan.junk:
        notes.append(f"{name} ({split}): left out, files of identity {JUNK}, which is none: {scan.junk}")
    seen = max(1 + shot.camera for scan in scans.values() for shot in scan.shots)
    return ReidData(name, split, shots, max(layout.cameras, seen), modalities, notes, incomplete, misnamed)


def check(
    name: str, root: str | os.PathLike[str] | None = ROOT, modalities: Sequence[str] = MODALITIES, strips: bool = True
) -> list[str]:
    """All that is missing or misnamed, a sentence for each kind of fault, with how many there are and some examples.

    strips: the header of every strip (RGBNT100) is read, for its size.
    """
    return _faults(_layout(name), _scan_all(name, folder_of(name, root)), modalities, strips)


def folder_of(name: str, root: str | os.PathLike[str] | None = ROOT) -> Path:
    """The folder that holds the folders of the splits: the root, or the data set's within it."""
    layout = _layout(name)
    base = Path(ROOT if root is None else root).expanduser()
    if name in EMBEDDED:  # somebody's own folders may be called as those of the drawing: its manifest tells
        if root in (None, ROOT):
            return people.folder(name, None)
        return base if people.is_drawing(base, name) else people.folder(name, base)
    places = [base / layout.inner, base, base / name / layout.inner, base / name]
    for place in places:
        if any((place / inside).is_dir() for inside in layout.splits.values()):
            return place
    return next((place for place in reversed(places) if place.is_dir()), base)


def eight_bits(image: Image.Image) -> Image.Image:
    """The image in 8-bit RGB; integers of more bits and floats by their own range.

    Thermal cameras use a small part of 16 bits: scaled by the full range, all would be black.
    """
    return by_own_range(image) if image.mode[0] in "IF" else image.convert("RGB")


# ------------------------------------------------------------------------------------------------------- what is in the folders


@dataclass
class _Scan:
    """What a split's folder holds: shots with one modality or more, and what is wrong, by kind."""

    shots: list[Shot] = field(default_factory=list)
    faults: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    missing: dict[str, str] = field(default_factory=dict)  # folders that are not there: the modality they are of, or ""
    misnamed: list[str] = field(default_factory=list)  # shots that are none, by their first file
    there: bool = True  # the split's own folder
    junk: int = 0


def _scan_all(name: str, folder: Path) -> dict[str, _Scan]:
    """The scans of the splits' folders; what two splits share is scanned once."""
    layout = LAYOUTS[name]
    scans = {inside: _scan(layout, folder, inside) for inside in dict.fromkeys(layout.splits.values())}
    if not any(scan.there for scan in scans.values()) and _near(name, _inside(folder, folders=True)):
        scans[layout.splits["train"]].missing[_missing(folder, name)] = ""
    return scans


def _scan(layout: Layout, folder: Path, split: str) -> _Scan:
    if not (folder / split).is_dir():
        return _Scan(missing={_missing(folder, split): ""}, there=False)
    scan = _Scan()
    holders = sorted(_inside(folder / split, folders=True)) if layout.by_identity else [""]
    for holder in holders:
        inside = os.path.join(split, holder) if holder else split
        places = {m: os.path.join(inside, name) for m, name in layout.folders.items()} or {MODALITIES[0]: inside}
        found: dict[str, dict[str, str]] = defaultdict(dict)  # name without its ending: modality: file
        for modality, place in places.items():
            if not (folder / place).is_dir():
                scan.missing[_missing(folder / inside, os.path.basename(place), inside)] = modality
            for file in sorted(_inside(folder / place)):
                stem = os.path.splitext(file)[0]
                if modality in found[stem]:
                    scan.faults["files that differ from another in the ending only"].append(os.path.join(place, file))
                    scan.misnamed.append(os.path.join(place, file))
                found[stem].setdefault(modality, os.path.join(place, file))
        for stem in sorted(found):
            _add(scan, layout, folder, holder, stem, found[stem])
    return scan


def _add(scan: _Scan, layout: Layout, folder: Path, holder: str, stem: str, files: dict[str, str]) -> None:
    """The shot that these files are, or what is wrong with their name."""
    first = next(iter(files.values()))
    try:
        read = layout.pattern.search(stem)
        told = {} if read is None else {part: int(value) for part, value in read.groupdict().items()}
    except ValueError:  # such as "1-2"
        told = {}
    camera = told.get("camera", -1) - layout.first_camera
    if told.get("pid") == JUNK:
        scan.junk += 1
        return
    if camera < 0 or told["pid"] < 0:
        scan.faults["files whose names tell no identity and camera"] += files.values()
        scan.misnamed.append(first)
        return
    if holder and (not holder.isdecimal() or int(holder) != told["pid"]):
        scan.faults["files in the folder of another identity"].append(first)
    files = files if layout.folders else dict.fromkeys(MODALITIES, first)
    paths = {modality: os.path.join(folder, file) for modality, file in files.items()}
    scan.shots.append(Shot(told["pid"], camera, told.get("scene"), paths, Path(first).as_posix()))


def _faults(
    layout: Layout, scans: Mapping[str, _Scan], modalities: Sequence[str] = MODALITIES, strips: bool = True
) -> list[str]:
    """Sentences on all that is wrong in the splits, and between them. strips: their sizes are looked at, file by file."""
    faults: dict[str, list[str]] = defaultdict(list)
    faults["folders missing"] = [
        place for scan in scans.values() for place, modality in scan.missing.items() if modality in ("", *modalities)
    ]
    for scan in scans.values():
        for kind, examples in scan.faults.items():
            faults[kind] += examples
        for modality in (m for m in layout.folders if m in modalities):
            lacking = [shot.name for shot in scan.shots if modality not in shot.files]
            faults[f"shots without a file of {modality} ({layout.folders[modality]})"] += lacking
        if strips and not layout.folders:
            faults[f"strips that are not {STRIP[0]} x {STRIP[1]} pixels"] += filter(None, map(_odd_strip, scan.shots))
    faults["splits without a shot"] = [inside for inside, scan in scans.items() if scan.there and not scan.shots]
    train, query, gallery = (
        scans[layout.splits[split]].shots if split in layout.splits else [] for split in ("train", "query", "gallery")
    )
    both = {shot.pid for shot in train} & {shot.pid for shot in (*query, *gallery)}
    faults[OVERLAP] = list(map(str, sorted(both)))
    groups: dict[int, set[int | None]] = defaultdict(set)  # identity: where the gallery shows it
    for shot in gallery:
        groups[shot.pid].add(getattr(shot, layout.rule))
    alone = {shot.pid for shot in query if not groups[shot.pid] - {getattr(shot, layout.rule)}}
    if gallery:
        faults[f"identities with queries that have no right answer (no other {layout.rule} in the gallery)"] = list(
            map(str, sorted(alone))
        )
    return _told(faults)


def _held_out(name: str, split: str, pids: Sequence[int], count: int) -> set[int]:
    """So many identities for validation, evenly spread over the sorted ones."""
    if not 0 <= count < len(pids) or (split == "val" and count == 0):
        raise UserError(
            f"{name} has {len(pids)} identities for training; {count} of them cannot be held out for validation: "
            f"give 1 to {len(pids) - 1}" + (", or use no split 'val'." if split == "val" else ", or 0.")
        )
    return {pids[(2 * i + 1) * len(pids) // (2 * count)] for i in range(count)}


def _layout(name: str) -> Layout:
    if name not in LAYOUTS:
        raise UserError(f"there is no re-identification data {name!r}: known are {', '.join(NAMES)}.{_near(name, NAMES)}")
    return LAYOUTS[name]


def _near(word: str, options: Sequence[str]) -> str:
    """did_you_mean, for words that may be written in capitals or not."""
    near = nearest(word.lower(), [option.lower() for option in options])
    same = next((option for option in options if option.lower() == near), None)
    return "" if same is None else f" Did you mean {same!r}?"


def _missing(parent: Path, name: str, shown: str = "") -> str:
    """A folder that is not there, and what is there that may be meant."""
    path = os.path.join(shown, name) if shown else name
    return path + _near(name, sorted(_inside(parent, folders=True))).rstrip()


def _inside(folder: Path, folders: bool = False) -> list[str]:
    """The names of the pictures (or of the folders) in a folder; nothing if it is not there."""
    try:
        with os.scandir(folder) as listing:
            entries = [entry for entry in listing if not entry.name.startswith(".")]
            return [e.name for e in entries if (e.is_dir() if folders else e.name.lower().endswith(PICTURES))]
    except OSError:
        return []


def _parts(strip: Image.Image) -> dict[str, Image.Image]:
    """The images of the modalities, side by side in a strip."""
    if strip.size != STRIP:
        raise BrokenImage(f"{strip.width} x {strip.height} pixels, not {STRIP[0]} x {STRIP[1]}")
    width = STRIP[0] // len(MODALITIES)
    return {m: eight_bits(strip.crop((i * width, 0, (i + 1) * width, STRIP[1]))) for i, m in enumerate(MODALITIES)}


def _odd_strip(shot: Shot) -> str:
    """What is wrong with the size of a strip; nothing if it is as it should be. Only the header is read."""
    try:
        width, height = decode(shot.files[MODALITIES[0]], lambda image: image.size)
    except BrokenImage as error:
        return f"{shot.name}: {error}"
    return "" if (width, height) == STRIP else f"{shot.name}: {width} x {height}"


def _decoded(shot: Shot, modality: str, convert: Callable[[Image.Image], T]) -> T:
    """What `convert` makes of the modality's file; a BrokenImage that begins with its own relative path."""
    file = shot.files[modality]
    try:
        return decode(file, convert)
    except BrokenImage as error:
        root = len(next(iter(shot.files.values()))) - len(shot.name)
        raise BrokenImage(f"{Path(file[root:]).as_posix()}: {error}") from error


def _told(found: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{what}: {len(examples)} ({_few(examples)})" for what, examples in found.items() if examples]


def _few(found: Sequence[str]) -> str:
    return ", ".join(found[:EXAMPLES]) + (f" and {len(found) - EXAMPLES} more" if len(found) > EXAMPLES else "")
