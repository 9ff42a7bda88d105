"""What the text study keeps in its grid's folder: the columns of results.csv."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from flexact.studies.glue.cells import Grid
from flexact.studies.glue.protocol import Cell, Protocol
from flexact.studies.glue.tasks import METRICS, TASKS
from flexact.studies.glue.train import CHECKPOINTS, STATE, Outcome
from flexact.studies.grid.store import Store as GridStore
from flexact.studies.grid.study import BLANK, GridStudy, picks_column


class Result(NamedTuple):
    """One row of results.csv: how a cell ended. A failed cell has an error and no figures (NaN, 0).

    The metrics are in percent, of the extracted network on the dev rows; NaN where the task has another.
    """

    task: str
    method: str
    seed: int
    state: str
    matthews: float
    f1: float
    accuracy: float
    pearson: float
    spearman: float
    split: str
    """Which rows: the benchmark's own ("official"), or a part of its dev file."""
    loss: float
    """Of the last epoch."""
    epochs: int
    seconds: float
    step_ms: float
    picks: str
    """Site and pick in order of depth."""
    error: str
    device: str
    torch: str
    commit: str
    date: str

    @property
    def cell(self) -> Cell:
        return Cell(self.task, self.method, self.seed)

    @property
    def metrics(self) -> dict[str, float]:
        """The task's own."""
        return {name: getattr(self, name) for name in TASKS[self.task].metrics}


def figures(outcome: Outcome) -> dict[str, Any]:
    """The columns that an `Outcome` fills."""
    return {
        **outcome.metrics,
        "split": outcome.split,
        "loss": outcome.loss,
        "epochs": outcome.epochs,
        "seconds": outcome.seconds,
        "step_ms": outcome.step_ms,
        "picks": picks_column(outcome.picks),
    }


def _told(row: Result) -> str:
    return ", ".join(f"{name} {'-' if math.isnan(value) else f'{value:.2f}'}" for name, value in row.metrics.items())


STUDY = GridStudy(
    name="glue",
    title="GLUE with a pretrained encoder: metrics by activation",
    grid=Grid,
    protocol=Protocol,
    row=Result,
    blank={**dict.fromkeys(METRICS, math.nan), "split": "", **BLANK},
    told=_told,
    checkpoint=f"{CHECKPOINTS}/*/{STATE}",
    headings={"task": "task", "method": "method", "seed": "seed"},
    operational=("checkpoint_minutes", "keep", "folder"),
)


class Store(GridStore[Result]):
    """One grid's folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, STUDY)
