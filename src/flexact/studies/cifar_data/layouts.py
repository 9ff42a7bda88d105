"""CIFAR-10 and CIFAR-100 as published: files, records, and the archive that contains them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from flexact.io.option_checks import check_known

SIDE = 32
PIXELS = 3 * SIDE * SIDE
"""Bytes of an image: its red, green and blue planes, each row by row."""


@dataclass(frozen=True)
class Layout:
    """The official binary version of a set. A record is its label bytes, with the class last, and PIXELS bytes."""

    name: str
    title: str
    folder: str
    """The folder in the archive."""
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    labels: tuple[int, ...]
    """The number of values of each label byte."""
    records: dict[str, int]
    """The number of records per file."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    """The published mean and standard deviation of the training images' channels."""
    archive: str
    archive_md5: str

    @property
    def files(self) -> tuple[str, ...]:
        """All files, the training images first."""
        return self.train_files + self.test_files

    @property
    def classes(self) -> int:
        return self.labels[-1]

    @property
    def record_bytes(self) -> int:
        """Bytes of one image with its labels."""
        return len(self.labels) + PIXELS

    def bytes_of(self, file: str) -> int:
        """The size of a file."""
        return self.records[file] * self.record_bytes

    def place(self, folder: Path) -> Path:
        """The folder with the files: the given one if it holds any of them, or the archive's folder inside it."""
        inside = folder / self.folder
        direct = folder.name == self.folder or any((folder / file).exists() for file in self.files)
        return folder if direct and not inside.is_dir() else inside

    def command(self, folder: Path) -> str:
        """The command that downloads the missing files."""
        return f"flexact data {self.name} --data {shlex.quote(str(folder))}"


_BATCHES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))

LAYOUTS: dict[str, Layout] = {
    "cifar10": Layout(
        name="cifar10",
        title="CIFAR-10",
        folder="cifar-10-batches-bin",
        train_files=_BATCHES,
        test_files=("test_batch.bin",),
        labels=(10,),
        records=dict.fromkeys((*_BATCHES, "test_batch.bin"), 10_000),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        archive="cifar-10-binary.tar.gz",
        archive_md5="c32a1d4ab5d03f1284b67883e8d87530",
    ),
    "cifar100": Layout(
        name="cifar100",
        title="CIFAR-100",
        folder="cifar-100-binary",
        train_files=("train.bin",),
        test_files=("test.bin",),
        labels=(20, 100),
        records={"train.bin": 50_000, "test.bin": 10_000},
        mean=(0.5071, 0.4865, 0.4409),
        std=(0.2673, 0.2564, 0.2762),
        archive="cifar-100-binary.tar.gz",
        archive_md5="03b5dce01913d631647c71ecec9e9cb8",
    ),
}


def layout_of(name: str) -> Layout:
    """The layout of a set by its name.

    >>> layout_of("cifar-10")
    Traceback (most recent call last):
    ...
    flexact.errors.FlexActError: unknown data set 'cifar-10'; did you mean 'cifar10'? Known: cifar10, cifar100.
    """
    check_known("data set", name, LAYOUTS)
    return LAYOUTS[name]
