"""The cells of the benchmark: tasks × methods × seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flexact.errors import FlexActError, suggestion
from flexact.io.option_checks import check_known, check_seed
from flexact.studies.grid.choices import Choices
from flexact.studies.picks.methods import KNOWN, REUSING, USUAL, methods_of
from flexact.studies.picks.task import Task
from flexact.studies.picks.tasks import TASKS


@dataclass(frozen=True)
class Cell:
    """One run: a method on a task from one seed."""

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
        """What the grid reads for it: a data set, or the task's name where it makes its own data."""
        return TASKS[self.task].dataset or self.task

    @property
    def name(self) -> str:
        """For file names.

        >>> Cell("tabular", "flexact", 0).name
        'tabular-flexact-0'
        """
        return f"{self.task}-{self.method}-{self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Grid(Choices):
    """Which cells; checked.

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
                f"no task of {', '.join(self.tasks)} has a method of {', '.join(self.methods)}: a fixed method belongs "
                "to the tasks with that candidate. Name other --methods, such as fixed."
            )

    @property
    def cells(self) -> list[Cell]:
        """Seed by seed, the longest tasks first; cells that can use what others have trained end a seed."""
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
    """Whether another task of the grid trains the same fixed network."""
    return method.startswith("fixed-") and first[_network(task), method] != task.name
