"""The cells of the text study: tasks × methods × seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flexact.errors import FlexActError
from flexact.studies.grid.choices import check_names, check_seeds
from flexact.studies.text.protocol import METHODS, Cell
from flexact.studies.text.tasks import TASKS, USUAL


@dataclass(frozen=True)
class Grid:
    """Which cells; checked.

    >>> [cell.name for cell in Grid(("rte",), ("fixed", "flexact-all"), seeds=1).cells]
    ['rte-fixed-0', 'rte-flexact-all-0']
    """

    tasks: tuple[str, ...] = USUAL
    methods: tuple[str, ...] = METHODS
    seeds: int = 3
    first_seed: int = 0

    def __post_init__(self) -> None:
        check_names("task", self.tasks, tuple(TASKS))
        check_names("method", self.methods, METHODS)
        check_seeds(self.seeds, self.first_seed)

    @property
    def cells(self) -> list[Cell]:
        """Seed by seed, so that a grid that is cut short has all tasks and methods on the first seeds."""
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        return [Cell(task, method, seed) for seed in seeds for task in self.tasks for method in self.methods]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        names = {kind: list(getattr(self, kind)) for kind in ("tasks", "methods")}
        return {**names, "seeds": self.seeds, "first_seed": self.first_seed}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Grid:
        """The inverse of `to_dict`."""
        try:
            return cls(tuple(data["tasks"]), tuple(data["methods"]), data["seeds"], data["first_seed"])
        except (KeyError, TypeError):
            raise FlexActError(f"not a grid of cells: {data!r:.80}.") from None


def asked(config: Mapping[str, Any]) -> list[Cell]:
    """All cells that a folder's grids were asked for, each once."""
    grids = [Grid.from_dict(one) for one in config.get("grids", [])]
    return list(dict.fromkeys(cell for grid in grids for cell in grid.cells))
