"""What the image study keeps in its grid's folder: the columns of results.csv."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from flexact.studies.cifar.cells import Grid
from flexact.studies.cifar.checkpoint import ABOUT
from flexact.studies.cifar.protocol import Cell, Protocol
from flexact.studies.grid.store import Store as GridStore
from flexact.studies.grid.study import BLANK, GridStudy, picked, picks_column


class Result(NamedTuple):
    """One row of results.csv: how a cell ended. A failed cell has an error and no figures (NaN, 0)."""

    dataset: str
    model: str
    method: str
    seed: int
    state: str
    accuracy: float
    """In percent, of the extracted network on the test images."""
    loss: float
    """Of the last epoch."""
    epochs: int
    seconds: float
    step_ms: float
    picks: str
    """Site and pick in order of depth, as "layer1.0=relu layer1.1=tanh"."""
    error: str
    device: str
    """Several, as "NVIDIA H200 + cpu", where a run was gone on with on another."""
    torch: str
    commit: str
    date: str

    @property
    def cell(self) -> Cell:
        return Cell(self.dataset, self.model, self.method, self.seed)

    @property
    def picked(self) -> dict[str, str]:
        """Site → pick."""
        return picked(self.picks)


def figures(outcome: Any) -> dict[str, Any]:
    """The columns that an `Outcome` fills."""
    return {
        "accuracy": outcome.accuracy,
        "loss": float(outcome.losses[-1]) if outcome.losses else math.nan,
        "epochs": outcome.epochs,
        "seconds": outcome.seconds,
        "step_ms": outcome.step_ms if len(outcome.devices) == 1 else math.nan,
        "picks": picks_column(outcome.picks),
        "device": " + ".join(outcome.devices),
    }


def _told(row: Result) -> str:
    return f"{row.accuracy:.2f} %"


STUDY = GridStudy(
    name="cifar",
    title="CIFAR with ResNets: accuracy by activation",
    grid=Grid,
    protocol=Protocol,
    row=Result,
    blank={"accuracy": math.nan, **BLANK},
    told=_told,
    checkpoint=ABOUT,
    headings={"dataset": "data set", "model": "model", "method": "method", "seed": "seed"},
)


class Store(GridStore[Result]):
    """One grid's folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, STUDY)
