"""What the benchmark runs: its methods, its cells (tasks × methods × seeds), their length, and Flex-Act's policy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from flexact.config import FlexConfig
from flexact.errors import FlexActError
from flexact.studies.grid.study import FIXED, Choices, GridCell, GridProtocol, Setting, candidate_of, fixed
from flexact.studies.picks.task import Task
from flexact.studies.picks.tasks import TASKS

ABLATED: dict[str, dict[str, Any]] = {
    "flexact-sites": {"share": "site"},
    "flexact-blend": {"pick_by": "blend"},
    "flexact-trial": {"pick_by": "trial"},
    "flexact-unrewound": {"rewind": False},
}
"""Flex-Act with one part of its policy changed."""
CHOOSING: tuple[str, ...] = ("flexact", "flexact-alone", "flexact-one", *ABLATED, "random", "race")
"""The methods that choose among a task's candidates."""
REUSING: tuple[str, ...] = ("flexact-alone", "flexact-one", "race")
"""Methods that usually reuse a plain run, or the picks, of another method."""
EVERY_FIXED: tuple[str, ...] = tuple(
    dict.fromkeys(fixed(candidate) for task in TASKS.values() for candidate in task.candidates)
)
KNOWN: tuple[str, ...] = (FIXED, *CHOOSING, *EVERY_FIXED)
USUAL: tuple[str, ...] = (FIXED, "flexact", "flexact-alone", "flexact-one", "random", "race")


def methods_of(task: Task, asked: Sequence[str] = KNOWN) -> list[str]:
    """Return the requested methods that a task has; "fixed" stands for all its fixed methods.

    >>> methods_of(TASKS["resnet-rectifiers"], ("race", "fixed", "fixed-tanh"))
    ['fixed-relu', 'fixed-leaky_relu', 'fixed-gelu', 'fixed-silu', 'race']
    """
    own = [fixed(candidate) for candidate in task.candidates]
    chosen = [method for method in own if FIXED in asked or method in asked]
    return chosen + [method for method in CHOOSING if method in asked]


@dataclass(frozen=True)
class Protocol(GridProtocol):
    """The settings of all cells.

    >>> Protocol.from_dict(Protocol(steps=40).to_dict()) == Protocol(steps=40)
    True
    """

    steps: Annotated[int | None, Setting("Steps of a plain run, for a quick test.", "each task's own")] = None
    partial: Annotated[bool, Setting("Accept data sets with fewer images than the official ones.")] = False

    def about(self) -> list[str]:
        return [] if self.steps is None else [f"{self.steps} steps per plain run"]

    def shortened(self, task: Task) -> Task:
        """Return the task with the protocol's number of steps."""
        return task if self.steps is None else dataclasses.replace(task, steps=self.steps)


def policy(task: Task, seed: int, **changes: Any) -> FlexConfig:
    """Return the default policy with the task's candidates. changes: overrides of an ablation."""
    return FlexConfig(candidates=task.candidates, seed=seed, **changes)


@dataclass(frozen=True)
class Cell(GridCell):
    """One run: a method on a task from one seed.

    >>> Cell("tabular", "flexact", 0).name
    'tabular-flexact-0'
    """

    task: str
    method: str
    seed: int

    @property
    def data_name(self) -> str:
        return TASKS[self.task].dataset


@dataclass(frozen=True)
class Grid(Choices):
    """The selected tasks, methods and seeds.

    >>> [cell.name for cell in Grid(("tabular",), ("flexact", "fixed-relu"), seeds=1).cells]
    ['tabular-fixed-relu-0', 'tabular-flexact-0']
    """

    tasks: Annotated[tuple[str, ...], Setting(f"{', '.join(TASKS)}.", "all", known=tuple(TASKS))] = tuple(TASKS)
    methods: Annotated[
        tuple[str, ...],
        Setting(
            f"fixed (each candidate at every site), fixed-CANDIDATE, {', '.join(CHOOSING)}.",
            "all but flexact-sites, -blend, -trial and -unrewound",
            known=KNOWN,
        ),
    ] = USUAL

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self._pairs:
            raise FlexActError(
                f"none of the tasks {', '.join(self.tasks)} has one of the methods {', '.join(self.methods)}. A fixed "
                "method exists for tasks with that candidate; give other --methods, such as fixed."
            )

    @property
    def cells(self) -> list[Cell]:
        """All cells, seed by seed, the longest tasks first. Within a seed, cells that reuse results come last."""
        return [Cell(task, method, seed) for seed in self.each_seed for task, method in self._pairs]

    @property
    def _pairs(self) -> list[tuple[str, str]]:
        repeats: dict[tuple[str, str], bool] = {}
        trained: set[tuple[str, str]] = set()
        for task in (task for name, task in TASKS.items() if name in self.tasks):
            for method in methods_of(task, self.methods):
                run = (task.network or task.name, method)
                is_fixed = candidate_of(method) is not None
                repeats[task.name, method] = method in REUSING or (is_fixed and run in trained)
                trained.add(run)
        return sorted(repeats, key=lambda pair: repeats[pair])


class Result(NamedTuple):
    """One row of results.csv. A failed cell has an error, and NaN or 0 in place of its results."""

    task: str
    method: str
    seed: int
    state: str
    score: float = math.nan
    """Score on the test data in the task's unit; higher is better."""
    steps: int = 0
    """Training steps, including those for picking."""
    seconds: float = 0.0
    """Training time, including picking, without setup and evaluation."""
    picks: str = ""
    """Picks by site, such as "1=relu 3=gelu"; empty for a fixed method."""
    error: str = ""
    device: str = ""
    torch: str = ""
    commit: str = ""
    date: str = ""

    @property
    def cell(self) -> Cell:
        return Cell(self.task, self.method, self.seed)
