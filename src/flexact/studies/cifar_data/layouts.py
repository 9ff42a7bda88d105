"""CIFAR-10 and CIFAR-100 as their own site gives them: files, records, and the archive they come in."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from flexact.errors import FlexActError
from flexact.io.option_checks import check_known

SIDE = 32
PIXELS = 3 * SIDE * SIDE
"""Bytes of an image: its red, its green and its blue plane, each row by row."""


@dataclass(frozen=True)
class Layout:
    """The official binary version of a set: each record is its label bytes, the class last, and then PIXELS bytes."""

    name: str
    title: str
    folder: str
    """What the archive unpacks to."""
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    labels: tuple[int, ...]
    """How many values each of a record's label bytes may have."""
    records: dict[str, int]
    """How many a file holds."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    """The training images' channels, published to four digits."""
    archive: str
    archive_bytes: int
    archive_md5: str
    """What the set's page publishes."""
    python_folder: str
    python_archive: str
    python_files: tuple[str, ...]
    """By these the pickled version is known, whatever its folder is called."""

    @property
    def files(self) -> tuple[str, ...]:
        """Every file, the training images first."""
        return self.train_files + self.test_files

    @property
    def classes(self) -> int:
        """How many there are."""
        return self.labels[-1]

    @property
    def record_bytes(self) -> int:
        """Bytes of one image with its labels."""
        return len(self.labels) + PIXELS

    def bytes_of(self, file: str) -> int:
        """Bytes of a file."""
        return self.records[file] * self.record_bytes

    def place(self, folder: Path) -> Path:
        """Where in a folder that a user named the files are or would be: in itself, or in the archive's folder."""
        inside = folder / self.folder
        direct = folder.name == self.folder or any((folder / file).exists() for file in self.files)
        return folder if direct and not inside.is_dir() else inside

    def command(self, folder: Path) -> str:
        """What brings the files that are missing."""
        return f"flexact data {self.name} --data {shlex.quote(str(folder))}"


_TEN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))

LAYOUTS: dict[str, Layout] = {
    "cifar10": Layout(
        name="cifar10",
        title="CIFAR-10",
        folder="cifar-10-batches-bin",
        train_files=_TEN,
        test_files=("test_batch.bin",),
        labels=(10,),
        records=dict.fromkeys((*_TEN, "test_batch.bin"), 10_000),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        archive="cifar-10-binary.tar.gz",
        archive_bytes=170_052_171,
        archive_md5="c32a1d4ab5d03f1284b67883e8d87530",
        python_folder="cifar-10-batches-py",
        python_archive="cifar-10-python.tar.gz",
        python_files=("batches.meta", "data_batch_1"),
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
        archive_bytes=168_513_733,
        archive_md5="03b5dce01913d631647c71ecec9e9cb8",
        python_folder="cifar-100-python",
        python_archive="cifar-100-python.tar.gz",
        python_files=("meta", "train", "test"),
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


def refuse_others(layout: Layout, folder: Path) -> None:
    """Refuse a folder that is no place for this set: the other set's, or the version in Python's pickle format."""
    if folder.exists() and not folder.is_dir():
        raise FlexActError(f"{folder} is a file; name the folder that holds {layout.folder}.")
    place = layout.place(folder)
    if any((place / file).exists() for file in layout.files):
        return
    for other in LAYOUTS.values():
        itself = folder.name == other.folder or all((folder / file).exists() for file in other.files)
        if other is not layout and itself:
            raise FlexActError(
                f"{folder} holds {other.title}, not {layout.title}; name another folder, or the set {other.name}."
            )
    _refuse_pickles(layout, folder)


def _refuse_pickles(layout: Layout, folder: Path) -> None:
    if (folder / layout.archive).is_file():
        return
    itself = any(
        folder.name == other.python_folder or all((folder / file).is_file() for file in other.python_files)
        for other in LAYOUTS.values()
    )
    inside = [name for name in (layout.python_folder, layout.python_archive) if (folder / name).exists()]
    if not itself and not inside:
        return
    found = folder / inside[0] if inside else folder
    raise FlexActError(
        f"{found} is the Python version of the set, whose files are pickles. Reading a pickle runs whatever code is in "
        f"it, so this program never does; it reads the binary version ({layout.archive}, same images). Name another "
        f"folder: {layout.command(Path('DIR'))} downloads that version into it."
    )
