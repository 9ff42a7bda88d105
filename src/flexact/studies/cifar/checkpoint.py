"""Checkpoints: tensors as safetensors, everything else as JSON; never a pickle.

checkpoint.json names its file of tensors and that file's SHA-256. The tensors of each checkpoint have a name of their
own and are written first, so that whenever a run is killed the JSON there is and the tensors it names belong together.
"""

from __future__ import annotations

import hashlib
import json
import os
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
_AFRESH = "Remove {folder} to train this cell from the start."


def save(folder: Path, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a checkpoint in the place of the last one, whole or not at all.

    name: of the file of tensors, which no earlier checkpoint of this folder may have.
    about: plain JSON types, with the "step" that it is of.
    """
    try:
        from safetensors.torch import save as serialised
    except ImportError:
        raise missing_extra("safetensors", "safetensors") from None
    data: bytes = serialised({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
    weights = {"file": name, "sha256": hashlib.sha256(data).hexdigest()}
    text = json.dumps({_KEY: VERSION, "tensors": weights, **about}, indent=1) + "\n"
    with naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with naming(folder / name):
        write_whole(folder / name, data)
        _settle(folder)
    with naming(folder / ABOUT):
        write_whole(folder / ABOUT, text)
        _settle(folder)
    for path in folder.iterdir():
        if _TENSORS.fullmatch(path.name) and path.name != name:
            with suppress(OSError):
                path.unlink()


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """What the last `save` wrote, checked; None where there is no checkpoint."""
    path = folder / ABOUT
    if not path.is_file():
        return None
    about = _about(path)
    weights = folder / about["tensors"]["file"]
    if not weights.is_file():
        raise FlexActError(f"{path} names {weights.name}, which is not there. {_AFRESH.format(folder=folder)}")
    data = weights.read_bytes()
    if hashlib.sha256(data).hexdigest() != about["tensors"]["sha256"]:
        raise FlexActError(
            f"{weights} is not the file that {path} names: it was cut off, damaged or replaced (its SHA-256 differs). "
            f"{_AFRESH.format(folder=folder)}"
        )
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load as deserialised
    except ImportError:
        raise missing_extra("safetensors", "safetensors") from None
    try:
        tensors: dict[str, Tensor] = deserialised(data)
    except SafetensorError as error:
        raise FlexActError(f"{weights} is no safetensors file ({error}). {_AFRESH.format(folder=folder)}") from None
    return about, tensors


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Around writing a file: what the system says against it becomes an error that names the file."""
    try:
        yield
    except OSError as error:
        raise FlexActError(
            f"cannot write {path}: {error.strerror or error}. What was written before is whole; make room, or mend "
            "what is in the way, and start the run again: it goes on from its last checkpoint."
        ) from error


def _about(path: Path) -> dict[str, Any]:
    """The JSON of a checkpoint, with what this module needs of it checked."""
    again = _AFRESH.format(folder=path.parent)
    try:
        about = parsed_json(path.read_bytes())
    except ValueError as error:  # also of bytes that are no text
        raise FlexActError(f"{path} is cut off or damaged: no valid JSON ({error}). {again}") from None
    version = about.get(_KEY) if isinstance(about, dict) else None
    if isinstance(version, bool) or not isinstance(version, int):
        raise FlexActError(f"{path} is no checkpoint of the image study: it has no {_KEY!r}. {again}")
    if version > VERSION:
        raise FlexActError(f"{path} has version {version}, and this flexact reads up to {VERSION}; update flexact.")
    if isinstance(about.get("step"), bool) or not isinstance(about.get("step"), int):
        raise FlexActError(f"{path} does not say of which step it is. {again}")
    weights = about.get("tensors")
    file = weights.get("file") if isinstance(weights, dict) else None
    if not isinstance(file, str) or not _TENSORS.fullmatch(file) or not isinstance(weights.get("sha256"), str):
        raise FlexActError(f"{path} does not name its file of tensors and that file's sha256. {again}")
    return dict(about)


def _settle(folder: Path) -> None:
    """Make a renaming last, also through a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
