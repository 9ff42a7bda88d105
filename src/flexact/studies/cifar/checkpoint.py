"""Checkpoints: tensors as safetensors and everything else as JSON; never a pickle.

checkpoint.json names its tensors' file and the SHA-256 of that file. The tensors of each checkpoint have a new name and
are written first, so whenever a run is killed, checkpoint.json and the tensors that it names belong together.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from flexact.errors import FlexActError, missing_extra
from flexact.io.atomic_files import write_whole
from flexact.io.json_input import parsed_json

VERSION = 1
ABOUT = "checkpoint.json"
_KEY = "flexact_checkpoint"
_TENSORS = re.compile(r"(checkpoint-\d+|network)\.safetensors(\.new)?")


def save(folder: Path, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Replace the folder's checkpoint atomically.

    name: the file of the tensors; no earlier checkpoint of this folder may have it.
    about: plain JSON types.
    """
    try:
        from safetensors.torch import save as serialised
    except ImportError:
        raise missing_extra("safetensors", "safetensors") from None
    data: bytes = serialised({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
    weights = {"file": name, "sha256": hashlib.sha256(data).hexdigest()}
    with naming(folder / name):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / name, data)
    with naming(folder / ABOUT):
        write_whole(folder / ABOUT, json.dumps({_KEY: VERSION, "tensors": weights, **about}, indent=1) + "\n")
    for path in folder.iterdir():
        if _TENSORS.fullmatch(path.name) and path.name != name:
            with suppress(OSError):
                path.unlink()


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Return what the last `save` wrote; None if there is no checkpoint. Raises if the files are damaged."""
    path, remedy = folder / ABOUT, f"Remove {folder} to train this cell from the start."
    if not path.is_file():
        return None
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load as deserialised
    except ImportError:
        raise missing_extra("safetensors", "safetensors") from None
    try:
        about = parsed_json(path.read_bytes())
        if about[_KEY] != VERSION:
            raise ValueError(f"version {about[_KEY]}; this flexact reads version {VERSION}")
        if not _TENSORS.fullmatch(about["tensors"]["file"]):
            raise ValueError("it does not name a file of tensors")
    except (ValueError, KeyError, TypeError) as error:
        raise FlexActError(f"{path} is not a complete checkpoint with tensors ({error}). {remedy}") from None
    weights = folder / about["tensors"]["file"]
    try:
        data = weights.read_bytes()
        if hashlib.sha256(data).hexdigest() != about["tensors"].get("sha256"):
            raise ValueError(f"its SHA-256 differs from the one in {ABOUT}")
        tensors: dict[str, Tensor] = deserialised(data)
    except (OSError, ValueError, SafetensorError) as error:
        raise FlexActError(f"{weights} is missing or damaged ({error}). {remedy}") from None
    return about, tensors


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an OSError while a file is written into an error that names the file."""
    try:
        yield
    except OSError as error:
        raise FlexActError(
            f"cannot write {path}: {error.strerror or error}. Earlier files are complete; free some space, and start "
            "the run again: it resumes from its last checkpoint."
        ) from error
