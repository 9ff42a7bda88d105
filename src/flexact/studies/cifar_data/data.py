"""CIFAR-10 and CIFAR-100 as published: downloaded, checked, and read as tensors."""

from __future__ import annotations

import hashlib
import http.client
import shlex
import tarfile
import tempfile
import urllib.error
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexact.errors import FlexActError
from flexact.io.atomic_files import made_folder, write_whole

SIDE = 32
PIXELS = 3 * SIDE * SIDE
"""Bytes of an image: its red, green and blue planes, each row by row."""


@dataclass(frozen=True)
class Layout:
    """The official binary version of a data set. A record is its label bytes, with the class last, and PIXELS bytes."""

    name: str
    title: str
    folder: str
    """The folder in the archive."""
    train: dict[str, int]
    """The number of records of each file of training images."""
    test: dict[str, int]
    labels: tuple[int, ...]
    """The number of values of each label byte."""
    archive: str
    archive_md5: str

    @property
    def files(self) -> dict[str, int]:
        """The number of records of each file, the training images first."""
        return {**self.train, **self.test}

    @property
    def classes(self) -> int:
        return self.labels[-1]

    @property
    def record_bytes(self) -> int:
        """Bytes of one image with its labels."""
        return len(self.labels) + PIXELS

    def bytes_of(self, file: str) -> int:
        """The size of a file."""
        return self.files[file] * self.record_bytes

    def place(self, folder: Path) -> Path:
        """The folder with the files: the given one if it holds any of them, or the archive's folder inside it."""
        inside = folder / self.folder
        direct = folder.name == self.folder or any((folder / file).exists() for file in self.files)
        return folder if direct and not inside.is_dir() else inside

    def missing(self, folder: Path) -> list[str]:
        """The files that neither a folder nor the archive's folder inside it has."""
        return [file for file in self.files if not (self.place(folder) / file).is_file()]

    def command(self, folder: Path) -> str:
        """The command that downloads the missing files."""
        return f"flexact data {self.name} --data {shlex.quote(str(folder))}"


LAYOUTS: dict[str, Layout] = {
    "cifar10": Layout(
        name="cifar10",
        title="CIFAR-10",
        folder="cifar-10-batches-bin",
        train={f"data_batch_{number}.bin": 10_000 for number in range(1, 6)},
        test={"test_batch.bin": 10_000},
        labels=(10,),
        archive="cifar-10-binary.tar.gz",
        archive_md5="c32a1d4ab5d03f1284b67883e8d87530",
    ),
    "cifar100": Layout(
        name="cifar100",
        title="CIFAR-100",
        folder="cifar-100-binary",
        train={"train.bin": 50_000},
        test={"test.bin": 10_000},
        labels=(20, 100),
        archive="cifar-100-binary.tar.gz",
        archive_md5="03b5dce01913d631647c71ecec9e9cb8",
    ),
}

SITE = "https://www.cs.toronto.edu/~kriz/"
"""The data sets' own page, at the University of Toronto."""


def download(name: str, folder: Path, progress: bool = False) -> Path:
    """Download the files of a set that are missing in a folder, and return the folder with the files.

    The checksum is verified before anything is read from the archive. Only the expected files are written, each
    atomically, and existing files are kept. If the archive is in the folder already, it is used after the same check.
    progress: whether to show a bar.
    """
    layout, folder = LAYOUTS[name], Path(folder)
    place, archive = layout.place(folder), folder / layout.archive
    try:
        with made_folder(folder), tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
            if not archive.is_file():
                archive = Path(scratch, layout.archive)
                torch.hub.download_url_to_file(SITE + layout.archive, str(archive), progress=progress)
            _unpack(layout, archive, place)
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
        raise FlexActError(
            f"cannot download {SITE + layout.archive}: {error}. Run the same command again; or, without a network, "
            f"copy the file into {folder} first."
        ) from None
    except OSError as error:
        raise FlexActError(f"cannot write to {folder}: {error.strerror}.") from None
    return place


