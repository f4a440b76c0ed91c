"""The training files that ship with tokensieve, in the folder `configs` of the package: embedded_vlm, RGBNT201/DeMo_SDTPS.

A file on the disk comes first. `configs/embedded_vlm.yaml` works in a clone, where `configs` is a link to that folder, and
after `pip install`, where there is no such path and the shipped file of that name is read.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import tokensieve
from tokensieve import files
from tokensieve.errors import UserError, did_you_mean, short

FOLDER = Path(tokensieve.__file__).parent / "configs"
SUFFIXES = (".yaml", ".yml")


def shipped() -> dict[str, Path]:
    """The shipped files by their names, those of no data set first."""
    found = sorted((path for path in FOLDER.rglob("*.y*ml")), key=lambda path: (path.parent != FOLDER, path))
    return {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in found}


def find(text: str | Path) -> Path:
    """The file that a user means: a path, or the name of a shipped file. A UserError if there is neither."""
    path = Path(text)
    if os.path.exists(path) and not (path.is_dir() and str(text) in shipped()):
        return path
    named = _named(str(text))
    if named is None:
        known = shipped()
        hint = did_you_mean(_plain(str(text)), [*known, *(name.rpartition("/")[2] for name in known)])
        raise UserError(
            f"no file {short(text, 300)!r}; give the path of a YAML file or the name of a shipped one, such as embedded_clip "
            f"(tokensieve configs lists them).{hint}"
        )
    return named


def get(name: str) -> Path:
    """The shipped file of a name; a UserError if there is none."""
    named = _named(name)
    if named is None:
        known = shipped()
        raise UserError(
            f"no shipped file {short(name, 300)!r}; there are {', '.join(known)}.{did_you_mean(_plain(name), known)}"
        )
    return named


def _named(text: str) -> Path | None:
    """The shipped file that a text names: by its name, with or without configs/ and the suffix, or by a unique last part."""
    name, known = _plain(text), shipped()
    if name in known:
        return known[name]
    same = [full for full in known if full.rpartition("/")[2] == name]
    if len(same) > 1:
        raise UserError(f"{short(text, 300)!r} may be {', '.join(same[:-1])} or {same[-1]}; write one of them")
    return known[same[0]] if same else None


def _plain(text: str) -> str:
    path = PurePosixPath(text.removeprefix("configs/"))
    return str(path.with_suffix("") if path.suffix in SUFFIXES else path)


def summary(path: Path) -> str:
    """What a shipped file says about itself: the first sentence of its first comment."""
    words: list[str] = []
    for line in files.read_text(path).splitlines():
        if not line.startswith("#"):
            break
        words += line.lstrip("# ").split()
    text, stop, _ = " ".join(words).partition(". ")
    return text.rstrip(".") + ("." if stop or text else "")


def copy(name: str, destination: str | Path | None) -> Path:
    """Copy a shipped file, into the current folder by default. What is there already stays: a UserError.

    destination: a folder, or the name of the copy.
    """
    source = get(name)
    target = Path(source.name if destination is None else destination)
    if target.is_dir():
        target = target / source.name
    files.check_writable(target, "DEST")
    if os.path.lexists(target) or not files.create_file(target, source.read_bytes()):
        raise UserError(f"{short(target, 300)} is there already and stays as it is; give another DEST")
    return target
