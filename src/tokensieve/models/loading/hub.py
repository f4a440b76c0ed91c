"""Whether the Hugging Face Hub can be reached, and what is cached on the disk."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit


def reachable(*hosts: str, seconds: float = 3.0) -> bool:
    """Whether a connection opens to one of these hosts (to the proxy, if the environment names one)."""
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    urls = [proxy if "://" in proxy else f"http://{proxy}"] if proxy else [f"https://{host}" for host in hosts]
    for url in map(urlsplit, urls):
        try:
            port = url.port or (80 if url.scheme == "http" else 443)
            socket.create_connection((url.hostname or "", port), timeout=seconds).close()
            return True
        except OSError:
            continue
    return False


def hub_host() -> str:
    return urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).netloc


def hub_is_reachable() -> bool:
    """Whether the Hub can be reached; if not, all libraries are set to offline mode."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not reachable(hub_host()):
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        constants.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


def offline_message() -> str:
    """Why something cannot be fetched from the Hub, for messages."""
    return f"not on this machine and {hub_host()} cannot be reached (or HF_HUB_OFFLINE is set)"


def is_cached(repository: str, file: str, cache_dir: str | None, revision: str | None = None) -> bool:
    """Whether a file of a repository on the Hub was fetched before."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(repository, file, cache_dir=cache_dir, revision=revision), str)
