"""TODO docstring."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit


def reachable(*hosts: str, seconds: float = 3.0) -> bool:
    """Whether a connection opens to one of these hosts (to the proxy, if the environment names one)."""
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    places = [urlsplit(proxy if "://" in proxy else f"http://{proxy}")] if proxy else [urlsplit(f"https://{h}") for h in hosts]
    for place in places:
        try:
            port = place.port or (80 if place.scheme == "http" else 443)
            socket.create_connection((place.hostname or "", port), timeout=seconds).close()
            return True
        except OSError:
            continue
    return False


def hub_host() -> str:
    return urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).netloc


def hub_is_reachable() -> bool:
    """Whether the Hub can be asked; if not, all libraries are told not to try."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not reachable(hub_host()):
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        constants.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


def offline_message() -> str:
    """What is wrong with a thing that has to come from the Hub, and cannot."""
    return f"not on this machine and {hub_host()} cannot be reached (or HF_HUB_OFFLINE is set)"


def is_cached(repository: str, file: str, cache_dir: str | None, revision: str | None = None) -> bool:
    """Whether a file of a repository on the Hub was fetched before."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repository, file, cache_dir=cache_dir, revision=revision), str)
