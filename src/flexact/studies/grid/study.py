"""The interface between a grid and its study: cells, the options that ask for them, and the rows of results.csv."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from flexact.errors import FlexActError
from flexact.io.value_checks import check_names, check_whole
from flexact.studies.grid.protocol import GridProtocol

MAX_SEEDS = 1000

Grid = TypeVar("Grid", bound="Choices")


@dataclass(frozen=True)
class Choices(ABC):
    """The cells of a grid. A study adds fields for what it varies, as tuples of names."""

    seeds: int = field(default=3, kw_only=True)
    first_seed: int = field(default=0, kw_only=True)

    KNOWN: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """The study's fields, and the names that each can have."""

    def __post_init__(self) -> None:
        for kind in self.KNOWN:
            check_names(kind, getattr(self, kind), self.known(kind))
        check_whole("seeds", self.seeds, 1, MAX_SEEDS)
        check_whole("first-seed", self.first_seed, 0, 2**40)

    def known(self, kind: str) -> tuple[str, ...]:
        """The names that a field can have."""
        return self.KNOWN[kind]

    @property
    def each_seed(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    @abstractmethod
    def cells(self) -> Sequence[Any]:
        """Each cell once, in the order in which they run."""

    def to_dict(self) -> dict[str, Any]:
        """The grid as plain JSON types."""
        names = {kind: list(getattr(self, kind)) for kind in self.KNOWN}
        return {**names, "seeds": self.seeds, "first_seed": self.first_seed}

    @classmethod
    def from_dict(cls: type[Grid], data: dict[str, Any]) -> Grid:
        """The inverse of `to_dict`."""
        try:
            names = {kind: tuple(data[kind]) for kind in cls.KNOWN}
            return cls(**names, seeds=data["seeds"], first_seed=data["first_seed"])
        except (KeyError, TypeError):
            raise FlexActError(f"not a grid of cells: {data!r:.80}.") from None

    @classmethod
    def asked_for(cls: type[Grid], chosen: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[Grid]:
        """The grids that options ask for.

        chosen: the fields that are given. On resuming, each grid of the folder provides the others, and there is no new
        grid if nothing is given.
        before: config.json of the folder to resume; None for a new grid.
        """
        if before is None:
            return [cls(**chosen)]
        if not chosen:
            return []
        return list(dict.fromkeys(replace(cls.from_dict(one), **chosen) for one in before.get("grids", [])))


FIXED = "fixed"
"""Stands for the fixed methods of all candidates."""
PREFIX = "fixed-"


def fixed(candidate: str) -> str:
    """Return the method with a candidate at every site.

    >>> fixed("relu")
    'fixed-relu'
    """
    return PREFIX + candidate


def candidate_of(method: str) -> str | None:
    """Return the candidate of a fixed method; None for any other method.

    >>> candidate_of("fixed-relu"), candidate_of("race")
    ('relu', None)
    """
    return method.removeprefix(PREFIX) if method.startswith(PREFIX) else None


LOCK = "run.lock"
"""The file in a cell's folder that is locked while the cell runs."""

Train = Callable[..., Any]
"""(cell, protocol, data, folder, device, stop=) -> outcome; resumes from a checkpoint in the folder."""
Load = Callable[[str, Path, bool], Any]
"""(name, folder of all data sets, whether it may have fewer rows than the official one) -> data set, whose `sha256`
identifies it."""


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
    """One line of results.csv, a NamedTuple: the cell's columns, its state, its figures, and their provenance. The
    defaults are the figures of a failed cell."""

    @property
    def cell(self) -> Any: ...
    @property
    def state(self) -> str: ...
    @property
    def error(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def picks(self) -> str: ...
    @property
    def device(self) -> str: ...


def picked(picks: str) -> dict[str, str]:
    """The pick of each site, from the column `picks` of results.csv.

    >>> picked("layer1.0=relu layer1.1=tanh")
    {'layer1.0': 'relu', 'layer1.1': 'tanh'}
    """
    return dict(pair.rsplit("=", 1) for pair in picks.split())


def picks_column(picks: Mapping[str, str]) -> str:
    """The inverse of `picked`."""
    return " ".join(f"{site}={pick}" for site, pick in picks.items())


def columns_of(outcome: Any) -> dict[str, Any]:
    """The columns of results.csv from an outcome that has them as its fields."""
    return {**vars(outcome), "picks": picks_column(outcome.picks)}


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
    told: Callable[[Any], str]
    """The result of a finished cell in a few words, from its row."""
    figures: Callable[[Any], dict[str, Any]] = columns_of
    """The columns of results.csv from an outcome."""
    checkpoint: str = LOCK
    """The pattern of a checkpoint's files in the cell's folder, or a file that every cell writes when it begins."""
    data: Path = Path("data")
    """The default folder of its data."""
    command: str = ""
    """Its command line if it is not `flexact reproduce` and its name."""
    operational: Sequence[str] = ("checkpoint_minutes",)
    """The fields of the protocol that do not affect results, and may change when a grid is resumed."""
    folders: Sequence[str] = ()
    """Folders that cells write besides their own; `--overwrite` removes them."""
    check: Callable[[str, Any, Any], None] | None = None
    """(name, data, protocol): raises if the protocol cannot train on the data."""
    digest: Callable[[str, Path, bool], str | None] | None = None
    """(name, folder, partial): the SHA-256 of what cells read, if that is not what `load` returns."""

    @property
    def called(self) -> str:
        """The command of this study."""
        return self.command or f"flexact reproduce {self.name}"

    @property
    def resumes(self) -> bool:
        """Whether a cell that was stopped resumes from a checkpoint."""
        return self.checkpoint != LOCK

    def sha256_of(self, name: str, protocol: Any, folder: Path, partial: bool) -> str | None:
        """Read a data set and return its digest; raises if it cannot be read or used."""
        if self.digest is not None:
            return self.digest(name, folder, partial)
        found = self.load(name, folder, partial)
        if self.check is not None:
            self.check(name, found, protocol)
        return str(found.sha256)

    def asked(self, config: Mapping[str, Any]) -> list[Any]:
        """All cells that a folder's config.json asks for, each once."""
        grids = [self.grid.from_dict(one) for one in config.get("grids", [])]
        return list(dict.fromkeys(cell for grid in grids for cell in grid.cells))
