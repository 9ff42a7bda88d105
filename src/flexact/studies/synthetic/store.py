"""The two CSV files of a synthetic study's folder, which hold the rows of its finished models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flexact.io import csv_rows
from flexact.io.result_folder import RESULTS
from flexact.studies.synthetic.options import Options

LINES = "lines.csv"


class Result(NamedTuple):
    """One row of results.csv: the pick of a replica, and its error."""

    study: str
    model: str
    truth: str
    seed: int
    pick: str
    probability: float
    mse: float
    spread: float
    """The standard deviation of the squared error over the grid."""
    epochs: int


class Point(NamedTuple):
    """One row of lines.csv: a point of a line in a figure, as the mean over seeds."""

    model: str
    truth: str
    line: str
    """A candidate, for its probability over the epochs; "prediction" or "target" for the output over x₁."""
    x: float
    y: float
    deviation: float = 0.0


class Part(NamedTuple):
    """The rows of one model."""

    results: list[Result]
    points: list[Point]


def read_parts(folder: Path, options: Options) -> dict[str, Part]:
    """Return the rows of each finished model. A model is finished if results.csv has a row for each of its cells."""
    results, points = csv_rows.read(folder / RESULTS, Result), csv_rows.read(folder / LINES, Point)
    cells = [(cell.truth, cell.seed) for cell in options.cells]
    parts = {}
    for model in options.models:
        own = [row for row in results if row.model == model]
        if [(row.truth, row.seed) for row in own] == cells:
            parts[model] = Part(own, [point for point in points if point.model == model])
    return parts


def write_parts(folder: Path, parts: Mapping[str, Part], models: Sequence[str]) -> None:
    """Write the rows of the finished models, in the order of all models.

    Each file is written atomically, results.csv last, because its rows mark a model as finished.
    """
    done = [parts[model] for model in models if model in parts]
    csv_rows.write(folder / LINES, Point, (point for part in done for point in part.points), digits=6)
    csv_rows.write(folder / RESULTS, Result, (row for part in done for row in part.results))
