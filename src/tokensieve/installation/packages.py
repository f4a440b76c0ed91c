"""The packages that tokensieve can do without, by the extra that installs them, and the versions of those that are there.

A package that is missing is found out when it is used: the import fails, and `missing_package` says what to type. No package is
imported to learn its version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from platform import python_version

from packaging.requirements import InvalidRequirement, Requirement

import tokensieve
from tokensieve.errors import UserError

SHOWN = {"torch": "torch", "transformers": "transformers", "open_clip": "open-clip-torch", "timm": "timm"}


@dataclass(frozen=True)
class Extra:
    """Packages for one use: `pip install "tokensieve[NAME]"`. tests/installation compares them with pyproject.toml."""

    name: str
    use: str
    packages: dict[str, str]  # the name to import -> the name to install

    def command(self) -> str:
        return f'pip install "tokensieve[{self.name}]"'


EXTRAS = (
    Extra(
        "clip",
        "open_clip models; the data sets and tasks of CLIP benchmark",
        {
            "open_clip": "open-clip-torch",
            "transformers": "transformers",
            "clip_benchmark": "clip-benchmark",
            "requests": "requests",
            "webdataset": "webdataset",
        },
    ),
    Extra(
        "vlm",
        "Hugging Face models: LLaVA, Qwen-VL, CLIP, SigLIP, DINO",
        {"transformers": "transformers", "torchvision": "torchvision", "huggingface_hub": "huggingface-hub"},
    ),
    Extra("video", "videos from files", {"av": "av"}),
    Extra("timm", "timm models", {"timm": "timm"}),
    Extra("reid", "re-identification", {"open_clip": "open-clip-torch", "timm": "timm"}),
    Extra("train", "training", {"accelerate": "accelerate", "tensorboard": "tensorboard"}),
    Extra("search", "tokensieve search and tune", {"optuna": "optuna", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}),
    Extra("plots", "pictures: tokensieve show, handle.picture", {"matplotlib": "matplotlib"}),
    Extra("methods", "the method atc", {"scipy": "scipy"}),
    Extra("demo", "the page of tokensieve demo", {"fastapi": "fastapi", "uvicorn": "uvicorn", "matplotlib": "matplotlib"}),
    Extra("export", "ONNX files", {"onnx": "onnx", "onnxscript": "onnxscript", "onnxruntime": "onnxruntime"}),
    Extra("vllm", "serving with vLLM", {"vllm": "vllm"}),
    Extra("lm-eval", "tasks of lm-evaluation-harness", {"lm_eval": "lm_eval"}),
    Extra("ray", "encoding on many machines", {"ray": "ray", "pyarrow": "pyarrow"}),
    Extra("wandb", "curves of trainings and searches on Weights & Biases", {"wandb": "wandb"}),
)


def extra_of(package: str) -> Extra | None:
    """The extra that installs a package, by its name for imports: the one of fewest packages, so plots for matplotlib."""
    having = [extra for extra in EXTRAS if package in extra.packages]
    preferred = {"transformers": "vlm", "open_clip": "clip"}
    named = [extra for extra in having if extra.name == preferred.get(package)]
    return min(named or having, key=lambda extra: len(extra.packages), default=None)


def missing_package(error: ImportError) -> UserError | None:
    """What to install, for the failed import of a package that tokensieve can do without; None for any other error."""
    package = (error.name or "").partition(".")[0]
    extra = extra_of(package)
    if not isinstance(error, ModuleNotFoundError) or extra is None:
        return None
    return UserError(f"{package} is not installed, which is needed for {extra.use}: {extra.command()}")


@contextmanager
def naming_extras() -> Iterator[None]:
    """Failed imports of such packages, as UserErrors that say what to install."""
    try:
        yield
    except ImportError as error:
        if (told := missing_package(error)) is None:
            raise
        raise told from error


def version(distribution: str) -> str | None:
    """The version of a package that is installed; None if it is not."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def main_versions() -> dict[str, str]:
    """The versions of tokensieve, Python and the libraries that compute results, as --version prints them."""
    found = {name: version(distribution) or "not installed" for name, distribution in SHOWN.items()}
    return {"tokensieve": tokensieve.__version__, "Python": python_version(), **found}


@dataclass(frozen=True)
class Package:
    """A package that tokensieve or one of its extras names."""

    name: str
    bounds: str  # such as ">=2.10"; empty: any version
    version: str | None  # None: it is not installed
    extras: tuple[str, ...]  # that install it; none: tokensieve itself needs it

    @property
    def is_good(self) -> bool:
        return self.version is not None and Requirement(f"{self.name}{self.bounds}").specifier.contains(
            self.version, prereleases=True
        )


def packages() -> list[Package]:
    """Every package that the installed tokensieve names, with its bounds. Empty if it is not installed."""
    try:
        lines = metadata.requires("tokensieve") or []
    except metadata.PackageNotFoundError:
        return []
    bounds: dict[str, str] = {}
    extras: dict[str, tuple[str, ...]] = {}
    known = [extra.name for extra in EXTRAS]
    for line in lines:
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        if wanted.name == "tokensieve":  # an extra that is made of others
            continue
        of = tuple(name for name in known if wanted.marker and wanted.marker.evaluate({"extra": name}))
        if wanted.marker is None or of:
            bounds.setdefault(wanted.name, str(wanted.specifier))
            extras[wanted.name] = () if wanted.marker is None else extras.get(wanted.name, ()) + of
    return [Package(name, bounds[name], version(name), extras[name]) for name in bounds]
