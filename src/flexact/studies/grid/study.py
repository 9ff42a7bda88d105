"""What the grid needs to know about a study."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flexact.studies.grid.choices import Choices
from flexact.studies.grid.protocol import GridProtocol

BLANK: Mapping[str, Any] = {"loss": math.nan, "epochs": 0, "seconds": 0.0, "step_ms": math.nan, "picks": ""}
"""The figures of a failed cell, in the columns that most studies have."""

Train = Callable[..., Any]
"""(cell, protocol, data, folder, device, stop=) -> outcome; resumes from a checkpoint in the folder."""
Load = Callable[[str, Path], Any]
"""(name, folder of all data sets) -> data set, whose `sha256` identifies it."""


class Cell(Protocol):
    """One run of a study: a method on a data set from one seed. It is hashable, and is sent to other processes."""

    @property
    def dataset(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def name(self) -> str:
        """A unique name, for file names."""

    def to_dict(self) -> dict[str, Any]:
        """The columns that identify the cell, in plain JSON types."""

    def __hash__(self) -> int: ...


class CellFields:
    """The name and the columns of a cell that is a dataclass."""

    @property
    def name(self) -> str:
        """A unique name, for file names."""
        return "-".join(map(str, self.to_dict().values()))

    def to_dict(self) -> dict[str, Any]:
        """The columns that identify the cell, in plain JSON types."""
        return dataclasses.asdict(self)  # type: ignore[call-overload,no-any-return]


class Row(Protocol):
    """One line of results.csv, a NamedTuple: the cell's columns, its state, its figures, and their provenance."""

    @property
    def cell(self) -> Any: ...
    @property
    def state(self) -> str: ...
    @property
    def error(self) -> str: ...
    @property
    def picks(self) -> str: ...
    @property
    def device(self) -> str: ...


@dataclass(frozen=True)
class GridStudy:
    """A study whose cells a grid runs."""

    name: str
    """The name of its command."""
    title: str
    """The title of its page."""
    grid: type[Choices]
    protocol: type[GridProtocol]
    row: type[Any]
    """The `Row` of its results.csv."""
    train: Train
    load: Load
    figures: Callable[[Any], dict[str, Any]]
    """The columns of results.csv from an outcome."""
    blank: Mapping[str, Any]
    """The figures of a failed cell."""
    told: Callable[[Any], str]
    """The result of a finished cell in a few words, from its row."""
    checkpoint: str
    """The pattern of a checkpoint's files in the cell's folder."""
    headings: Mapping[str, str]
    """The columns that identify a cell, with their headings in a table."""
    operational: Sequence[str] = ("checkpoint_minutes",)
    """The fields of the protocol that do not affect results, and may change when a grid is resumed."""
    folders: Sequence[str] = ()
    """Folders that cells write besides their own; `--overwrite` removes them."""
    load_part: Load | None = None
    """Loads a data set that may have fewer rows than the official one."""
    check: Callable[[str, Any, Any], None] | None = None
    """(name, data, protocol): raises if the protocol cannot train on the data."""
    digest: Callable[[str, Path, bool], str | None] | None = None
    """(name, folder, partial): the SHA-256 of what cells read, if that is not what `load` returns."""

    def loader(self, partial: bool) -> Load:
        """The function that loads a data set for a cell."""
        return self.load_part if partial and self.load_part is not None else self.load

    def sha256_of(self, name: str, protocol: Any, folder: Path, partial: bool) -> str | None:
        """Read a data set and return its digest; raises if it cannot be read or used."""
        if self.digest is not None:
            return self.digest(name, folder, partial)
        found = self.loader(partial)(name, folder)
        if self.check is not None:
            self.check(name, found, protocol)
        return str(found.sha256)

    def asked(self, config: Mapping[str, Any]) -> list[Any]:
        """All cells that a folder's config.json asks for, each once."""
        grids = [self.grid.from_dict(one) for one in config.get("grids", [])]
        return list(dict.fromkeys(cell for grid in grids for cell in grid.cells))


def picked(picks: str) -> dict[str, str]:
    """The pick of each site, from the column `picks` of results.csv.

    >>> picked("layer1.0=relu layer1.1=tanh")
    {'layer1.0': 'relu', 'layer1.1': 'tanh'}
    """
    return dict(pair.rsplit("=", 1) for pair in picks.split())


def picks_column(picks: Mapping[str, str]) -> str:
    """The inverse of `picked`."""
    return " ".join(f"{site}={pick}" for site, pick in picks.items())
