"""The cells of the text study: tasks × methods × seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flexact.studies.glue.protocol import METHODS, Cell
from flexact.studies.glue.tasks import TASKS, USUAL
from flexact.studies.grid.choices import Choices


@dataclass(frozen=True)
class Grid(Choices):
    """Which cells; checked.

    >>> [cell.name for cell in Grid(("rte",), ("fixed", "flexact-all"), seeds=1).cells]
    ['rte-fixed-0', 'rte-flexact-all-0']
    """

    tasks: tuple[str, ...] = USUAL
    methods: tuple[str, ...] = METHODS

    KNOWN: ClassVar[Mapping[str, tuple[str, ...]]] = {"tasks": tuple(TASKS), "methods": METHODS}

    @property
    def cells(self) -> list[Cell]:
        """Seed by seed, so that a grid that is cut short has all tasks and methods on the first seeds."""
        return [Cell(task, method, seed) for seed in self.each_seed for task in self.tasks for method in self.methods]
