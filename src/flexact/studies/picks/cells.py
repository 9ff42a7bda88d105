"""The cells of the benchmark: tasks × methods × seeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flexact.errors import FlexActError, suggestion
from flexact.io.option_checks import check_known, check_seed
from flexact.studies.grid.choices import Choices
from flexact.studies.grid.study import CellFields
from flexact.studies.picks.methods import KNOWN, REUSING, USUAL, methods_of
from flexact.studies.picks.task import Task
from flexact.studies.picks.tasks import TASKS


@dataclass(frozen=True)
class Cell(CellFields):
    """One run: a method on a task from one seed.

    >>> Cell("tabular", "flexact", 0).name
    'tabular-flexact-0'
    """

    task: str
    method: str
    seed: int

    def __post_init__(self) -> None:
        check_known("task", self.task, TASKS)
        own = methods_of(TASKS[self.task])
        if self.method not in own:
            raise FlexActError(
                f"the task {self.task} has no method {self.method!r}{suggestion(self.method, own)} It has: "
                f"{', '.join(own)}."
            )
        check_seed(self.seed)

    @property
    def dataset(self) -> str:
        """The data set that the grid reads; the task's name if the task makes its own data."""
        return TASKS[self.task].dataset or self.task


@dataclass(frozen=True)
class Grid(Choices):
    """The selected tasks, methods and seeds.

    >>> [cell.name for cell in Grid(("tabular",), ("flexact", "fixed-relu"), seeds=1).cells]
    ['tabular-fixed-relu-0', 'tabular-flexact-0']
    """

    tasks: tuple[str, ...] = tuple(TASKS)
    methods: tuple[str, ...] = USUAL

    KNOWN: ClassVar[Mapping[str, tuple[str, ...]]] = {"tasks": tuple(TASKS), "methods": KNOWN}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self._pairs:
            raise FlexActError(
                f"none of the tasks {', '.join(self.tasks)} has one of the methods {', '.join(self.methods)}. A fixed "
                "method exists for tasks with that candidate; name other --methods, such as fixed."
            )

    @property
    def cells(self) -> list[Cell]:
        """All cells, seed by seed, the longest tasks first. Cells that can reuse results of others end a seed."""
        return [Cell(task, method, seed) for seed in self.each_seed for task, method in self._pairs]

    @property
    def _pairs(self) -> list[tuple[str, str]]:
        tasks = [task for name, task in TASKS.items() if name in self.tasks]
        first: dict[tuple[str, str], str] = {}
        for task in tasks:
            for method in methods_of(task, self.methods):
                first.setdefault((_network(task), method), task.name)
        pairs = [(task, method) for task in tasks for method in methods_of(task, self.methods)]
        later = {(task.name, method): method in REUSING or _repeats(task, method, first) for task, method in pairs}
        return sorted(later, key=lambda pair: later[pair])


def _network(task: Task) -> str:
    return task.network or task.name


def _repeats(task: Task, method: str, first: Mapping[tuple[str, str], str]) -> bool:
    """Return whether an earlier task of the grid trains the same fixed network."""
    return method.startswith("fixed-") and first[_network(task), method] != task.name
