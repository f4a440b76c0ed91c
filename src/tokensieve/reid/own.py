"""Objects of the user's own, to be found again: folder:OBJECTS and csv:OBJECTS.csv.

    OBJECTS/{RGB,NI,TI}/0001_c2_003.jpg                         query = gallery = all; one of the folders is enough
    OBJECTS/{train,query,gallery}/{RGB,NI,TI}/0001_c2_003.jpg   with splits; test in place of query and gallery is both
    OBJECTS.csv    columns RGB, NI, TI (or some of them), pid, camera and, if there are splits, split with the same words

A file's name begins with the identity, then the camera: _c2, _cam2 or _v2. It is the same, up to its ending, in every modality.
Cameras are numbered from 1, or from 0 if there is a camera 0. In a table, identities and cameras may be words.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tokensieve.data.own import folders, tables
from tokensieve.data.own.classes import sort_words
from tokensieve.errors import UserError, short
from tokensieve.reid.layouts import MODALITIES, OWN_PREFIXES, Layout, find_layout
from tokensieve.reid.scan import IMAGE_SUFFIXES, Scan, Shot

PATTERN = re.compile(r"^(?P<pid>\d{1,9})(?:_s\d+)?_(?:cam|c|v)(?P<camera>\d{1,4})(?!\d)", re.ASCII | re.IGNORECASE)
SPLITS = {"train": ("train",), "query": ("query", "test"), "gallery": ("gallery", "test")}  # a split: what it may be called
COLUMNS: Mapping[str, Sequence[str]] = {
    **{modality: (modality,) for modality in MODALITIES},
    "pid": ("pid", "identity", "person", "id"),
    "camera": ("camera", "cam", "camid"),
}
USAGE = "a folder for each modality (RGB, NI, TI), or folders train, query and gallery (or train and test) that hold them"


def is_own(name: str) -> bool:
    return name.startswith(OWN_PREFIXES)


def holds_objects(name: str) -> bool:
    """Whether folder:DIR or csv:FILE is data of objects."""
    return is_own(name) and (is_table if name.startswith(tables.PREFIX) else is_folder)(name)


def is_folder(name: str) -> bool:
    """Whether folder:PATH holds a folder for each modality, itself or in its splits."""
    try:
        return bool(_modalities(folders.path_of(name)))
    except UserError:
        return False


def is_table(name: str) -> bool:
    """Whether csv:FILE has the identities of objects and at least one modality."""
    header = tables.header_of(name)
    return tables.find_column(header, "pid", COLUMNS) is not None and bool(_columns(header))


def layout_of(name: str) -> Layout:
    """The layout of published data, or of the user's own."""
    if not is_own(name):
        return find_layout(name)
    return _table_layout(name) if name.startswith(tables.PREFIX) else _folder_layout(name)


def place_of(name: str) -> Path:
    """The folder that own data is in, or the table."""
    return tables.path_of(name) if name.startswith(tables.PREFIX) else folders.path_of(name)


# ---------------------------------------------------------------------------------------------------------------------- folders


def _modalities(folder: Path) -> dict[str, str]:
    """The folder of each modality, here or in the folders of the splits."""
    inside = folders.folders_in(folder)
    for place in (folder, *(folder / name for name in inside if name in sum(SPLITS.values(), ()))):
        found = {name.upper(): name for name in folders.folders_in(place) if name.upper() in MODALITIES}
        if found:
            return {modality: found.get(modality, modality) for modality in MODALITIES}
    return {}


