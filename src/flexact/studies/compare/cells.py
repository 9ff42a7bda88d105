"""The cells of a comparison: methods × seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flexact.io.option_checks import check_seed
from flexact.studies.compare.methods import NAMED
from flexact.studies.grid.choices import Choices
from flexact.studies.grid.fixed_methods import candidate_of
from flexact.studies.grid.study import CellFields


@dataclass(frozen=True)
class Cell(CellFields):
    """One run of `train`.

    >>> Cell("fixed-relu", 0).name
    'fixed-relu-0'
    """

    method: str
    seed: int

    def __post_init__(self) -> None:
        check_seed(self.seed)

    @property
    def dataset(self) -> str:
        """No data set that the grid would read: `train` reads its own."""
        return ""


@dataclass(frozen=True)
class Grid(Choices):
    """The selected methods and seeds.

    >>> [cell.name for cell in Grid(("original", "fixed-relu"), seeds=1).cells]
    ['original-0', 'fixed-relu-0']
    """

    methods: tuple[str, ...]

    KNOWN: ClassVar[Mapping[str, tuple[str, ...]]] = {"methods": NAMED}

    def known(self, kind: str) -> tuple[str, ...]:
        """The named methods, and any fixed ones, as their candidates may be registered in another process only."""
        return (*NAMED, *(method for method in self.methods if candidate_of(method)))

    @property
    def cells(self) -> list[Cell]:
        """All cells, seed by seed. A cell that needs the picks of another one comes after it."""
        return [Cell(method, seed) for seed in self.each_seed for method in self.methods]
