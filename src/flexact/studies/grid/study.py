"""What the grid has to know of a study."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flexact.studies.grid.choices import Choices
from flexact.studies.grid.protocol import GridProtocol

BLANK: Mapping[str, Any] = {"loss": math.nan, "epochs": 0, "seconds": 0.0, "step_ms": math.nan, "picks": ""}
"""The figures that every study has, in the row of a cell that failed."""

Train = Callable[..., Any]
"""(cell, protocol, data, folder, device, report=, stop=) -> outcome; resumes what it finds in the folder."""
Load = Callable[[str, Path], Any]
"""A data set by its name, from the folder of all; its `sha256` identifies it."""


class Cell(Protocol):
    """One run of a study: a method on a data set from one seed. It is hashable, and travels to other processes."""

    @property
    def dataset(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def name(self) -> str:
        """For file names; no other cell of the study has it."""

    def to_dict(self) -> dict[str, Any]:
        """The columns that name it, in plain JSON types."""

    def __hash__(self) -> int: ...


class Row(Protocol):
    """One line of results.csv, a NamedTuple: what names the cell, `state`, figures, and where they come from."""

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
    """Of its command."""
    title: str
    """Of its page."""
    grid: type[Choices]
    protocol: type[GridProtocol]
    row: type[Any]
    """The `Row` of its results.csv."""
    train: Train
    load: Load
    figures: Callable[[Any], dict[str, Any]]
    """What results.csv keeps of an outcome, by column."""
    blank: Mapping[str, Any]
    """The figures in the row of a cell that failed."""
    told: Callable[[Any], str]
    """How a finished cell did, from its row, in a word or two."""
    checkpoint: str
    """What a run that was stopped goes on from, as a pattern in the cell's folder."""
    headings: Mapping[str, str]
    """What names a cell in results.csv, and how a person calls it."""
    operational: Sequence[str] = ("checkpoint_minutes",)
    """What of the protocol decides nothing about the results: a grid can be gone on with changed."""
    folders: Sequence[str] = ()
    """What its cells write into besides their own folders; `--overwrite` removes it."""
    load_part: Load | None = None
    """Loads a data set that may have fewer rows than the official one."""
    check: Callable[[str, Any, Any], None] | None = None
    """(name, data, protocol): raises where the protocol cannot train on the data."""
    digest: Callable[[str, Path, bool], str | None] | None = None
    """(name, folder, partial): the SHA-256 of what cells read, where that is not what `load` returns."""

    def loader(self, partial: bool) -> Load:
        """What loads a data set for a cell."""
        return self.load_part if partial and self.load_part is not None else self.load

    def sha256_of(self, name: str, protocol: Any, folder: Path, partial: bool) -> str | None:
        """The digest of a data set, which is read for it; raises where it cannot be read or used."""
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
    """Site → pick, from the column `picks` of results.csv.

    >>> picked("layer1.0=relu layer1.1=tanh")
    {'layer1.0': 'relu', 'layer1.1': 'tanh'}
    """
    return dict(pair.rsplit("=", 1) for pair in picks.split())


def picks_column(picks: Mapping[str, str]) -> str:
    """The inverse of `picked`."""
    return " ".join(f"{site}={pick}" for site, pick in picks.items())
