"""Folders of reducers, as `Reducers.save_pretrained` writes them: on the disk, or fetched from the Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokensieve.errors import UserError, describe_value, one_line, short
from tokensieve.files import read_bytes, read_json
from tokensieve.models.loading import hub
from tokensieve.parts.files import read_part
from tokensieve.parts.header import CHECKSUM, MAX_HEADER, as_header, check_header, checksum
from tokensieve.parts.protocol import LoadedPart

FORMAT, FIRST_FORMAT = "tokensieve reducers 2", "tokensieve reducers 1"  # the first one has no checksum of its own
CONFIG, CARD = "config.json", "README.md"
MAX_ID = 200  # characters of an id on the Hub
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
KEYS = {"plan": str, "methods": dict, "trained": dict, "tokens": list, "measured": dict}  # what config.json must hold


def find(
    name: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
) -> Path:
    """A file or folder by its name: a path that exists, else, for a text like user/name, a repository of the Hub."""
    if not isinstance(name, (str, Path)):
        raise UserError(f"{describe_value(name)} is not the name of a file, a folder or a repository of the Hub")
    path = Path(name)
    is_path = isinstance(name, Path) or os.path.exists(path) or path.suffix in (".safetensors", ".pt")
    if is_path or len(str(name)) > MAX_ID or not HUB_ID.fullmatch(str(name)):
        return path
    return fetch(str(name), revision=revision, cache_dir=cache_dir, token=token)


def fetch(
    repo_id: str,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
) -> Path:
    """The folder on this machine that holds a repository of the Hub; without a network what was fetched before."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    online = hub.hub_is_reachable()
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                cache_dir=cache_dir,
                token=token,
                allow_patterns=["*.safetensors", CONFIG, CARD],
                local_files_only=not online,
            )
        )
    except LocalEntryNotFoundError:
        raise UserError(
            f"there is no file or folder {repo_id!r}, and as an id on the Hub it is {hub.offline_message()}"
        ) from None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = one_line(error, 200)
        raise UserError(f"there is no file or folder {repo_id!r}, and the Hub does not give it: {reason}") from None


def is_saved(folder: Path) -> bool:
    """Whether save_pretrained() wrote this folder."""
    try:
        content = read_bytes(folder / CONFIG, MAX_HEADER)
    except UserError:
        return False
    return any(known.encode() in content for known in (FORMAT, FIRST_FORMAT))


def seal_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with its checksum."""
    sealed = as_header({**config, "format": FORMAT}, CONFIG)
    return {**sealed, CHECKSUM: checksum(sealed)}


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json; a UserError if the folder holds no reducers."""
    path, shown = folder / CONFIG, short(folder, 200)
    if os.path.isfile(folder):
        raise UserError(f"{shown} is a file; reducers are a folder. Give it as weights= or --weights instead")
    if not os.path.exists(path):
        raise UserError(f"no reducers in {shown!r}: there is no {CONFIG}; Reducers.save_pretrained writes such folders")
    source = f"{shown}/{CONFIG}"
    try:
        config = read_json(path, MAX_HEADER)
    except UserError as error:
        raise UserError(f"{source}: damaged, or not JSON ({short(error, 120)}); save the reducers again") from None
    if not isinstance(config, dict) or config.get("format") not in (FORMAT, FIRST_FORMAT):
        raise UserError(f"{source}: not of tokensieve's reducers; Reducers.save_pretrained writes such files")
    check_header(config, source)
    lacking = [key for key, kind in KEYS.items() if not isinstance(config.get(key), kind)]
    if lacking or not config["methods"]:
        raise UserError(f"{source}: has no {', '.join(lacking) or 'methods'}; save the reducers again")
    if not all(isinstance(row, dict) for row in config["tokens"]):
        raise UserError(f"{source}: its tokens are not a list of tables; save the reducers again")
    for name in config["methods"]:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,99}", name):
            raise UserError(f"{source}: {short(name)!r} is no name of a method")
    if config["format"] == FORMAT and config.get(CHECKSUM) != checksum(config):
        raise UserError(f"{source}: damaged, it is not as it was saved; copy the folder again, or save the reducers again")
    return config


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, LoadedPart]]:
    """config.json and the parts of all methods; a UserError if they do not belong together."""
    config, parts = read_config(folder), {}
    for method, about in config["methods"].items():
        part = read_part(folder / f"{method}.safetensors")
        header = part.about or {}
        if header["method"] != method or not isinstance(about, dict) or header[CHECKSUM] != about.get(CHECKSUM):
            raise UserError(
                f"{short(folder, 200)}: {method}.safetensors is not the one that {CONFIG} describes: the folder is damaged, or "
                "saving it was interrupted; copy it again, or save it again"
            )
        parts[method] = part
    return config, parts
