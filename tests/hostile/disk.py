"""Full and read-only disks under every writer: one clear line, earlier files intact, nothing half written, and it goes on."""

from __future__ import annotations

import functools
import http.server
import io
import json
import math
import random
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import yaml
from PIL import Image
from safetensors.torch import load_file

from tests.hostile.attack import Attack, check_message
from tests.hostile.signals import CLIP, SEARCH, TUNE, Job, same_training, use_forked_workers, write_images, write_reid
from tests.support import disks
from tests.support.pictures import picture, png, write_shards
from tests.support.processes import Started, python
from tokensieve.embedded.people import dataset as people

DISK = "disk"  # the folder into which the commands write
FEW = "--limit 6 --batch_size 3 --num_workers 0 --quiet"
REASONS = ("no space left", "file too large", "read-only", "not a directory", "file exists", "disk i/o error", "disk is full")
SAVE = """
import sys, torch
from tokensieve import Reducers, UserError
from tokensieve.methods.registry import get_method
from tokensieve.models import loading
from tokensieve.testing import fresh_part
torch.manual_seed(0)
model = loading.load("sieve-vit-8", "scenes-v1").model
part = fresh_part(get_method("learned"), 128)
try:
    Reducers.of(model, "learned:32", {"learned": part}).save_pretrained("disk/reducers")
except UserError as error:
    sys.exit(f"tokensieve: error: {error}")
"""


def write_nothing(folder: Path) -> None:
    pass


def write_clip(folder: Path) -> None:
    (folder / "file.yaml").write_text(yaml.safe_dump(CLIP | {"workers": 0}))


def write_results(folder: Path) -> None:
    process = python(["-m", "tokensieve", *f"eval --plan anchor:60 --output results/r.json {FEW}".split()], folder)
    assert process.wait() == 0, process.said


def write_script(folder: Path) -> None:
    (folder / "save.py").write_text(SAVE)


def write_web(folder: Path) -> None:
    write_shards(folder / "web", [{"png": png(picture(i % 6, i)), "cls": str(i % 6).encode()} for i in range(6)])


def same_names(one: Path, other: Path) -> bool:
    """The same files, apart from what has a number or a time in its name."""

    def names(folder: Path) -> set[str]:
        found = (str(path.relative_to(folder)) for path in (folder / DISK).rglob("*") if path.is_file())
        return {name for name in found if not re.search(r"\.[0-9]+$|tfevents|trials/|journal|cache/", name)}

    return names(one) <= names(other)


def same_run(one: Path, other: Path) -> bool:
    return same_names(one, other) and same_training(one, other, f"{DISK}/run")


@dataclass(frozen=True)
class Writer(Job):
    older: Callable[[Path], None] = write_nothing  # makes an earlier run of what a whole run left
    variables: tuple[tuple[str, str], ...] = ()
    program: tuple[str, ...] = ("-m", "tokensieve")


def drop_last_checkpoint(disk: Path) -> None:
    for path in disk.glob("run/checkpoints/*8*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def writer(words: str, write: Callable[[Path], object] = write_nothing, **more: object) -> Writer:
    return Writer(tuple(words.split()), (), same_names, write, write_nothing_here, **more)  # type: ignore[arg-type]


def write_nothing_here() -> None:
    pass


def few_people() -> None:
    """The embedded people are drawn in a second."""
    people.DATASETS["embedded-reid"] = {"train_171": people.Subset(1, 2, 1), "test": people.Subset(172, 10, 2)}


TRAIN = ("train", "file.yaml", "--output", "disk/run", "--quiet")
WRITERS = {
    "eval": writer(f"eval --plan none --compare anchor:60 --output disk/{{plan}}.json {FEW}"),
    "probe": writer(f"eval --task linear_probe --fewshot_epochs 1 --feature_root disk/f --output disk/p.json {FEW}"),
    "classifier": writer(f"eval --save_clf disk/clf.pt --output disk/r.json {FEW}"),
    "web": writer(
        "eval --dataset wds/x --model sieve-vit-8 --pretrained scenes-v1 --wds_cache_dir disk/cache "
        f"--output disk/r.json {FEW}",
        write_web,
    ),
    "people": Writer(
        tuple(f"eval --dataset embedded-reid --output disk/{{plan}}.json {FEW}".split()),
        (),
        same_names,
        write_nothing,
        few_people,
        variables=(("TOKENSIEVE_CACHE", f"{DISK}/cache"),),
    ),
    "show": writer("show embedded:1 --plan anchor:60 --output disk/s.png"),
    "report": writer("report results --images 1 --output disk/r.html", write_results),
    "build": writer("build results --output disk/r.csv", write_results),
    "bench": writer(
        "bench --model_type timm --model test_vit --plan anchor@1:8 --batch_size 2 --repeats 1 --quiet --output disk/b.json"
    ),
    "reducers": writer("", write_script, program=("save.py",)),
    "train": Writer(TRAIN, ("--resume",), same_run, write_clip, write_nothing_here, drop_last_checkpoint),
    "train reid": Writer(  # the images of a run that goes on must be the same files
        TRAIN, ("--resume",), same_run, partial(write_reid, {}), write_nothing_here, shutil.rmtree
    ),
}
LONG_WRITERS = {
    "tune": writer(f"{TUNE} --keep 20 --methods cover,grid --quiet --output disk/tune", write_images, older=shutil.rmtree),
    "search": Writer(
        ("search", "file.yaml", "--output", "disk/search", "--quiet"),
        (),
        same_names,
        partial(write_reid, SEARCH),
        use_forked_workers,
        shutil.rmtree,  # a study of these images, but not of these files
    ),
}


# ------------------------------------------------------------------------------------------------------------------- tries


def start(job: Writer, folder: Path, disk: Callable[[], None], more: tuple[str, ...], **variables: str) -> Started:
    own = {name: str(folder / value) for name, value in job.variables}
    prepare = partial(prepare_process, job.prepare, disk)
    return python([*job.program, *job.words, *more], folder, prepare, **own, **variables)


def prepare_process(own: Callable[[], None], disk: Callable[[], None]) -> None:
    own()
    disk()


@cache
def whole(job: Writer) -> Path:
    """The folder of a run on a disk with room; it stays until this process ends."""
    kept = tempfile.TemporaryDirectory()
    KEPT.append(kept)
    folder = Path(kept.name)
    (folder / DISK).mkdir()
    job.write(folder)
    with served(folder) as address:
        process = start(job, folder, write_nothing_here, address)
        assert process.wait() == 0, process.said
    return folder


KEPT: list[tempfile.TemporaryDirectory[str]] = []


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, ...]]:
    """The flag with the address of a web dataset, if the folder has one."""
    if not (folder / "web").exists():
        yield ()
        return

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder / "web"))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield "--dataset_root", f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def bad_disk(rng: random.Random, disk: Path, reference: Path) -> tuple[str, Callable[[], None]]:
    """A random kind of bad disk: its name, and what sets it up in the process."""
    sizes = [path.stat().st_size for path in reference.rglob("*") if path.is_file()]
    kinds = ["limit", "file", *(["small", "small", "read-only"] if disks.can_mount() else [])]
    kind = rng.choice(kinds)
    if kind == "limit":
        return kind, partial(disks.limit_files, int(math.exp(rng.uniform(math.log(1000), math.log(2 * max(sizes))))))
    if kind == "small":
        return kind, partial(disks.mount_small, disk, int(rng.uniform(0, 1.2 * sum(sizes))))
    if kind == "read-only":
        return kind, partial(disks.mount_read_only, disk)
    shutil.rmtree(disk)
    disk.write_text("a file, not a folder")
    return kind, write_nothing_here


