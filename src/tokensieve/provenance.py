"""Where results come from: versions of code and libraries, and hashes of values and files."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokensieve
from tokensieve.installation import packages


def to_json_value(value: Any) -> Any:
    """The value as JSON can store it: numbers that are not finite become null, tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    return value


def digest(value: Any) -> str:
    """A short hash of a JSON value."""
    text = json.dumps(to_json_value(value), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_stat(file: str | Path) -> tuple[int, ...]:
    """Size and modification time of a file, which change with its content; () if it does not exist."""
    try:
        about = os.stat(file)
    except OSError:
        return ()
    return about.st_size, about.st_mtime_ns


def versions() -> dict[str, str]:
    """The versions of tokensieve and of the libraries that compute a result, with the build of torch (2.10.0+cu130)."""
    import torch

    found = {name: packages.version(distribution) for name, distribution in packages.SHOWN.items()}
    found |= {"tokensieve": tokensieve.__version__, "torch": str(torch.__version__)}
    return {name: version for name, version in found.items() if version is not None}


@functools.cache
def code_version() -> str:
    """The version and a hash of the source of the package, so that edited code is another version."""
    sources = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        sources.update(path.relative_to(folder).as_posix().encode())
        sources.update(path.read_bytes())
    return f"{tokensieve.__version__}+{sources.hexdigest()[:12]}"
