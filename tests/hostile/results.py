"""Result files: strange names, many writers at once, and damaged files that `build` and `report` are given."""

from __future__ import annotations

import contextlib
import copy
import csv
import errno
import io
import json
import math
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

from tests.hostile.attack import Attack, check_message, refused
from tests.hostile.mutate import NONSENSE, insert_nonsense, mutate_bytes, mutate_text
from tests.hostile.plans import plan_text
from tokensieve import files, report
from tokensieve.evaluation import csv_table, results

FIELDS = ("dataset", "pretrained", "pretrained_full_path", "model", "language", "task", "plan")
PIECES = (*(f"{{{name}}}" for name in FIELDS), "/", "_", "-", ".", ".json", ".JSON", "x", "é", "名", " ", "{{", "}}", "a" * 120)
BAD_FIELDS = (
    "{plan:>99999999999}",
    "{plan!r}",
    "{plan.__class__}",
    "{0}",
    "{}",
    "{plan[0]}",
    "{nothing}",
    "{",
    "}",
    "{plan:{model}}",
)
PLANS = ("none", "anchor@6(k=10,m=50,alpha=0.5)", "tome@*:-8", "anchor:60(rest=merge)", "resize(size=96) + cover:32")


def result(rng: random.Random, plan: str = "none", key: str = "") -> dict[str, Any]:
    """A result as eval writes it."""
    return {
        "dataset": "embedded",
        "model": "big-model",
        "pretrained": "tag",
        "task": rng.choice(("zeroshot_classification", "zeroshot_retrieval", "vqa", "reid", "mine")),
        "metrics": {"acc1": rng.random(), "acc5": None, "acc1_stderr": 0.01, "recall@5": -0.5},
        "language": "en",
        "reduction": {
            "plan": plan,
            "applied": plan != "none",
            "reason": None,
            "layers": [{"layer": "6", "tokens_in": 196, "tokens_out": 60}],
            "token_fusion": "cls",
            "tokens_in": 196,
            "tokens_out": 60,
            "gflops": 0.5,
            "gflops_full": 0.8,
            "images_per_second": rng.uniform(50, 200),
            "images_per_second_full": 100.0,
            "notes": ["a note"],
        },
        "run": {
            "versions": {"tokensieve": "0.1.0", "torch": "2.13.0"},
            "model_type": "open_clip",
            "seed": rng.randrange(5),
            "limit": 50,
            "device": "cpu",
            "dtype": "float32",
            "amp": False,
            "batch_size": 32,
            "weights": "57fc5ccb",
            "data": "0011",
            "arguments": {"dataset_root": "{dataset}", "weights": ["a", "b"]},
            "time": "2026-01-02T03:04:05.000006+00:00",
            "key": key or rng.randbytes(16).hex(),
        },
    }


# ------------------------------------------------------------------------------------------------------------------- names


def _template(rng: random.Random) -> str:
    text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 6))).lstrip("/")
    kind = rng.randrange(6)
    if kind == 0:
        return insert_nonsense(rng, text)
    if kind == 1:
        return mutate_text(rng, text)
    if kind == 2:
        return text + rng.choice(BAD_FIELDS) + rng.choice(("", ".json"))
    return text + ".json"


def _field(rng: random.Random) -> str:
    return rng.choice(("x", "ViT-B-16", "é" * 200, "", "..", rng.choice(NONSENSE).replace("/", "_"), "{plan}", "x" * 500))


