"""The comparison as a grid study: the columns of its results.csv."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

from flexact.errors import FlexActError
from flexact.studies.compare.functions import Functions
from flexact.studies.compare.protocol import Cell, Grid, Protocol
from flexact.studies.compare.training import CellTraining, Outcome
from flexact.studies.grid.store import Store as GridStore
from flexact.studies.grid.study import GridStudy


class Result(NamedTuple):
    """One row of results.csv. A failed run has an error and no figures (NaN, 0)."""

    method: str
    seed: int
    state: str
    score: float = math.nan
    """What `train` returned."""
    seconds: float = 0.0
    """Time spent in `train`."""
    picks: str = ""
    """Picks by site, such as "1=relu 3=gelu"; empty for a network that does not pick."""
    note: str = ""
    error: str = ""
    device: str = ""
    torch: str = ""
    commit: str = ""
    date: str = ""

    @property
    def cell(self) -> Cell:
        return Cell(self.method, self.seed)


def _no_training(*_: Any, **__: Any) -> Outcome:
    raise FlexActError("this folder was opened for reading only, so no run can be trained in it.")


def _no_data(name: str, folder: Path, partial: bool) -> None:
    """`train` reads its own data."""


STUDY = GridStudy(
    name="compare",
    title="Comparison with fixed activations",
    command="flexact compare",
    grid=Grid,
    protocol=Protocol,
    row=Result,
    train=_no_training,
    load=_no_data,
    digest=lambda name, folder, partial: None,
    told=lambda row: f"{row.score:.4g}",
    operational=("source",),
)


class Store(GridStore[Result]):
    """The folder of one comparison. functions: None if the folder is only read."""

    def __init__(self, folder: Path, functions: Functions | None = None) -> None:
        train = _no_training if functions is None else CellTraining(functions)
        super().__init__(folder, dataclasses.replace(STUDY, train=train))
