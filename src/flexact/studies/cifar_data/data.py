"""Images and labels of CIFAR-10 and CIFAR-100 as tensors, read from the official binary files.

A complete set has the official number of records in every file. Part of a set, such as a small one that a test writes,
is read with ``complete=False``: the same files, each with at least one record.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flexact.errors import FlexActError
from flexact.studies.cifar_data.archive import download
from flexact.studies.cifar_data.layouts import LAYOUTS, SIDE, Layout, layout_of

__all__ = ["NAMES", "Images", "download", "is_there", "load"]

NAMES = tuple(LAYOUTS)


@dataclass(frozen=True, eq=False)
class Images:
    """A set of images in memory."""

    name: str
    train_x: Tensor
    """uint8 (N, 3, 32, 32): red, green and blue planes."""
    train_y: Tensor
    """int64 (N,): classes from 0."""
    test_x: Tensor
    test_y: Tensor
    classes: int
    mean: tuple[float, ...]
    """The mean of each channel of these training images, on the scale from 0 to 1."""
    std: tuple[float, ...]
    sha256: str
    """The SHA-256 of all files' bytes, in their order."""

    def to(self, device: torch.device | str) -> Images:
        """The same images on a device."""
        parts = {part: getattr(self, part).to(device) for part in ("train_x", "train_y", "test_x", "test_y")}
        return replace(self, **parts)


def is_there(name: str, folder: Path) -> bool:
    """Whether a folder, or the archive's folder inside it, has every file of a set."""
    layout = layout_of(name)
    return all((layout.place(Path(folder)) / file).is_file() for file in layout.files)


def load(name: str, folder: Path, complete: bool = True) -> Images:
    """Read a set from the folder with its files, or from the parent of that folder."""
    layout, folder = layout_of(name), Path(folder)
    place = layout.place(folder)
    missing = [file for file in layout.files if not (place / file).is_file()]
    if missing:
        raise FlexActError(
            f"there is no {layout.title} in {folder}: {place} lacks {', '.join(missing)} of the binary "
            "version. (The Python version has other files; they are pickles, which can run code and are never read.) "
            f"Download it with: {layout.command(folder)}"
        )
    contents = {file: _content(place / file, layout, folder, complete) for file in layout.files}
    train_x, train_y = _images(layout, [contents[file] for file in layout.train_files])
    test_x, test_y = _images(layout, [contents[file] for file in layout.test_files])
    digest = hashlib.sha256()
    for content in contents.values():
        digest.update(content)
    mean, std = _channels(train_x)
    return Images(name, train_x, train_y, test_x, test_y, layout.classes, mean, std, digest.hexdigest())


def _content(path: Path, layout: Layout, folder: Path, complete: bool) -> bytearray:
    """The bytes of a file, whose size and labels are checked."""
    data, record = bytearray(path.read_bytes()), layout.record_bytes
    remedy = f"Remove it, and download it again with: {layout.command(folder)}"
    if complete and len(data) != layout.bytes_of(path.name):
        raise FlexActError(
            f"{path} has {len(data):,} bytes, not {layout.bytes_of(path.name):,} ({layout.records[path.name]:,} "
            f"records of {record:,} bytes). To use part of a set, give --partial. {remedy}"
        )
    if not data or len(data) % record:
        raise FlexActError(f"{path} has {len(data):,} bytes, which is not a multiple of {record:,}. {remedy}")
    records = torch.frombuffer(data, dtype=torch.uint8).view(-1, record)
    for byte, limit in enumerate(layout.labels):
        wrong = (records[:, byte] >= limit).nonzero()
        if len(wrong):
            number = int(wrong[0])
            raise FlexActError(
                f"{path}, record {number}: label byte {byte} is {int(records[number, byte])}; expected 0 to "
                f"{limit - 1}. {remedy}"
            )
    return data


def _images(layout: Layout, contents: list[bytearray]) -> tuple[Tensor, Tensor]:
    """The images and classes of files, in their order."""
    records = torch.cat([torch.frombuffer(content, dtype=torch.uint8) for content in contents])
    records, labels = records.view(-1, layout.record_bytes), len(layout.labels)
    return records[:, labels:].contiguous().view(-1, 3, SIDE, SIDE), records[:, labels - 1].long()


def _channels(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The mean and standard deviation of each channel, from integer sums, which do not depend on the order."""
    values = torch.arange(256, dtype=torch.int64)
    means, deviations = [], []
    for channel in range(3):
        counts = images[:, channel].flatten().bincount(minlength=256)
        number, total, squares = (int(sum_) for sum_ in (counts.sum(), counts @ values, counts @ values**2))
        means.append(total / number / 255)
        deviations.append((number * squares - total**2) ** 0.5 / number / 255)
    return tuple(means), tuple(deviations)
