"""A synthetic study's folder: its tables, how they are read, and how a killed run is resumed.

Every file is written as a whole. `results.csv` is written last: a model whose rows are in it is done, and rows of any
other model in the other files are left over from a kill and are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flexact.errors import FlexActError
from flexact.io import csv_rows
from flexact.io.csv_rows import REMEDY, damaged
from flexact.io.result_folder import CONFIG, RESULTS, check_same, enter, write_config
from flexact.studies.synthetic.options import Options

HISTORY, CURVES = "history.csv", "curves.csv"


class Result(NamedTuple):
    """One row of results.csv: what a replica picked, and its error."""

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


class Moment(NamedTuple):
    """One row of history.csv: the probability of a candidate after an epoch."""

    model: str
    truth: str
    seed: int
    epoch: int
    candidate: str
    probability: float


class Point(NamedTuple):
    """One row of curves.csv: the prediction at x₁ with the distractors at 0, averaged over seeds, and the truth."""

    model: str
    truth: str
    x1: float
    prediction: float
    target: float


@dataclass(frozen=True)
class Part:
    """What one model leaves in the folder."""

    results: list[Result]
    history: list[Moment]
    curves: list[Point]


class Store:
    """The folder of one run, new or resumed."""

    def __init__(self, folder: Path, config: dict[str, Any], options: Options) -> None:
        self.folder, self.config, self.options = folder, config, options
        self.parts: dict[str, Part] = {}

    @property
    def done(self) -> list[str]:
        """The finished models, in their fixed order."""
        return [model for model in self.options.models if model in self.parts]

    @property
    def results(self) -> list[Result]:
        """All rows so far."""
        return [row for model in self.done for row in self.parts[model].results]

    def open(self, resume: bool, overwrite: bool) -> None:
        """Prepare the folder; with `resume`, take what a run of the same configuration has done."""
        study, writes = self.config["study"], (RESULTS, HISTORY, CURVES)
        found = enter(self.folder, study, resume=resume, overwrite=overwrite, writes=writes)
        if found is None:
            write_config(self.folder, self.config)
            return
        check_same(self.folder, found, self.config, ("options", "policies", "training", "versions"))
        if (self.folder / RESULTS).exists():
            for name in (HISTORY, CURVES):
                if not (self.folder / name).exists():
                    raise FlexActError(
                        f"there is no {self.folder / name}; restore it, or start again with --overwrite."
                    )
            self.parts = read_parts(self.folder, study, self.options)

    def add(self, model: str, part: Part) -> None:
        """Keep a finished model: `results.csv`, which marks it as finished, comes last."""
        self.parts[model] = part
        parts = [self.parts[model] for model in self.done]
        history, curves = (
            (row for part in parts for row in part.history),
            (row for part in parts for row in part.curves),
        )
        csv_rows.write(self.folder / HISTORY, Moment, history, digits=6)
        csv_rows.write(self.folder / CURVES, Point, curves, digits=6)
        csv_rows.write(self.folder / RESULTS, Result, (row for part in parts for row in part.results))


def read_options(folder: Path, config: dict[str, Any]) -> Options:
    """What the run of a config.json was asked for."""
    try:
        return Options.from_dict(config["options"] if isinstance(config.get("options"), dict) else {})
    except FlexActError as error:
        raise FlexActError(f"{folder / CONFIG}: {error} {REMEDY}") from None


def read_parts(folder: Path, study: str, options: Options) -> dict[str, Part]:
    """What each finished model left, every row checked; a missing history.csv or curves.csv is an empty one."""
    cells = [(cell.truth, cell.seed) for cell in options.cells]
    wanted = set(cells)
    found: dict[tuple[str, str, int], Result] = {}
    path = folder / RESULTS
    if not path.is_file():
        raise FlexActError(f"there is no {path}: no model of this run is done. Continue it with --resume.")
    for number, row in enumerate(read_results(path), start=2):
        key = (row.model, row.truth, row.seed)
        if row.study != study or row.model not in options.models or key[1:] not in wanted:
            what = f"{row.study}, {row.model}, {row.truth}, seed {row.seed}"
            raise damaged(path, number, f"{what} is no part of this run")
        if row.pick not in (row.model, *options.candidates):
            raise damaged(path, number, f"the pick is {row.pick!r}, which is no candidate of this run")
        if key in found:
            raise damaged(path, number, f"{row.model}, {row.truth}, seed {row.seed} is there twice")
        found[key] = row
    done = [model for model in options.models if all((model, *cell) in found for cell in cells)]
    parts = {model: Part([found[model, truth, seed] for truth, seed in cells], [], []) for model in done}
    for number, moment in enumerate(csv_rows.read(folder / HISTORY, Moment), start=2):
        if (moment.truth, moment.seed) not in wanted or moment.candidate not in options.candidates:
            what = f"{moment.model}, {moment.truth}, seed {moment.seed}, {moment.candidate}"
            raise damaged(folder / HISTORY, number, f"{what} is no part of this run")
        _check_probability(folder / HISTORY, number, moment.probability)
        if moment.model in parts:
            parts[moment.model].history.append(moment)
    for number, point in enumerate(csv_rows.read(folder / CURVES, Point), start=2):
        if point.truth not in options.truths:
            raise damaged(folder / CURVES, number, f"{point.model}, {point.truth} is no part of this run")
        if point.model in parts:
            parts[point.model].curves.append(point)
    return parts


def read_results(path: Path) -> list[Result]:
    """The rows of a results.csv, checked.

    >>> read_results(Path("nowhere/results.csv"))
    Traceback (most recent call last):
    ...
    flexact.errors.FlexActError: there is no nowhere/results.csv.
    """
    if not path.is_file():
        raise FlexActError(f"there is no {path}.")
    rows = csv_rows.read(path, Result)
    for number, row in enumerate(rows, start=2):
        _check_probability(path, number, row.probability)
        if row.mse < 0:
            raise damaged(path, number, f"mse is {row.mse:g}, below 0")
    return rows


def _check_probability(path: Path, number: int, probability: float) -> None:
    if probability < -1e-6 or probability > 1 + 1e-6:
        raise damaged(path, number, f"probability is {probability:g}, not between 0 and 1")
