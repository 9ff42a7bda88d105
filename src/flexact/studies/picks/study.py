"""The benchmark as a study: the columns of its results.csv, and the data that its tasks read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from flexact.errors import FlexActError
from flexact.studies.cifar_data.data import load
from flexact.studies.grid.cell_task import LOCK
from flexact.studies.grid.store import Store as GridStore
from flexact.studies.grid.study import GridStudy, picked, picks_column
from flexact.studies.picks.cells import Cell, Grid
from flexact.studies.picks.plain import FOLDER
from flexact.studies.picks.protocol import Protocol
from flexact.studies.picks.tasks import TASKS
from flexact.studies.picks.train import Outcome, train_cell


class Result(NamedTuple):
    """One row of results.csv: how a cell ended. A failed cell has an error and no figures (NaN, 0)."""

    task: str
    method: str
    seed: int
    state: str
    score: float
    """On the test data, in the task's unit; higher is better."""
    steps: int
    """Of training, those that picked included."""
    seconds: float
    """Of training, those that picked included; without setting up and evaluating."""
    picks: str
    """Site and pick, as "1=relu 3=gelu"; empty for a fixed method."""
    error: str
    device: str
    torch: str
    commit: str
    date: str

    @property
    def cell(self) -> Cell:
        return Cell(self.task, self.method, self.seed)

    @property
    def picked(self) -> dict[str, str]:
        """Site → pick."""
        return picked(self.picks)


def figures(outcome: Outcome) -> dict[str, Any]:
    """The columns that an `Outcome` fills."""
    return {
        "score": outcome.score,
        "steps": outcome.steps,
        "seconds": outcome.seconds,
        "picks": picks_column(outcome.picks),
    }


def _told(row: Result) -> str:
    return f"{row.score:.4g} {TASKS[row.task].unit}"


def place_of(name: str, folder: Path) -> Path:
    """A worker hands a task the folder of the data; the task reads from it what it needs, once per process."""
    return folder


def _digest(name: str, data: Path, partial: bool) -> str | None:
    """The SHA-256 of a data set; None for a task that makes its own data."""
    if name in TASKS:
        return None
    try:
        return load(name, data, complete=not partial).sha256
    except FlexActError as error:
        needing = ", ".join(task.name for task in TASKS.values() if task.dataset == name)
        raise FlexActError(
            f"{str(error).rstrip()} The tasks {needing} need it: give its folder with --data, or leave them out with "
            "--tasks."
        ) from None


STUDY = GridStudy(
    name="picks",
    title="The benchmark of picks",
    grid=Grid,
    protocol=Protocol,
    row=Result,
    train=train_cell,
    load=place_of,
    figures=figures,
    digest=_digest,
    blank={"score": math.nan, "steps": 0, "seconds": 0.0, "picks": ""},
    told=_told,
    checkpoint=LOCK,
    headings={"task": "task", "method": "method", "seed": "seed"},
    folders=(FOLDER,),
)


class Store(GridStore[Result]):
    """One grid's folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, STUDY)
