"""Folders of reducers, as `Reducers.save_pretrained` writes them: on the disk, or fetched from the Hub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tokensieve.errors import UserError, one_line
from tokensieve.models.loading import hub
from tokensieve.parts.files import read_part
from tokensieve.parts.protocol import LoadedPart

FORMAT = "tokensieve reducers 1"
CONFIG, CARD = "config.json", "README.md"
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
    path = Path(name)
    if isinstance(name, Path) or path.exists() or path.suffix in (".safetensors", ".pt") or not HUB_ID.fullmatch(name):
        return path
    return fetch(name, revision=revision, cache_dir=cache_dir, token=token)


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
        return FORMAT in (folder / CONFIG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json; a UserError if the folder holds no reducers."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"no reducers in {str(folder)!r}: there is no {CONFIG}; Reducers.save_pretrained writes such folders"
        ) from None
    except NotADirectoryError:
        raise UserError(f"{folder} is a file; reducers are a folder. Give it as weights= or --weights instead") from None
    except (OSError, ValueError) as error:
        reason = one_line(error, 120)
        raise UserError(f"{path}: damaged, or not JSON ({reason}); save the reducers again") from None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise UserError(f"{path}: not of tokensieve's reducers; Reducers.save_pretrained writes such files")
    lacking = [key for key, kind in KEYS.items() if not isinstance(config.get(key), kind)]
    if lacking or not config["methods"]:
        raise UserError(f"{path}: has no {', '.join(lacking) or 'methods'}; save the reducers again")
    for name in config["methods"]:
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise UserError(f"{path}: {name!r} is no name of a method")
    return config


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, LoadedPart]]:
    """config.json and the parts of all methods; a UserError if they do not belong together."""
    config, parts = read_config(folder), {}
    for method, about in config["methods"].items():
        part = read_part(folder / f"{method}.safetensors")
        header = part.about or {}
        if header["method"] != method or not isinstance(about, dict) or header["sha256"] != about.get("sha256"):
            raise UserError(
                f"{folder}: {method}.safetensors is not the one that {CONFIG} describes: the folder is damaged, or saving it "
                "was interrupted; copy it again, or save it again"
            )
        parts[method] = part
    return config, parts
