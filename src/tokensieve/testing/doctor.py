"""What `tokensieve doctor` finds out about an installation: versions, devices, folders, and whether a plan works."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tokensieve
from tokensieve import embedded
from tokensieve.errors import UserError, one_line
from tokensieve.installation.packages import EXTRAS, Extra, Package, packages, version

OLDEST_PYTHON = (3, 10)
PLAN, KEPT = "cover@4:60", 60  # what the self-test applies
GOOD, ABSENT, BAD = "ok", "absent", "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    section: str
    name: str
    state: str  # GOOD; ABSENT: not there, and not needed by all; BAD: to be mended
    text: str


def examine() -> Iterator[Finding]:
    """All findings, one after the other; the self-test is last."""
    yield from versions()
    yield from extras()
    yield from devices()
    yield from folders()
    yield from self_test()


def versions() -> Iterator[Finding]:
    """Python, and the packages that tokensieve itself needs, against their bounds."""
    section = "versions"
    yield Finding(section, "tokensieve", GOOD, f"{tokensieve.__version__} in {Path(tokensieve.__file__).parent}")
    state = GOOD if sys.version_info >= OLDEST_PYTHON else BAD
    yield Finding(section, "Python", state, f"{platform.python_version()} ({platform.system()} {platform.machine()})")
    needed = [package for package in packages() if not package.extras]
    if not needed:
        yield Finding(section, "bounds", ABSENT, "tokensieve runs from a folder that is not installed: nothing to compare with")
    for package in needed:
        yield Finding(section, package.name, GOOD if package.is_good else BAD, _describe(package))


def extras() -> Iterator[Finding]:
    """What the packages of every extra are for, and how to install those that are missing."""
    bounds = {package.name: package for package in packages()}
    for extra in EXTRAS:
        found = [bounds.get(name) or Package(name, "", version(name), (extra.name,)) for name in extra.packages.values()]
        yield _extra(extra, found)


def _extra(extra: Extra, found: list[Package]) -> Finding:
    missing = [package.name for package in found if package.version is None]
    old = [package for package in found if package.version is not None and not package.is_good]
    if old:
        return Finding("extras", extra.name, BAD, f"{', '.join(map(_describe, old))}; {extra.command()}")
    if missing:
        return Finding("extras", extra.name, ABSENT, f"for {extra.use}; without {', '.join(missing)}: {extra.command()}")
    return Finding("extras", extra.name, GOOD, f"{extra.use} ({', '.join(f'{one.name} {one.version}' for one in found)})")


def _describe(package: Package) -> str:
    wanted = f", and {package.name}{package.bounds} is needed" if package.version is None or not package.is_good else ""
    return f"{package.version or 'not installed'}{wanted}"


def devices() -> Iterator[Finding]:
    """What computes."""
    section = "devices"
    try:
        import torch
    except ImportError as error:
        yield Finding(section, "torch", BAD, f"cannot be imported: {one_line(error, 200)}")
        return
    threads = os.environ.get("OMP_NUM_THREADS")
    told = f"; OMP_NUM_THREADS is {threads}" if threads else ""
    yield Finding(section, "CPU", GOOD, f"{os.cpu_count()} processors, {torch.get_num_threads()} threads{told}")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Finding(section, "CUDA", GOOD if names else ABSENT, ", ".join(names) or "no device; plans run on the CPU")
    if sys.platform == "darwin":
        there = torch.backends.mps.is_available()
        yield Finding(section, "MPS", GOOD if there else ABSENT, "available" if there else "not available")


def folders() -> Iterator[Finding]:
    """Where results, temporary files and downloads go."""
    home = Path(os.environ.get("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "huggingface"))
    for name, folder in (("current", Path.cwd()), ("temporary", Path(tempfile.gettempdir())), ("downloads", home)):
        yield _folder(name, folder)
    yield Finding("folders", "network", GOOD, "not needed for the embedded models and data; downloads of other models need it")


def _folder(name: str, folder: Path) -> Finding:
    there = next(one for one in (folder, *folder.parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free / 2**30
    except OSError as error:
        return Finding("folders", name, BAD, f"{folder} cannot be written: {error.strerror}")
    return Finding("folders", name, GOOD if free > 1 else BAD, f"{folder}, {free:.0f} GiB free")


def self_test() -> Iterator[Finding]:
    """A plan on the embedded model: applied, tokens cut, and removed without a trace."""
    section, began = "self-test", time.monotonic()
    try:
        import open_clip  # noqa: F401
    except ImportError:
        yield Finding(section, PLAN, ABSENT, f"skipped: the embedded model needs open_clip: {EXTRAS[0].command()}")
        return
    try:
        told = _try_plan()
    except Exception as error:  # whatever is broken here, it is what the report is for
        reason = one_line(error) if isinstance(error, UserError) else one_line(f"{type(error).__name__}: {error}")
        yield Finding(section, PLAN, BAD, reason)
        return
    yield Finding(section, PLAN, BAD if told else GOOD, told or _passed(time.monotonic() - began))


def _passed(seconds: float) -> str:
    return f"applied to {embedded.MODEL}: 196 -> {KEPT} tokens; removed: bit for bit the model it was ({seconds:.1f} s)"


def _try_plan() -> str:
    """What is wrong; nothing if all is as it should be."""
    import torch

    from tokensieve.cutting.handle import apply
    from tokensieve.models import loading

    model = loading.load(embedded.MODEL, embedded.PRETRAINED, device=torch.device("cpu")).model
    images = torch.randn(2, 3, 112, 112, generator=torch.Generator().manual_seed(0))  # (B, 3, h, w)
    with torch.no_grad():
        before = model.encode_image(images)
        with apply(model, PLAN) as handle:
            cut = model.encode_image(images)
            left = handle.ledger[-1].tokens_out
        after = model.encode_image(images)
    if left != KEPT or cut.shape != before.shape or not torch.isfinite(cut).all():
        return f"{left} tokens were left instead of {KEPT}, or the features are not finite"
    if torch.equal(before, cut):
        return "the plan changed nothing"
    return "" if torch.equal(before, after) else "after the plan was removed the model computes something else"
