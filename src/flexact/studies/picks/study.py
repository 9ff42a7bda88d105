"""The benchmark as a grid study: the columns of its results.csv, and the data of its tasks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from flexact.errors import FlexActError
from flexact.studies.cifar_data.data import load
from flexact.studies.grid.store import Store as GridStore
from flexact.studies.grid.study import GridStudy
from flexact.studies.picks.protocol import Cell, Grid, Protocol
from flexact.studies.picks.tasks import TASKS
from flexact.studies.picks.train import FOLDER, train_cell


class Result(NamedTuple):
    """One row of results.csv. A failed cell has an error and no figures (NaN, 0)."""

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


def _score_text(row: Result) -> str:
    return f"{row.score:.4g} {TASKS[row.task].unit}"


def place_of(name: str, folder: Path, partial: bool) -> Path:
    """Return the folder of the data sets, from which a task reads its data once per process."""
    return folder


def _digest(name: str, data: Path, partial: bool) -> str | None:
    """Return the SHA-256 of a data set; None for a task that makes its own data."""
    if name in TASKS:
        return None
    try:
        return load(name, data, complete=not partial).sha256
    except FlexActError as error:
        needing = ", ".join(task.name for task in TASKS.values() if task.dataset == name)
        raise FlexActError(
            f"{str(error).rstrip()} The tasks {needing} need it: give its folder with --data, or select other --tasks."
        ) from None


STUDY = GridStudy(
    name="picks",
    title="The benchmark of picks",
    grid=Grid,
    protocol=Protocol,
    row=Result,
    train=train_cell,
    load=place_of,
    digest=_digest,
    told=_score_text,
    folders=(FOLDER,),
)


class Store(GridStore[Result]):
    """The folder of one grid."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, STUDY)