def _folder_layout(name: str) -> Layout:
    folders.check(name)
    top = folders.path_of(name)
    modalities, inside = _modalities(top), folders.folders_in(top)
    if not modalities:
        raise UserError(f"{short(top, 200)} is no data for re-identification: it needs {USAGE}.")
    splits = {split: next((word for word in words if word in inside), None) for split, words in SPLITS.items()}
    there = {split: word for split, word in splits.items() if word is not None}
    places = [top / word / inner for word in set(there.values()) for inner in modalities.values()]
    if not there:
        there, places = {"query": "", "gallery": ""}, [top / inner for inner in modalities.values()]
    return Layout(
        "objects in a folder for each modality",
        splits=there,
        folders=modalities,
        pattern=PATTERN,
        cameras=1,
        first_camera=0 if any(map(_has_camera_0, places)) else 1,
        advice=f"A folder of objects holds {USAGE}; a file's name begins with the identity and the camera: "
        "0001_c2_003.jpg; --modalities names those that are there",
    )


def _has_camera_0(folder: Path) -> bool:
    try:
        names = [name for name in os.listdir(folder) if name.lower().endswith(IMAGE_SUFFIXES)]
    except OSError:
        return False
    return any(found is not None and int(found["camera"]) == 0 for found in map(PATTERN.search, names))


# ----------------------------------------------------------------------------------------------------------------------- tables


def _columns(header: Sequence[str]) -> dict[str, int]:
    """The column of each modality."""
    found = {modality: tables.find_column(header, modality, COLUMNS) for modality in MODALITIES}
    return {modality: column for modality, column in found.items() if column is not None}


def _table_layout(name: str) -> Layout:
    tables.check(name)
    table = tables.read_table(tables.path_of(name))
    modalities = _columns(table.columns)
    if not modalities:
        raise UserError(f"{short(table.path, 200)} has no column {', '.join(MODALITIES)}: at least one of them is needed.")
    split = table.find("split")
    words = {row.cells[split].strip() for row in table.rows} if split is not None else {""}
    if split is None:
        splits = {"query": "", "gallery": ""}
    else:
        named = {of: next((word for word in known if word in words), None) for of, known in SPLITS.items()}
        splits = {of: word for of, word in named.items() if word is not None}
        known = sorted(set(sum(SPLITS.values(), ())))
        if not splits or (unknown := words - set(known)):
            odd = short(next(iter(unknown)) if splits else ", ".join(sorted(words)), 100)
            raise UserError(f"{short(table.path, 200)}: the split {odd!r} is none of {', '.join(known)}.")
    cameras = sort_words([row.cells[table.need("camera", COLUMNS)].strip() for row in table.rows])
    is_numbered = all(word.isascii() and word.isdigit() for word in cameras)
    return Layout(
        "objects in a table",
        splits=splits,
        folders={modality: modality for modality in MODALITIES},
        pattern=PATTERN,
        cameras=1,
        first_camera=0 if not is_numbered or "0" in cameras else 1,
        scan=partial(_scan_table, table, modalities, split, cameras if not is_numbered else None),
    )


def _scan_table(
    table: tables.Table, modalities: Mapping[str, int], split: int | None, cameras: Sequence[str] | None, layout: Layout
) -> dict[str, Scan]:
    """The shots of each split. cameras: their names in order, if they are words."""
    pid, camera = table.need("pid", COLUMNS), table.need("camera", COLUMNS)
    pids = sort_words([row.cells[pid].strip() for row in table.rows])
    are_numbers = all(word.isascii() and word.isdigit() and len(word) < 10 for word in pids)
    scans = {word: Scan() for word in layout.splits.values()}
    problems = []
    for row in table.rows:
        who, where = row.cells[pid].strip(), row.cells[camera].strip()
        files = {name: table.image_path(row.cells[column]) for name, column in modalities.items() if row.cells[column].strip()}
        if not (who and where and files):
            problems.append(f"line {row.line} has no {'image' if who and where else 'identity' if where else 'camera'}")
            continue
        scan = scans.get("" if split is None else row.cells[split].strip())
        if scan is not None:
            number = int(where) - layout.first_camera if cameras is None else cameras.index(where)
            scan.shots.append(
                Shot(int(who) if are_numbers else pids.index(who), number, None, files, next(iter(files.values())))
            )
    if problems:
        raise table.error(problems)
    return scans
