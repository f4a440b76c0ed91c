"""Objects seen in several modalities by several cameras, to be found again: three published data sets, two embedded ones.

    RGBNT201   {train_171,test}/{RGB,NI,TI}/000001_cam1_0_00.jpg          query = gallery = test
    RGBNT100   rgbir/{bounding_box_train,query,bounding_box_test}/0001_c1_0001.jpg     one strip: RGB, NI, TI, 256 wide each
    MSVR310    {bounding_box_train,query3,bounding_box_test}/0001/{vis,ni,th}/0001_s001_v1_000.jpg
    folder:OBJECTS, csv:OBJECTS.csv           of the user's own (own.py)
    embedded-reid, embedded-reid-pretrain     people drawn by code (embedded/people), in RGBNT201's layout

The identity, the camera and (MSVR310) the scene are read from a file's name; the same name, up to its ending, is the same shot
in every modality. `check_dataset()` lists all that is missing or misnamed; so do the notes of `load()`. `load(split="val")`
gives identities of the training set that are held out for choosing checkpoints. 16-bit and float images, as thermal cameras
write them, are scaled by their own range.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from PIL import Image
from torch.utils.data import Dataset

from tokensieve.data.images import BrokenImage
from tokensieve.embedded.people import attributes, dataset
from tokensieve.errors import UserError, did_you_mean
from tokensieve.provenance import digest, file_stat
from tokensieve.reid import own
from tokensieve.reid.layouts import EMBEDDED, JUNK_ID, MODALITIES, ROOT, SPLITS, find_layout
from tokensieve.reid.own import layout_of
from tokensieve.reid.scan import (
    Shot,
    decode_image,
    eight_bits,
    find_faults,
    held_out_identities,
    scan_all,
    shorten_list,
    split_strip,
)


class ReidData(Dataset[dict[str, Image.Image]]):
    """The shots of a split, in the order of their names. An image that cannot be read is a BrokenImage when it is read.

    incomplete, misnamed: the names of shots that were left out, since a modality is missing or the name has no identity.
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
        self.layout = layout_of(name)
        self.rule = self.layout.rule
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
        """Each shot's camera or scene, whichever the exclusion rule uses."""
        return [shot.camera if self.rule == "camera" else shot.scene or 0 for shot in self.shots]

    @cached_property
    def fingerprint(self) -> str:
        """Of the names, sizes and times of all files, wherever the folder is; drawn ones go by the version of the drawing."""
        drawn = self.name in EMBEDDED  # the same pictures, whenever they were written
        what = 1 if drawn else 2  # size; and time
        files = [(shot.name, [(m, *file_stat(file)[:what]) for m, file in shot.files.items()]) for shot in self.shots]
        return digest([self.name, self.split, self.modalities, attributes.VERSION if drawn else None, files])

    def read(self, index: int, modalities: Sequence[str] | None = None) -> dict[str, Image.Image]:
        """The images of a shot in RGB, by modality (default: those the data was loaded with)."""
        shot = self.shots[index]
        wanted = self.modalities if modalities is None else tuple(modalities)
        if absent := [m for m in wanted if m not in shot.files]:
            raise BrokenImage(f"{shot.name}: there is no file of {' and '.join(absent)}")
        if not self.layout.folders:
            parts = decode_image(shot, MODALITIES[0], split_strip)
            return {m: parts[m] for m in wanted}
        return {m: decode_image(shot, m, eight_bits) for m in wanted}


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
    modalities: a shot that lacks one of them is left out and listed; with whole=False it stays.
    """
    layout = layout_of(name)
    splits = [known for known in SPLITS if known in layout.splits or (known == "val" and "train" in layout.splits)]
    if split not in splits:
        raise UserError(f"{name} has no split {split!r}: there are {', '.join(splits)}.{did_you_mean(split, splits)}")
    if not modalities or (unknown := [m for m in modalities if m not in MODALITIES]):
        raise UserError(f"there is no modality {unknown[0] if modalities else ''!r}: known are {', '.join(MODALITIES)}.")
    folder = folder_of(name, root)
    scans = scan_all(name, layout, folder)
    scan = scans[layout.splits["train" if split == "val" else split]]
    lacking = {shot.name for shot in scan.shots if whole and not all(m in shot.files for m in modalities)}
    ours = scan.shots
    if split in ("train", "val") and len(lacking) < len(ours):  # the choice of identities does not depend on the modalities
        held_out = held_out_identities(name, split, sorted({shot.pid for shot in ours}), val_identities)
        ours = [shot for shot in ours if (shot.pid in held_out) == (split == "val")]
    shots = [shot for shot in ours if shot.name not in lacking]
    if not shots:
        unpack = "" if own.is_own(name) else "; unpack it and give its folder as --dataset_root"
        advice = f" {layout.advice}{unpack}." if layout.advice else ""
        raise UserError(f"{name} ({split}) cannot be read from {folder}: {'; '.join(find_faults(layout, scans))}.{advice}")
    notes = [f"{name}: {fault}" for fault in find_faults(layout, scans, modalities, strips=False)]
    incomplete = [shot.name for shot in ours if shot.name in lacking]
    misnamed = [] if split == "val" else scan.misnamed  # whose is unknown: they count for the training set
    for what, names in (("lack a modality", incomplete), ("are misnamed", misnamed)):
        if names:
            notes.append(f"{name} ({split}): left out, shots that {what}: {len(names)} ({shorten_list(names)})")
    if scan.junk:
        notes.append(f"{name} ({split}): left out, files of identity {JUNK_ID}, which is none: {scan.junk}")
    cameras = max(1 + shot.camera for scan in scans.values() for shot in scan.shots)
    return ReidData(name, split, shots, max(layout.cameras, cameras), modalities, notes, incomplete, misnamed)


def check_dataset(
    name: str, root: str | os.PathLike[str] | None = ROOT, modalities: Sequence[str] = MODALITIES, strips: bool = True
) -> list[str]:
    """All that is missing or misnamed, a sentence for each kind of fault, with how many there are and some examples.

    strips: the header of every strip (RGBNT100) is read, for its size.
    """
    layout = layout_of(name)
    return find_faults(layout, scan_all(name, layout, folder_of(name, root)), modalities, strips)


def folder_of(name: str, root: str | os.PathLike[str] | None = ROOT) -> Path:
    """The folder that holds the folders of the splits: the root, or the data set's within it."""
    if own.is_own(name):
        return own.place_of(name)
    layout = find_layout(name)
    base = Path(ROOT if root is None else root).expanduser()
    if name in EMBEDDED:  # a user's own folders may have the same names; the drawing has a manifest
        if root in (None, ROOT):
            return dataset.folder(name, None)
        return base if dataset.is_drawing(base, name) else dataset.folder(name, base)
    places = [base / layout.inner, base, base / name / layout.inner, base / name]
    for place in places:
        if any((place / inside).is_dir() for inside in layout.splits.values()):
            return place
    return next((place for place in reversed(places) if place.is_dir()), base)