def _unpack(layout: Layout, path: Path, place: Path) -> None:
    """Write the missing files of a set from its archive."""
    digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    if digest != layout.archive_md5:
        raise FlexActError(
            f"{path} has the MD5 checksum {digest}, not {layout.archive_md5}: it is incomplete, damaged, or not the "
            "official archive. Remove it if it is still there, and run the same command again."
        )
    with tarfile.open(path, "r:gz") as archive:
        members = {member.name.removeprefix("./"): member for member in archive.getmembers() if member.isreg()}
        for file in layout.files:
            member = members.get(f"{layout.folder}/{file}")
            content = None if member is None else archive.extractfile(member)
            if content is None:
                raise FlexActError(f"{path} lacks {file}; it is not the archive of {layout.title}.")
            if not (place / file).exists():
                place.mkdir(exist_ok=True)
                write_whole(place / file, content.read(layout.bytes_of(file)))


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
    mean: Tensor
    """The mean of each channel of these training images, float32 (3,) on the scale from 0 to 1."""
    std: Tensor
    sha256: str
    """The SHA-256 of all files' bytes, in their order."""

    def to(self, device: torch.device | str) -> Images:
        """The same images on a device."""
        tensors: Any = {name: one.to(device) for name, one in vars(self).items() if isinstance(one, Tensor)}
        return replace(self, **tensors)


def load(name: str, folder: Path, partial: bool = False) -> Images:
    """Read a data set from the folder with its files, or from the parent of that folder.

    partial: whether a file may have fewer records than the official one, but at least one.
    """
    layout, folder = LAYOUTS[name], Path(folder)
    place = layout.place(folder)
    if missing := layout.missing(folder):
        raise FlexActError(
            f"there is no {layout.title} in {folder}: {place} lacks {', '.join(missing)} of the binary "
            "version. (The Python version has other files; they are pickles, which can run code and are never read.) "
            f"Download it with: {layout.command(folder)}"
        )
    contents = {file: _content(place / file, layout, folder, partial) for file in layout.files}
    train_x, train_y = _images(layout, [contents[file] for file in layout.train])
    test_x, test_y = _images(layout, [contents[file] for file in layout.test])
    digest = hashlib.sha256()
    for content in contents.values():
        digest.update(content)
    mean, std = _channels(train_x)
    return Images(name, train_x, train_y, test_x, test_y, layout.classes, mean, std, digest.hexdigest())


def _content(path: Path, layout: Layout, folder: Path, partial: bool) -> bytearray:
    """The bytes of a file, whose size and labels are checked."""
    data, record = bytearray(path.read_bytes()), layout.record_bytes
    remedy = f"Remove it, and download it again with: {layout.command(folder)}"
    if not partial and len(data) != layout.bytes_of(path.name):
        raise FlexActError(
            f"{path} has {len(data):,} bytes, not {layout.bytes_of(path.name):,} ({layout.files[path.name]:,} "
            f"records of {record:,} bytes). To use part of a data set, give --partial. {remedy}"
        )
    if not data or len(data) % record:
        raise FlexActError(f"{path} has {len(data):,} bytes, which is not a positive multiple of {record:,}. {remedy}")
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


def _channels(images: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and standard deviation of each channel, from integer sums, which do not depend on the order."""
    values = torch.arange(256, dtype=torch.int64)
    means, deviations = [], []
    for channel in range(3):
        counts = images[:, channel].flatten().bincount(minlength=256)
        number, total, squares = (int(sum_) for sum_ in (counts.sum(), counts @ values, counts @ values**2))
        means.append(total / number / 255)
        deviations.append((number * squares - total**2) ** 0.5 / number / 255)
    return torch.tensor(means), torch.tensor(deviations)


def random_images(count: int) -> Images:
    """Random images of CIFAR-100's shape. The time of a training step does not depend on their content."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (count, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    y = torch.randint(100, (count,), generator=generator)
    return Images("cifar100", x, y, x[:1], y[:1], 100, torch.full((3,), 0.5), torch.full((3,), 0.3), sha256="")
