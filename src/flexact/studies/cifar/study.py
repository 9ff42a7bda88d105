"""The image study: its cells (data sets × models × methods × seeds) and the columns of its results.csv."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from flexact.errors import FlexActError
from flexact.studies.cifar.checkpoint import ABOUT
from flexact.studies.cifar.methods import FIXED, METHODS
from flexact.studies.cifar.protocol import Cell, Protocol
from flexact.studies.cifar.train import train_cell
from flexact.studies.cifar_data.data import NAMES, Images, load
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.grid.store import Store as GridStore
from flexact.studies.grid.study import Choices, GridStudy, picks_column


@dataclass(frozen=True)
class Grid(Choices):
    """The cells of a grid.

    >>> [cell.name for cell in Grid(("cifar10",), ("resnet18",), ("relu",), seeds=2, first_seed=3).cells]
    ['cifar10-resnet18-relu-3', 'cifar10-resnet18-relu-4']
    """

    datasets: tuple[str, ...] = NAMES
    models: tuple[str, ...] = ("resnet18",)
    methods: tuple[str, ...] = METHODS

    KNOWN: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "datasets": NAMES,
        "models": tuple(BLOCKS),
        "methods": METHODS + FIXED,
    }

    @property
    def cells(self) -> list[Cell]:
        """All cells, seed by seed, so that an interrupted grid has all methods for the first seeds."""
        return [
            Cell(dataset, model, method, seed)
            for dataset in self.datasets
            for model in self.models
            for seed in self.each_seed
            for method in self.methods
        ]


class Result(NamedTuple):
    """One row of results.csv. A failed cell has an error and no figures (NaN, 0)."""

    dataset: str
    model: str
    method: str
    seed: int
    state: str
    accuracy: float = math.nan
    """In percent, of the extracted network on the test images."""
    loss: float = math.nan
    """The loss of the last epoch."""
    epochs: int = 0
    seconds: float = 0.0
    step_ms: float = math.nan
    picks: str = ""
    """Site and pick in order of depth, as "layer1.0=relu layer1.1=tanh"."""
    error: str = ""
    device: str = ""
    """Several, as "NVIDIA H200 + cpu", if a run was resumed on another device."""
    torch: str = ""
    commit: str = ""
    date: str = ""

    @property
    def cell(self) -> Cell:
        return Cell(self.dataset, self.model, self.method, self.seed)


def figures(outcome: Any) -> dict[str, Any]:
    """The columns of results.csv from an `Outcome`."""
    return {
        "accuracy": outcome.accuracy,
        "loss": float(outcome.losses[-1]) if outcome.losses else math.nan,
        "epochs": outcome.epochs,
        "seconds": outcome.seconds,
        "step_ms": outcome.step_ms if len(outcome.devices) == 1 else math.nan,
        "picks": picks_column(outcome.picks),
        "device": " + ".join(outcome.devices),
    }


def _check(name: str, images: Images, protocol: Protocol) -> None:
    if len(images.train_y) < protocol.batch:
        raise FlexActError(
            f"{name} has {len(images.train_y)} training images; --batch {protocol.batch} needs as many or more."
        )


def _load(name: str, folder: Path, partial: bool) -> Images:
    return load(name, folder, complete=not partial)


STUDY = GridStudy(
    name="cifar",
    title="CIFAR with ResNets: accuracy by activation",
    grid=Grid,
    protocol=Protocol,
    row=Result,
    train=train_cell,
    load=_load,
    figures=figures,
    check=_check,
    told=lambda row: f"{row.accuracy:.2f} %",
    checkpoint=ABOUT,
)


class Store(GridStore[Result]):
    """The folder of one grid."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, STUDY)
