"""The text study: its cells (tasks × methods × seeds) and the columns of its results.csv."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from flexact.studies.glue.data import TextData, check_rows, load
from flexact.studies.glue.protocol import METHODS, Cell, Protocol
from flexact.studies.glue.tasks import TASKS, USUAL
from flexact.studies.glue.train import CHECKPOINTS, STATE, Outcome, train_cell
from flexact.studies.grid.store import Store as GridStore
from flexact.studies.grid.study import Choices, GridStudy, picks_column


@dataclass(frozen=True)
class Grid(Choices):
    """The cells of a grid.

    >>> [cell.name for cell in Grid(("rte",), ("fixed", "flexact-all"), seeds=1).cells]
    ['rte-fixed-0', 'rte-flexact-all-0']
    """

    tasks: tuple[str, ...] = USUAL
    methods: tuple[str, ...] = METHODS

    KNOWN: ClassVar[Mapping[str, tuple[str, ...]]] = {"tasks": tuple(TASKS), "methods": METHODS}

    @property
    def cells(self) -> list[Cell]:
        """All cells, seed by seed, so that an interrupted grid has all tasks and methods for the first seeds."""
        return [Cell(task, method, seed) for seed in self.each_seed for task in self.tasks for method in self.methods]


class Result(NamedTuple):
    """One row of results.csv. A failed cell has an error and no figures (NaN, 0).

    The metrics are in percent, of the extracted network on the dev rows; NaN if the task does not have the metric.
    """

    task: str
    method: str
    seed: int
    state: str
    matthews: float = math.nan
    f1: float = math.nan
    accuracy: float = math.nan
    pearson: float = math.nan
    spearman: float = math.nan
    split: str = ""
    """The dev rows: the benchmark's own ("official"), or part of its dev file."""
    loss: float = math.nan
    epochs: int = 0
    seconds: float = 0.0
    step_ms: float = math.nan
    picks: str = ""
    error: str = ""
    device: str = ""
    torch: str = ""
    commit: str = ""
    date: str = ""

    @property
    def cell(self) -> Cell:
        return Cell(self.task, self.method, self.seed)

    @property
    def metrics(self) -> dict[str, float]:
        """The task's own metrics."""
        return {name: getattr(self, name) for name in TASKS[self.task].metrics}


def figures(outcome: Outcome) -> dict[str, Any]:
    """The columns of results.csv from an outcome."""
    others = {name: value for name, value in vars(outcome).items() if name != "metrics"}
    return {**outcome.metrics, **others, "picks": picks_column(outcome.picks)}


def _summary(row: Result) -> str:
    return ", ".join(f"{name} {'-' if math.isnan(value) else f'{value:.2f}'}" for name, value in row.metrics.items())


def _load(name: str, folder: Path, partial: bool) -> TextData:
    return load(name, folder)


def _check(name: str, data: TextData, protocol: Protocol) -> None:
    check_rows(data.first(protocol.limit))


STUDY = GridStudy(
    name="glue",
    title="GLUE with a pretrained encoder: metrics by activation",
    grid=Grid,
    protocol=Protocol,
    row=Result,
    train=train_cell,
    load=_load,
    figures=figures,
    check=_check,
    told=_summary,
    data=Path("data/glue"),
    checkpoint=f"{CHECKPOINTS}/*/{STATE}",
    operational=("checkpoint_minutes", "keep", "folder"),
)


class Store(GridStore[Result]):
    """The folder of one grid."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, STUDY)