def _names(rng: random.Random, folder: Path) -> None:
    """A template of a file name is refused, or names a file that is written and read back, another one for another plan."""
    deep = folder.joinpath(*"abcdefgh")  # some names lead upwards
    deep.mkdir(parents=True)
    names = {name: _field(rng) for name in FIELDS[:-1]}
    template, several = f"{deep}/{_template(rng)}", rng.random() < 0.5
    plans = [rng.choice(PLANS), plan_text(rng) + rng.choice(("", " + " + " + ".join(plan_text(rng) for _ in range(30))))]
    paths: list[Path] = []

    def name_all() -> None:
        for plan in plans:
            paths.append(results.result_path(template, plan=plan, several_plans=several, **names))
            files.check_writable(paths[-1])

    if refused(name_all) is not None:
        return
    if several and files.slug(plans[0]) != files.slug(plans[1]) and "{{plan}}" not in template:
        assert paths[0] != paths[1], "two plans have one name"
    written = []
    for path in paths:
        for _ in range(rng.randint(1, 3)):
            made = result(rng)
            with contextlib.redirect_stderr(io.StringIO()) as said:
                assert refused(lambda: written.append((results.write_result(path, made), made))) is None  # noqa: B023
            assert (written[-1][0] != path) == ("is taken" in said.getvalue())
            check_message(said.getvalue() or "nothing")
    assert len({path for path, _ in written}) == len(written)
    for path, made in written:
        with contextlib.redirect_stderr(io.StringIO()):
            (read,) = results.read_results([str(path)])
        assert read["run"].pop("newest") is True and read == made
        assert not [name for name in os.listdir(path.parent) if name.endswith(".tmp")]


# ------------------------------------------------------------------------------------------------------------------ writers


@contextlib.contextmanager
def _without_links(yes: bool) -> Iterator[None]:
    """As on a file system without hard links."""
    if not yes:
        yield
        return
    with mock.patch("os.link", side_effect=OSError(errno.EPERM, "no links here")):
        yield


def _in_processes(jobs: list[Callable[[], None]]) -> None:
    children = []
    for job in jobs:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                sys.stderr = io.StringIO()
                job()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children), "a writer failed"


def _in_threads(jobs: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    with contextlib.redirect_stderr(io.StringIO()):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def _writers(rng: random.Random, folder: Path) -> None:
    """Several writers of one name at the same moment: every result is there, and every content of a replaced file."""
    path = folder / rng.choice(("r.json", "r.JSON", "r"))
    n_writers, n_runs = rng.randint(2, 8), rng.randint(1, 6)
    key = rng.randbytes(16).hex() if rng.random() < 0.5 else ""  # else every run has a key of its own
    rows = [[result(rng, key=key) for _ in range(n_runs)] for _ in range(n_writers)]
    replaces = rng.random() < 0.3  # as build and report write

    def job(own: list[dict[str, Any]]) -> Callable[[], None]:
        def write() -> None:
            for row in own:
                if replaces:
                    files.replace_file(path, files.json_bytes(row))
                else:
                    results.write_result(path, row)

        return write

    with _without_links(rng.random() < 0.4 and not replaces):
        rng.choice((_in_processes, _in_threads))([job(own) for own in rows])
    names = sorted(os.listdir(folder))
    assert len(names) == n_writers * n_runs, f"{n_writers} x {n_runs} were written: {names}"
    seen = [json.loads((folder / name).read_text()) for name in names]
    wanted = [row for own in rows for row in own]
    assert sorted(map(json.dumps, seen)) == sorted(map(json.dumps, wanted))
    if path.suffix:
        read = results.read_results([str(folder)])
        newest = Counter(one["run"]["key"] for one in read if one["run"]["newest"])
        assert len(read) == len(wanted) and newest == Counter({one["run"]["key"] for one in wanted})


# ------------------------------------------------------------------------------------------------------------------- damage

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 3, 10**18, 10**400, -(10**4000), 0.5, -0.5, 1e-320, -1e-310, 1e-200, 1e99, 1e308),
    *(math.inf, math.nan, "", "x", "=1+1", "+1", "-1", "-0.5", "@x", "\t=1", "\r", "\x00", "\x1b[2J", "\ud800", "\u202e"),
    *("<script>alert(1)</script>", "'\"><img src=x onerror=alert(1)>", "</title><script>", "a\nb", "x" * 5000),
    *("{dataset:>9999999999}", "none", "anchor@6:60", "2026-01-02", "yesterday"),
    *("9999-12-31T23:59:59.999999+00:00", "0001-01-01T00:00:00+23:59"),
    *([], {}, [1], [None, "x", [2]], {"a": 1}, {"=1": "<b>"}, {"key": []}, ["<script>"] * 3, [[]] * 5, {"": {}}),
)


