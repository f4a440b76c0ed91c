"""Tables and folders of users: random and damaged ones give data or a message of one line, never anything else."""

from __future__ import annotations

import random
from pathlib import Path

from tests.hostile.attack import Attack, refused
from tests.hostile.mutate import mutate_bytes
from tests.support.pictures import picture, png
from tokensieve.data import registry
from tokensieve.data.own.files import list_files
from tokensieve.data.source import Broken
from tokensieve.data.vqa import load as load_questions
from tokensieve.reid import data as reid_data

COLUMNS = ("image", "file", "label", "caption", "question", "answer", "answers", "split", "pid", "camera", "RGB", "TI", "", "x")
CELLS = (
    *("a.png", "b/a.png", "../a.png", "/dev/zero", "\0", "\ud7ff", "x" * 300, "", " ", '"', '"a', "1", "0", "-1", "9" * 5000),
    *("train", "test", "cat", "=1+1", "a|b", "\r", "\u2028", "~", "~x", "http://a/b.png", "\x1b[2J", "c" * 140_000),
)
PICTURE = png(picture(0, 0))


def _table(rng: random.Random, folder: Path) -> None:
    """A table of random cells, half of the time damaged."""
    (folder / "a.png").write_bytes(PICTURE)
    mark = rng.choice((",", ",", ";", "\t"))
    columns = rng.sample(COLUMNS, rng.randrange(1, 6))
    rows = [[rng.choice(CELLS) for _ in columns] for _ in range(rng.randrange(4))]
    text = rng.choice(("\n", "\r\n")).join(mark.join(cells) for cells in [columns, *rows])
    content = text.encode(rng.choice(("utf-8", "utf-8-sig", "utf-16")))
    (folder / "t.csv").write_bytes(mutate_bytes(rng, content) if rng.random() < 0.5 else content)
    _use(f"csv:{folder}/t.csv")


def _folder(rng: random.Random, folder: Path) -> None:
    """A folder with odd names, links, and files that are no images."""
    names = (
        "RGB",
        "TI",
        "train",
        "test",
        "cat",
        "ü b",
        "1",
        "02",
        "-",
        "a%n",
        "classes.txt",
        "templates.txt",
        "x.png",
        "1_c2_3.png",
    )
    places = [folder]
    for _ in range(rng.randrange(1, 9)):
        path = rng.choice(places) / rng.choice(names)
        if path.exists() or path.is_symlink():
            continue
        what = rng.randrange(5)
        if what == 0:
            path.symlink_to(rng.choice((folder, path, "/dev/zero", "nowhere")))
        elif what == 1:
            path.write_bytes(rng.choice((PICTURE, PICTURE[:50], b"", b"a\tb\nc\n", b"\xff\xfe")))
        else:
            path.mkdir()
            places.append(path)
    _use(f"folder:{folder}")
    _use(f"images:{folder}")


def _use(name: str) -> None:
    refused(lambda: registry.dataset_names([name]))
    registry.file_name(name)
    for contents in ("labels", "captions", "images"):
        for split in ("test", "train"):
            refused(lambda contents=contents, split=split: _read(name, contents, split))
    refused(lambda: load_questions(name).check())
    refused(lambda: reid_data.load(name, split="gallery").fingerprint)
    refused(lambda: list_files([name]))


def _read(name: str, contents: str, split: str) -> None:
    source = registry.build_source(name, lambda image: image.size, contents=contents, split=split)
    for index in range(min(3, len(source))):
        sample = source.samples[index]
        assert isinstance(sample, Broken) or sample[0] == (40, 48)


ATTACKS = (
    Attack("own tables", "tables of random cells", _table, per_thousand=500, short=80, seconds=20),
    Attack("own folders", "folders with odd names, links and files", _folder, per_thousand=300, short=50, seconds=20),
)
