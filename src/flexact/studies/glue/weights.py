"""Whether the weights of a model are there and whole, as far as can be seen without reading all of them."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

from flexact.errors import FlexActError, missing_extra
from flexact.io.json_input import parsed_json


def whole_files(path: Path) -> list[Path]:
    """A file of weights, or an index with the files that it names; an error where one is cut off or damaged."""
    weights = _parts(path) if path.suffix == ".json" else [path]
    for file in weights:
        why = _damage(file)
        if why is not None:
            raise FlexActError(f"{file} is cut off or damaged ({why}). Copy or download this file again.")
    return list(dict.fromkeys([path, *weights]))


def _parts(index: Path) -> Sequence[Path]:
    """The files that an index names; each of them is there."""
    try:
        files = sorted({index.parent / name for name in parsed_json(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FlexActError(
            f"{index} is cut off or damaged ({type(error).__name__}: {error}). Copy or download this file again."
        ) from None
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FlexActError(
            f"{index} names {len(files)} files of weights, and {missing[0]} is not there; copy the whole model."
        )
    return files


def _damage(file: Path) -> str | None:
    """What is wrong with one file; None where nothing is seen."""
    if file.suffix == ".safetensors":
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise missing_extra("safetensors", "glue") from None
        try:
            with safe_open(file, framework="pt"):  # it holds the header against the size of the file
                return None
        except (SafetensorError, OSError) as error:
            return str(error)
    with file.open("rb") as opened:
        is_zip = opened.read(2) == b"PK"  # what torch.save writes; its older format is none
    return "its table of contents is missing" if is_zip and not zipfile.is_zipfile(file) else None