def _nested(rng: random.Random) -> Any:
    value: Any = 1
    for _ in range(rng.choice((5, 100, 400, 900, 2000))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def _damage(rng: random.Random, whole: dict[str, Any]) -> dict[str, Any]:
    """The result with a few values replaced, removed or added, in any of its parts."""
    whole = copy.deepcopy(whole)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        part: Any = whole
        while True:
            inner = [
                value
                for value in (part.values() if isinstance(part, dict) else part)
                if isinstance(value, (dict, list)) and value
            ]
            if not inner or rng.random() < 0.35:
                break
            part = rng.choice(inner)
        value = _nested(rng) if rng.random() < 0.03 else rng.choice(VALUES)
        kind = rng.randrange(8)
        if isinstance(part, list):
            part[rng.randrange(len(part))] = value
        elif kind == 0 and part:
            del part[rng.choice(list(part))]
        elif kind == 1:
            part[rng.choice([one for one in VALUES if isinstance(one, str)])] = value
        elif part:
            part[rng.choice(list(part))] = value
    return whole


def _content(rng: random.Random, whole: dict[str, Any]) -> bytes:
    damaged = _damage(rng, whole)
    try:
        text = json.dumps(damaged)
    except (RecursionError, ValueError):
        text = '{"a":' * 5000
    content = text.encode()
    kind = rng.randrange(12)
    if kind == 0:
        return mutate_bytes(rng, content)
    if kind == 1:
        return mutate_text(rng, text).encode(errors="surrogatepass")
    return content


class Page(HTMLParser):
    """What a page holds: tags, attributes that run something, addresses."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [tag] if tag in ("script", "iframe", "object", "embed", "link", "base", "form", "b") else []
        for name, value in attrs:
            leads_away = name in ("src", "href") and not (value or "").startswith(("#", "data:image/"))
            self.found += [name] if name.startswith("on") or leads_away else []

    handle_startendtag = handle_starttag


def _damaged(rng: random.Random, folder: Path) -> None:
    """Damaged files are read or left out with a message; what is made of them is valid, and nothing in it can be run."""
    given = folder / "results"
    given.mkdir()
    whole = result(rng, rng.choice(PLANS))
    (given / "good.json").write_text(json.dumps(whole))
    for number in range(rng.randint(1, 3)):
        name = rng.choice(("x{}.json", "x{}.JSON", "good_00112233-{}.json", "good.json.{}")).format(number)
        (given / name).write_bytes(_content(rng, whole))
    read: list[list[dict[str, Any]]] = []
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert refused(lambda: read.append(results.read_results([str(given)]))) is None
        for path in given.iterdir():
            refused(lambda: results.read_results([str(path)]))  # noqa: B023
        results.find_run(given / "good.json", whole["run"]["key"])
        assert refused(lambda: csv_table.build_csv([str(given)], str(folder / "x.csv"))) is None
        (found,) = read
        pages: list[str] = []
        assert (
            refused(lambda: pages.append(report.build(found, title=rng.choice((None, "<script>")), images=rng.randrange(2))))
            is None
        )
    for line in said.getvalue().splitlines():
        check_message(line)
    with open(folder / "x.csv", newline="") as file:
        cells = list(csv.reader(line.replace("\0", "") for line in file))
    assert len(cells) == len(found) + 1 and len(set(map(len, cells))) == 1
    for cell in (cell for row in cells for cell in row if cell.startswith(files.FORMULA)):
        float(cell)
    assert Page(pages[0]).found == ["script"]  # the one that sorts tables, which the page allows by its hash
    pages[0].encode()


ATTACKS = (
    # a file is flushed to the disk before it gets its name, which takes most of the time
    Attack("result-names", "templates, names and plans that name result files", _names, short=80),
    Attack("result-writers", "several writers of one name at once", _writers, per_thousand=200, short=15),
    Attack("result-files", "damaged results in build and report", _damaged, short=100),
)
