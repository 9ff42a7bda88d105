"""A model by its name on the hub: downloaded where there is a network, from the hub's own cache where there is none."""

from __future__ import annotations

import os
import socket
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from flexact.errors import FlexActError

_FILES = ["*.json", "*.txt", "*.model", "*.safetensors"]
_OLDER = "pytorch_model*.bin"
"""The weights of a repository that has no safetensors."""
_TRUE = ("1", "ON", "YES", "TRUE")


def has_network() -> bool:
    """Whether the hub, or the proxy before it, can be reached; asked in three seconds, where its own client takes
    minutes."""
    if any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        return False
    from huggingface_hub import constants

    with suppress(OSError, ValueError):  # the last: an address that is none
        there = urlsplit(constants.ENDPOINT)
        proxies = urllib.request.getproxies()
        proxy = proxies.get(there.scheme, proxies.get("all"))
        if proxy is not None and not urllib.request.proxy_bypass(there.hostname or ""):
            there = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        port = there.port or {"http": 80, "socks5": 1080}.get(there.scheme, 443)
        socket.create_connection((there.hostname or "", port), timeout=3).close()
        return True
    return False


def fetched(name: str) -> Path:
    """The folder of a model of the hub; an error that says why there is none."""
    from huggingface_hub import snapshot_download

    why = "there is no network"
    if has_network():
        try:
            folder = Path(snapshot_download(name, allow_patterns=_FILES))
            if not any(folder.glob("*.safetensors")):
                snapshot_download(name, allow_patterns=_OLDER)  # into the same folder
            return folder
        except Exception as error:  # it raises what its many parts raise
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    with suppress(Exception):
        return Path(snapshot_download(name, allow_patterns=_FILES, local_files_only=True))
    raise FlexActError(f"cannot get the model {name!r} ({why}), and the hub's cache does not have it")
