"""Images and labels of CIFAR-10 and CIFAR-100 as tensors, read from the official binary files, which are checked.

A set is `complete` when every file has its official number of records and every class its number of images. A part
of a set, such as a small one that a test writes, is read with ``complete=False``: the same files, each of one or
more whole records, and labels in the official ranges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flexact.errors import FlexActError
from flexact.io.markdown_tables import counted
from flexact.studies.cifar_data.archive import download
from flexact.studies.cifar_data.layouts import LAYOUTS, SIDE, Layout, layout_of, refuse_others
from flexact.studies.grid.digest import sha256_of

__all__ = ["NAMES", "Images", "download", "is_there", "load"]

NAMES = tuple(LAYOUTS)


@dataclass(frozen=True, eq=False)
class Images:
    """A set of images, all of it in memory."""

    name: str
    train_x: Tensor
    """uint8 (N, 3, 32, 32): red, green and blue planes."""
    train_y: Tensor
    """int64 (N,): classes from 0."""
    test_x: Tensor
    test_y: Tensor
    classes: int
    mean: tuple[float, ...]
    """Of each channel of these training images, on the scale from 0 to 1."""
    std: tuple[float, ...]
    sha256: str
    """Of the bytes of its files, one after another: the same images in the same order have the same."""

    def to(self, device: torch.device | str) -> Images:
        """The same images on a device."""
        parts = {part: getattr(self, part).to(device) for part in ("train_x", "train_y", "test_x", "test_y")}
        return replace(self, **parts)


def is_there(name: str, folder: Path) -> bool:
    """Whether every file of a set is in a folder or in the archive's folder inside it; says nothing of what is in them.

    A folder that holds the other set or the pickled version is refused.
    """
    layout, folder = layout_of(name), Path(folder)
    refuse_others(layout, folder)
    return all((layout.place(folder) / file).is_file() for file in layout.files)


def load(name: str, folder: Path, complete: bool = True) -> Images:
    """Read a set from a folder: the one with the files, or its parent."""
    layout, folder = layout_of(name), Path(folder)
    refuse_others(layout, folder)
    place = layout.place(folder)
    _check_files(layout, folder, place, complete)
    contents = {file: _content(place / file, layout) for file in layout.files}
    train_x, train_y = _images(layout, place, contents, layout.train_files)
    test_x, test_y = _images(layout, place, contents, layout.test_files)
    if complete:
        _check_classes(layout, place, "training", train_y)
        _check_classes(layout, place, "test", test_y)
        _check_superclasses(layout, place, contents)
    mean, std = _channels(train_x)
    sha256 = sha256_of(contents.values())
    return Images(name, train_x, train_y, test_x, test_y, classes=layout.classes, mean=mean, std=std, sha256=sha256)


def _check_files(layout: Layout, folder: Path, place: Path, complete: bool) -> None:
    """Refuse files that are not there or of the wrong size, before any is read."""
    missing = [file for file in layout.files if not (place / file).is_file()]
    if len(missing) == len(layout.files):
        raise FlexActError(
            f"there is no {layout.title} in {folder}: expected {', '.join(layout.files)} there or in its folder "
            f"{layout.folder}. Download it with: {layout.command(folder)}"
        )
    if missing:
        raise FlexActError(
            f"{place} lacks {', '.join(missing)} of {layout.title}'s {len(layout.files)} files. Copy what is missing "
            f"there, or download it with: {layout.command(folder)}"
        )
    for file in layout.files:
        size, one = (place / file).stat().st_size, layout.record_bytes
        if complete and size != layout.bytes_of(file):
            raise FlexActError(
                f"{place / file} has {size:,} bytes, not {layout.bytes_of(file):,} ({layout.records[file]:,} records "
                f"of {one:,} bytes); a part of a set is read with --partial. Otherwise {_remedy(layout, folder)}"
            )
        if size == 0 or size % one:
            raise FlexActError(
                f"{place / file} has {size:,} bytes, which is no whole number of records of {one:,} bytes: "
                f"{_remedy(layout, folder)}"
            )


def _remedy(layout: Layout, folder: Path) -> str:
    return f"it is damaged or cut off. Remove it and bring it back with: {layout.command(folder)}"


def _content(path: Path, layout: Layout) -> bytearray:
    """A file of whole records."""
    data = bytearray(path.stat().st_size)
    try:
        with path.open("rb") as file:
            count = file.readinto(data)
    except OSError as error:
        raise FlexActError(f"cannot read {path}: {error.strerror}.") from None
    if count != len(data) or count % layout.record_bytes:
        raise FlexActError(f"{path} changed while it was read; is something still writing it?")
    return data


def _images(
    layout: Layout, place: Path, contents: dict[str, bytearray], files: tuple[str, ...]
) -> tuple[Tensor, Tensor]:
    """Images and classes of one or more files, in their order."""
    parts = [_records(place / file, layout, contents[file]) for file in files]
    records = torch.cat(parts) if len(parts) > 1 else parts[0]
    labels = len(layout.labels)
    return records[:, labels:].contiguous().view(-1, 3, SIDE, SIDE), records[:, labels - 1].long()


def _records(path: Path, layout: Layout, content: bytearray) -> Tensor:
    """The records of a file, uint8 (N, bytes of a record), their labels within range."""
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, layout.record_bytes)
    for byte, limit in enumerate(layout.labels):
        wrong = (records[:, byte] >= limit).nonzero()
        if len(wrong):
            number = int(wrong[0])
            raise FlexActError(
                f"{path}, record {number}: label byte {byte} is {int(records[number, byte])}, not from 0 to "
                f"{limit - 1}. The file is damaged, or is no file of {layout.title}."
            )
    return records


def _check_classes(layout: Layout, place: Path, part: str, labels: Tensor) -> None:
    """Refuse a complete set whose classes are not of one size, as the official ones are."""
    counts = labels.bincount(minlength=layout.classes)
    expected = len(labels) // layout.classes
    wrong = (counts != expected).nonzero()
    if len(wrong):
        number = int(wrong[0])
        raise FlexActError(
            f"{place}: class {number} has {counted(int(counts[number]), f'{part} image')}, not the {expected:,} of "
            f"{layout.title}. The files were damaged or altered; remove them and download the set again."
        )


def _check_superclasses(layout: Layout, place: Path, contents: dict[str, bytearray]) -> None:
    """Refuse a complete set whose superclasses are not of one size, as CIFAR-100's are; CIFAR-10 has none."""
    if len(layout.labels) == 1:
        return
    records = (torch.frombuffer(content, dtype=torch.uint8) for content in contents.values())
    labels = torch.cat([one.view(-1, layout.record_bytes)[:, :2] for one in records]).long()
    pairs = labels.unique(dim=0)
    size = layout.classes // layout.labels[0]
    if len(pairs) != layout.classes or (pairs[:, 0].bincount(minlength=layout.labels[0]) != size).any():
        raise FlexActError(
            f"{place}: {layout.title} has {layout.labels[0]} superclasses of {size} classes each; the labels here say "
            "otherwise. The files were damaged or altered; remove them and download the set again."
        )


def _channels(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, by whole numbers: the same for any order of the images."""
    values = torch.arange(256, dtype=torch.int64)
    means, deviations = [], []
    for channel in range(3):
        counts = images[:, channel].flatten().bincount(minlength=256)
        number, total, squares = (int(sum_) for sum_ in (counts.sum(), counts @ values, counts @ values**2))
        means.append(total / number / 255)
        deviations.append((number * squares - total**2) ** 0.5 / number / 255)
    return tuple(means), tuple(deviations)