def check_content(path: Path) -> None:
    """A file that can be seen is whole."""
    content = path.read_bytes()
    if path.suffix == ".json":
        json.loads(content)
    elif path.suffix == ".safetensors":
        load_file(path)
    elif path.suffix == ".png":
        Image.open(io.BytesIO(content)).verify()
    elif path.suffix == ".html":
        assert content.rstrip().endswith(b"</html>"), path
    elif path.suffix == ".jpg":
        Image.open(io.BytesIO(content)).load()


def check_disk(before: dict[str, bytes], disk: Path) -> None:
    """Nothing half written, nothing left over, and nothing lost: replaced by something whole, or there under a number."""
    for path in disk.rglob("*"):
        assert not path.name.endswith(".tmp") and ".unfinished" not in path.name, f"{path} is left"
        if path.is_file():
            check_content(path)
    for name in before:
        assert list(disk.glob(f"{name}*")), f"{name} is gone"


def _write(rng: random.Random, folder: Path, writers: dict[str, Writer]) -> None:
    name = rng.choice(sorted(writers))
    job = writers[name]
    reference, disk = whole(job), folder / DISK
    job.write(folder)
    again: tuple[str, ...] = ()
    if rng.random() < 0.5:
        shutil.copytree(reference / DISK, disk)
        job.older(disk)
        again = job.again if disk.exists() else ()
    disk.mkdir(exist_ok=True)
    before = {str(path.relative_to(disk)): path.read_bytes() for path in disk.rglob("*") if path.is_file()}
    kind, prepare = bad_disk(rng, disk, reference / DISK)
    variables = {"TMPDIR": str(disk)} if kind == "small" and rng.random() < 0.3 else {}
    with served(folder) as address:
        process = start(job, folder, prepare, (*again, *address), **variables)
        code = process.wait(120)
        said = process.said
        where = f"{name}, {kind}, exit code {code}: {said[-1500:]}"
        assert "Traceback" not in said and "unexpected error" not in said, where
        assert code in (0, 1, 2), where
        if code:
            message = said.rpartition("tokensieve: error: ")[2].rstrip("\n")
            check_message(message)
            assert any(reason in message.lower() for reason in REASONS) and DISK in message, where
        if kind == "file":
            assert code and disk.read_text() == "a file, not a folder", where
            return
        left = disk.with_suffix(".after") if kind == "small" else disk
        check_disk(before, left)
        if left != disk:
            shutil.rmtree(disk)
            left.rename(disk)
        if code:
            begun = job.again if (disk / "run" / "checkpoints").exists() else ()
            process = start(job, folder, write_nothing_here, (*begun, *address))
            assert process.wait(120) == 0, f"{where}; then, with room: {process.said[-1500:]}"
        assert job.compare(reference, folder), f"{where}: other results than with room"


ATTACKS = (
    Attack(
        "disk",
        "full and read-only disks, limits on files, and files in place of folders, for every writer",
        partial(_write, writers=WRITERS),
        per_thousand=15,
        short=3,
        seconds=200,
        is_slow=True,
    ),
    Attack(
        "disk in searches",
        "the same for tune and search",
        partial(_write, writers=LONG_WRITERS),
        per_thousand=3,
        short=1,
        seconds=300,
        is_slow=True,
    ),
)
