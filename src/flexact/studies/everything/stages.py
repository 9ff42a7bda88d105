"""The stages of `flexact reproduce all`, each one call of a study's command, and how long they take."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from flexact.studies.cifar.methods import USUAL
from flexact.studies.cifar.protocol import BUDGETS
from flexact.studies.cifar.protocol import Grid as ImageGrid
from flexact.studies.glue.data import TASKS
from flexact.studies.glue.protocol import Grid as TextGrid
from flexact.studies.grid.study import Choices
from flexact.studies.picks.protocol import Grid as PicksGrid
from flexact.studies.synthetic.studies import STUDIES

MAIN = ("relu", "gelu", "flexact-penultimate", "flexact-all")
"""The methods of CIFAR that have the most seeds."""
PICKING = ("relu", "flexact-penultimate", "flexact-all")
"""The methods for which the candidates matter, and what they are compared with."""
RIVALS = tuple(method for method in USUAL if method not in MAIN)
FIRST_SEED = 100
"""The first seed of CIFAR and of the benchmark of picks. Lower ones were seen when candidates were chosen."""
PAPERS_FIVE = ("--candidates", "relu,sigmoid,tanh,leaky_relu,identity")


@dataclass(frozen=True)
class Stage:
    """One call of `flexact reproduce STUDY`."""

    study: str
    cells: Sequence[Any] = ()
    """A grid's cells, or the names of the models of a synthetic study."""
    arguments: tuple[str, ...] = ()
    folder: str = ""
    """The subfolder of --out, if it is not the study's name; stages with the same one add cells to the same grid."""
    epochs: int = 100
    """The number of epochs of a cell if its measured time is per epoch; 1 if the time is per cell."""

    @property
    def place(self) -> str:
        return self.folder or self.study


def stages(budget: str) -> list[Stage]:
    """The stages of a budget: short trains CIFAR for 30 epochs, paper for 200 with the paper's 10 seeds throughout."""

    def images(
        methods: tuple[str, ...],
        seeds: int,
        models: tuple[str, ...] = ("resnet18",),
        datasets: tuple[str, ...] = ("cifar100",),
        arguments: tuple[str, ...] = (),
        folder: str = "",
    ) -> Stage:
        grid = ImageGrid(datasets, models, methods, seeds=seeds, first_seed=FIRST_SEED)
        return _grid("cifar", grid, ("--epochs", str(BUDGETS[budget]), *arguments), folder, BUDGETS[budget])

    if budget == "short":
        paper = [
            images(MAIN, 10),
            images(PICKING, 10, arguments=PAPERS_FIVE, folder="cifar-papers-five"),
            images(RIVALS, 3),
            images(MAIN, 3, models=("resnet34",)),
            images(MAIN, 3, datasets=("cifar10",)),
            _grid("glue", TextGrid(seeds=5)),
            _grid("glue", TextGrid(("cola", "mrpc"), seeds=5), ("--from-scratch",), "glue-from-scratch"),
        ]
    else:
        models, datasets = ("resnet18", "resnet34"), ("cifar10", "cifar100")
        paper = [
            images(USUAL, 10, models, datasets),
            images(PICKING, 10, models, datasets, PAPERS_FIVE, "cifar-papers-five"),
            _grid("glue", TextGrid(tuple(TASKS), seeds=5), ("--model", "bert-base-uncased")),
        ]
    synthetic = [Stage(name, study.defaults.models) for name, study in STUDIES.items()]
    return [*synthetic, Stage("overhead"), *paper, _grid("picks", PicksGrid(seeds=5, first_seed=FIRST_SEED))]


def _grid(study: str, grid: Choices, arguments: tuple[str, ...] = (), folder: str = "", epochs: int = 1) -> Stage:
    """The stage of a grid, whose options name its cells."""
    named = {f"--{name.replace('_', '-')}": value for name, value in grid.to_dict().items()}
    values = {name: ",".join(value) if isinstance(value, list) else str(value) for name, value in named.items()}
    options = tuple(word for option in values.items() for word in option)
    return Stage(study, grid.cells, (*arguments, *options), folder, epochs)


_TIMES: dict[str, tuple[str, str, Callable[[dict[str, str]], float]]] = {
    "cifar": ("cifar/steps.csv", "method", lambda row: float(row["step_ms"]) / 1000 * (50_000 // 128)),
    "glue": ("glue/cost/results.csv", "task", lambda row: float(row["seconds"])),
    "picks": ("picks/times.csv", "task", lambda row: float(row["seconds"])),
    **dict.fromkeys(STUDIES, ("replicas.csv", "model", lambda row: float(row["together_s"]) / float(row["epochs"]))),
}
"""The file with a study's times, the column that tells its cells apart, and the seconds of an epoch or a cell."""


def hours(stage: Stage, results: Path) -> float:
    """The estimated hours of a stage if its cells run one after the other; NaN if no such cells were measured.

    Cells of a kind that was not measured are assumed to be as slow as the slowest measured cell.
    """
    if stage.study not in _TIMES or "--model" in stage.arguments:
        return math.nan
    path, column, seconds = _TIMES[stage.study]
    if not (results / path).is_file():
        return math.nan
    with (results / path).open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("stage") != "picking"]  # few steps, not a cell
    slowest = max(map(seconds, rows))
    found = {kind: fmean(seconds(row) for row in rows if row[column] == kind) for kind in {row[column] for row in rows}}
    kinds = [cell if isinstance(cell, str) else getattr(cell, column) for cell in stage.cells]
    return math.fsum(found.get(kind, slowest) for kind in kinds) * stage.epochs / 3600
