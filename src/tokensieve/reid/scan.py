"""What the folder of a re-identification data set holds: its shots, and all that is missing or misnamed."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from PIL import Image

from tokensieve.data.images import BrokenImage, by_own_range, decode
from tokensieve.errors import UserError, did_you_mean
from tokensieve.reid.layouts import JUNK_ID, MODALITIES, OVERLAP_MESSAGE, STRIP, Layout

T = TypeVar("T")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff")
EXAMPLES = 3  # of every kind of problem are named


@dataclass(frozen=True)
class Shot:
    """One moment of one object, seen by one camera in one or more modalities."""

    pid: int
    camera: int  # from 0
    scene: int | None
    files: dict[str, str] = field(hash=False)  # modality: path; of a strip it is the same for all
    name: str = ""  # relative path of the first file


def eight_bits(image: Image.Image) -> Image.Image:
    """The image in 8-bit RGB; integers of more bits and floats by their own range.

    Thermal cameras use a small part of 16 bits: scaled by the full range, all would be black.
    """
    return by_own_range(image) if image.mode[0] in "IF" else image.convert("RGB")


@dataclass
class Scan:
    """What a split's folder holds: shots with one modality or more, and what is wrong, by kind."""

    shots: list[Shot] = field(default_factory=list)
    faults: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    missing: dict[str, str] = field(default_factory=dict)  # folders that are not there: the modality they are of, or ""
    misnamed: list[str] = field(default_factory=list)  # shots that are none, by their first file
    there: bool = True  # the split's own folder
    junk: int = 0


def scan_all(name: str, layout: Layout, folder: Path) -> dict[str, Scan]:
    """The scans of the splits' folders; what two splits share is scanned once."""
    if layout.scan is not None:
        return layout.scan(layout)
    scans = {inside: _scan(layout, folder, inside) for inside in dict.fromkeys(layout.splits.values())}
    if (
        "train" in layout.splits
        and not any(scan.there for scan in scans.values())
        and did_you_mean(name, _inside(folder, folders=True))
    ):
        scans[layout.splits["train"]].missing[_missing(folder, name)] = ""
    return scans


def _scan(layout: Layout, folder: Path, split: str) -> Scan:
    if not (folder / split).is_dir():
        return Scan(missing={_missing(folder, split): ""}, there=False)
    scan = Scan()
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


def _add(scan: Scan, layout: Layout, folder: Path, holder: str, stem: str, files: dict[str, str]) -> None:
    """The shot that these files are, or what is wrong with their name."""
    first = next(iter(files.values()))
    try:
        match = layout.pattern.search(stem)
        fields = {} if match is None else {name: int(value) for name, value in match.groupdict().items()}
    except ValueError:  # such as "1-2"
        fields = {}
    camera = fields.get("camera", -1) - layout.first_camera
    if fields.get("pid") == JUNK_ID:
        scan.junk += 1
        return
    if camera < 0 or fields["pid"] < 0:
        scan.faults["files whose names have no identity and camera"] += files.values()
        scan.misnamed.append(first)
        return
    if holder and (not holder.isdecimal() or int(holder) != fields["pid"]):
        scan.faults["files in the folder of another identity"].append(first)
    files = files if layout.folders else dict.fromkeys(MODALITIES, first)
    paths = {modality: os.path.join(folder, file) for modality, file in files.items()}
    scan.shots.append(Shot(fields["pid"], camera, fields.get("scene"), paths, Path(first).as_posix()))


def find_faults(
    layout: Layout, scans: Mapping[str, Scan], modalities: Sequence[str] = MODALITIES, strips: bool = True
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
    faults[OVERLAP_MESSAGE] = list(map(str, sorted(both)))
    groups: dict[int, set[int | None]] = defaultdict(set)  # identity: where the gallery shows it
    for shot in gallery:
        groups[shot.pid].add(getattr(shot, layout.rule))
    alone = {shot.pid for shot in query if not groups[shot.pid] - {getattr(shot, layout.rule)}}
    if gallery:
        faults[f"identities with queries that have no right answer (no other {layout.rule} in the gallery)"] = list(
            map(str, sorted(alone))
        )
    return _summarise_problems(faults)


def held_out_identities(name: str, split: str, pids: Sequence[int], count: int) -> set[int]:
    """So many identities for validation, evenly spread over the sorted ones."""
    if not 0 <= count < len(pids) or (split == "val" and count == 0):
        raise UserError(
            f"{name} has {len(pids)} identities for training; {count} of them cannot be held out for validation: "
            f"give 1 to {len(pids) - 1}" + (", or use no split 'val'." if split == "val" else ", or 0.")
        )
    return {pids[(2 * i + 1) * len(pids) // (2 * count)] for i in range(count)}


def _missing(parent: Path, name: str, shown: str = "") -> str:
    """A folder that is not there, and what is there that may be meant."""
    path = os.path.join(shown, name) if shown else name
    return path + did_you_mean(name, sorted(_inside(parent, folders=True))).rstrip()


def _inside(folder: Path, folders: bool = False) -> list[str]:
    """The names of the pictures (or of the folders) in a folder; nothing if it is not there."""
    try:
        with os.scandir(folder) as listing:
            entries = [entry for entry in listing if not entry.name.startswith(".")]
            return [e.name for e in entries if (e.is_dir() if folders else e.name.lower().endswith(IMAGE_SUFFIXES))]
    except OSError:
        return []


def split_strip(strip: Image.Image) -> dict[str, Image.Image]:
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


def decode_image(shot: Shot, modality: str, convert: Callable[[Image.Image], T]) -> T:
    """What `convert` makes of the modality's file; a BrokenImage that begins with its own relative path."""
    file = shot.files[modality]
    try:
        return decode(file, convert)
    except BrokenImage as error:
        root = len(next(iter(shot.files.values()))) - len(shot.name)
        raise BrokenImage(f"{Path(file[root:]).as_posix()}: {error}") from error


def _summarise_problems(problems: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{what}: {len(examples)} ({shorten_list(examples)})" for what, examples in problems.items() if examples]


def shorten_list(names: Sequence[str]) -> str:
    return ", ".join(names[:EXAMPLES]) + (f" and {len(names) - EXAMPLES} more" if len(names) > EXAMPLES else "")
