"""A synthetic study's folder: its CSV files, and how an interrupted run is resumed.

Every file is written atomically. `results.csv` is written last: a model whose rows are in it is done. Rows of any other
model in the other files are left over from an interruption and are dropped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from flexact.errors import FlexActError
from flexact.io import csv_rows
from flexact.io.csv_rows import REMEDY, damaged
from flexact.io.result_folder import CONFIG, RESULTS, check_same, enter, write_config
from flexact.studies.synthetic.options import Options

HISTORY, CURVES = "history.csv", "curves.csv"


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


class Part(NamedTuple):
    """The rows of one model."""

    results: list[Result]
    history: list[Moment]
    curves: list[Point]


class Store:
    """The folder of one run, which is new or resumed."""

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
        """Prepare the folder. With `resume`, read the finished models of a run with the same configuration."""
        study, writes = self.config["study"], (RESULTS, HISTORY, CURVES)
        found = enter(self.folder, study, resume=resume, overwrite=overwrite, writes=writes)
        if found is None:
            write_config(self.folder, self.config)
            return
        check_same(self.folder, found, self.config, ("options", "policies", "training", "versions"))
        if (self.folder / RESULTS).exists():
            for path in (self.folder / HISTORY, self.folder / CURVES):
                if not path.exists():
                    raise FlexActError(f"there is no {path}; restore it, or start again with --overwrite.")
            self.parts = read_parts(self.folder, study, self.options)

    def add(self, model: str, part: Part) -> None:
        """Write the rows of a finished model. `results.csv`, which marks it as finished, is written last."""
        self.parts[model] = part
        parts = [self.parts[model] for model in self.done]
        csv_rows.write(self.folder / HISTORY, Moment, (row for part in parts for row in part.history), digits=6)
        csv_rows.write(self.folder / CURVES, Point, (row for part in parts for row in part.curves), digits=6)
        csv_rows.write(self.folder / RESULTS, Result, (row for part in parts for row in part.results))


def read_options(folder: Path, config: dict[str, Any]) -> Options:
    """Return the options of the run that wrote a config.json."""
    try:
        return Options.from_dict(config["options"] if isinstance(config.get("options"), dict) else {})
    except FlexActError as error:
        raise FlexActError(f"{folder / CONFIG}: {error} {REMEDY}") from None


def read_parts(folder: Path, study: str, options: Options) -> dict[str, Part]:
    """Return the rows of each finished model. A missing history.csv or curves.csv counts as empty."""
    path = folder / RESULTS
    if not path.is_file():
        raise FlexActError(f"there is no {path}: no model of this run is done. Continue it with --resume.")
    cells = [(cell.truth, cell.seed) for cell in options.cells]
    found: dict[str, dict[tuple[str, int], Result]] = {model: {} for model in options.models}
    for number, row in enumerate(_rows(folder, RESULTS, Result, options), start=2):
        if row.study != study or (row.truth, row.seed) not in cells:
            raise damaged(path, number, f"{row.study}, {row.truth}, seed {row.seed} is not part of this run")
        found[row.model][row.truth, row.seed] = row
    parts = {
        model: Part([own[cell] for cell in cells], [], []) for model, own in found.items() if own.keys() >= set(cells)
    }
    for number, moment in enumerate(_rows(folder, HISTORY, Moment, options), start=2):
        if moment.candidate not in options.candidates:
            raise damaged(folder / HISTORY, number, f"the candidate {moment.candidate} is not part of this run")
        if moment.model in parts:
            parts[moment.model].history.append(moment)
    for point in _rows(folder, CURVES, Point, options):
        if point.model in parts:
            parts[point.model].curves.append(point)
    return parts


def _rows(folder: Path, name: str, kind: type[Any], options: Options) -> list[Any]:
    """Return the rows of a file. Raises if a row names a model or a truth of another run."""
    rows = csv_rows.read(folder / name, kind)
    for number, row in enumerate(rows, start=2):
        if row.model not in options.models or row.truth not in options.truths:
            raise damaged(folder / name, number, f"{row.model}, {row.truth} is not part of this run")
    return rows
