"""Names and roots of data sets that a shell would run: no program starts, and the data set loads or is refused."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import urllib.error
import urllib.request
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import clip_benchmark.datasets.builder

from tests.hostile.attack import Attack, refused
from tests.hostile.mutate import insert_nonsense, mutate_text
from tokensieve.data import clip_benchmark, registry
from tokensieve.models.loading import hub

NAMES = (
    *(
        *clip_benchmark.CLASSIFICATION,
        *clip_benchmark.CAPTIONS,
        "wds/x",
        "wds/vtab/flowers",
        "wds/a b",
        "tfds/x",
        "vtab/caltech101",
    ),
    *("embedded", "embedded-captions", "gqa:x", "pope:x", "textvqa:x", "vqav2:x", "scienceqa:x", "mmbench:x", "RGBNT201"),
)
ROOTS = (
    *("x://'; touch PWNED; '", "'; touch PWNED; '", "$(touch PWNED)", "`touch PWNED`", "| touch PWNED", "a;touch PWNED", "-rf"),
    *(
        "pipe:touch PWNED",
        "pipe://touch PWNED",
        "http://127.0.0.1:1/$(touch PWNED)",
        "https://127.0.0.1:1/",
        "ftp://127.0.0.1:1",
    ),
    *(
        "s3://x/;touch PWNED",
        "gs://x",
        "file://x",
        "\n touch PWNED\n",
        "x",
        "{dataset}",
        "{dataset.__class__}",
        "x" * 5000,
        "\x00",
    ),
    *("{dataset:>999999999}", "{dataset_cleaned}/;touch PWNED", "~nobody/x", "%s;touch PWNED", "a b\tc", "ü", "x\\y"),
)


class _Programs(list[str]):
    """Takes the place of what starts programs, and notes each call: an error alone could be caught on its way."""

    def __call__(self, *args: Any, **_: Any) -> Any:
        self.append(repr(args)[:200])
        raise OSError("a program was started")


def _no_answer(*_: Any, **__: Any) -> Any:
    raise urllib.error.URLError("no answer")


def _build(rng: random.Random, folder: Path) -> None:
    name, root = rng.choice(NAMES), rng.choice(ROOTS)
    if rng.random() < 0.4:
        name = rng.choice((mutate_text, insert_nonsense))(rng, name)
    if rng.random() < 0.4:
        root = rng.choice((mutate_text, insert_nonsense))(rng, root).lstrip(
            "/.~"
        )  # not the whole disk, which would be searched
    before, programs = os.getcwd(), _Programs()
    os.chdir(folder)
    try:
        if rng.random() < 0.3 and not set(root) & set("/.~"):
            with contextlib.suppress(OSError, ValueError):  # no name of a folder
                (folder / root).mkdir()
        with (
            warnings.catch_warnings(),
            mock.patch.object(hub, "reachable", lambda *_, **__: True),
            mock.patch.object(urllib.request, "urlopen", _no_answer),
            mock.patch.object(urllib.request.OpenerDirector, "open", _no_answer),
            mock.patch("requests.Session.request", _no_answer),
            mock.patch.object(os, "system", programs),
            mock.patch.object(os, "popen", programs),
            mock.patch.object(subprocess.Popen, "__init__", programs),
        ):
            warnings.simplefilter("ignore")
            refused(lambda: registry.build_source(name, lambda image: image, root=root))
        assert not programs, f"a program was started: {programs[0]}"
        assert not any(found.is_file() for found in folder.rglob("PWNED")), "a command ran"
    finally:
        os.chdir(before)


ATTACKS = (Attack("shell", "names and roots of data sets with commands in them", _build, per_thousand=400, short=150),)
