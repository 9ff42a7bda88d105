"""What the grid has to know of a study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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
    row: type[Any]
    """The `Row` of its results.csv."""
    blank: Mapping[str, Any]
    """The figures in the row of a cell that failed."""
    asked: Callable[[Mapping[str, Any]], Sequence[Any]]
    """All cells that a folder's config.json asks for, each once."""
    epochs: Callable[[Mapping[str, Any], Any], int]
    """Of a cell, by config.json."""
    told: Callable[[Any], str]
    """How a finished cell did, from its row, in a word or two."""
    headings: Mapping[str, str]
    """What names a cell in results.csv, and how a person calls it."""
    operational: Sequence[str] = ("checkpoint_minutes",)
    """What of the protocol decides nothing about the results: a grid can be gone on with changed."""


def picked(picks: str) -> dict[str, str]:
    """Site → pick, from the column `picks` of results.csv.

    >>> picked("layer1.0=relu layer1.1=tanh")
    {'layer1.0': 'relu', 'layer1.1': 'tanh'}
    """
    return dict(pair.rsplit("=", 1) for pair in picks.split())


def picks_column(picks: Mapping[str, str]) -> str:
    """The inverse of `picked`."""
    return " ".join(f"{site}={pick}" for site, pick in picks.items())
