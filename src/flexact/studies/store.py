"""A study's folder: what is in it, how it is read, and how it is written so that a killed run can be gone on with.

Every file is written whole. `results.csv` is written last: a model whose rows are in it is done, and rows of any other
model in the other files are left over from a kill and are dropped. Whatever reads the folder reads it here.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from flexact.errors import FlexActError
from flexact.reading import parsed_json
from flexact.studies.options import Options
from flexact.writing import write_whole

VERSION = 1

RESULTS, HISTORY, CURVES, CONFIG, TABLE = "results.csv", "history.csv", "curves.csv", "config.json", "table.md"


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
    """One row of history.csv: how likely a candidate was after an epoch."""

    model: str
    truth: str
    seed: int
    epoch: int
    candidate: str
    probability: float


class Point(NamedTuple):
    """One row of curves.csv: what is predicted at x₁ with the distractors at 0, the mean over seeds, and the truth."""

    model: str
    truth: str
    x1: float
    prediction: float
    target: float


Row = TypeVar("Row", Result, Moment, Point)

_DIGITS: dict[type, int] = {Result: 9, Moment: 6, Point: 6}


@dataclass(frozen=True)
class Part:
    """What one model leaves in the folder."""

    results: list[Result]
    history: list[Moment]
    curves: list[Point]


class Store:
    """The folder of one run: opened new, or to go on with."""

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
        if resume and overwrite:
            raise FlexActError("--resume goes on with a run and --overwrite starts it again; give one of the two.")
        if self.folder.exists() and not self.folder.is_dir():
            raise FlexActError(f"{self.folder} is a file; give --out a folder.")
        if self.folder.exists() and any(self.folder.iterdir()):
            self._enter(resume, overwrite)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / CONFIG).exists():
                write_whole(self.folder / CONFIG, json.dumps(self.config, indent=2) + "\n")
        except OSError as error:
            raise FlexActError(f"cannot write to {self.folder}: {error.strerror}; give another --out.") from None

    def add(self, model: str, part: Part) -> None:
        """Keep a finished model: `results.csv`, which says that it is, comes last."""
        self.parts[model] = part
        parts = [self.parts[model] for model in self.done]
        _write(self.folder / HISTORY, Moment, (row for part in parts for row in part.history))
        _write(self.folder / CURVES, Point, (row for part in parts for row in part.curves))
        _write(self.folder / RESULTS, Result, (row for part in parts for row in part.results))

    def _enter(self, resume: bool, overwrite: bool) -> None:
        """Enter a folder that holds something."""
        if overwrite and holds_a_study(self.folder):
            _clear(self.folder)
            return
        found = read_config(self.folder)
        if found is None:
            leftovers = {path.name for path in self.folder.iterdir()} - {CONFIG + ".new"}
            if leftovers:
                raise FlexActError(
                    f"{self.folder} is not empty and holds no run of a study ({', '.join(sorted(leftovers)[:3])}); "
                    "give --out another folder."
                )
            return
        study = self.config["study"]
        if found["study"] != study:
            raise FlexActError(
                f"{self.folder} holds a run of the study {found['study']!r}, not of {study!r}; give --out another "
                "folder, or --overwrite to replace that run."
            )
        if not resume:
            raise FlexActError(
                f"{self.folder} holds a run of this study already; go on with it with --resume, replace it with "
                "--overwrite, or give --out another folder."
            )
        changes = differences(found, self.config, ("options", "policies", "training", "versions"))
        if changes:
            raise FlexActError(
                f"the run in {self.folder} has another configuration ({'; '.join(changes)}); --resume needs the same. "
                "Give --out another folder, or --overwrite to start again."
            )
        if (self.folder / RESULTS).exists():
            for name in (HISTORY, CURVES):
                if not (self.folder / name).exists():
                    raise FlexActError(
                        f"there is no {self.folder / name}; restore it, or start again with --overwrite."
                    )
            self.parts = read_parts(self.folder, study, self.options)


def holds_a_study(folder: Path) -> bool:
    """Whether a folder is recognisably a study's, be its config.json damaged or lost."""
    config, results = folder / CONFIG, folder / RESULTS
    if config.is_file() and b'"flexact_study"' in config.read_bytes():
        return True
    return results.is_file() and results.read_bytes().startswith(",".join(Result._fields).encode())


def read_config(folder: Path) -> dict[str, Any] | None:
    """A study's config.json; None where there is none, or somebody else's."""
    path = folder / CONFIG
    if not holds_a_study(folder):
        return None
    if not path.is_file():
        raise FlexActError(f"{folder} holds the results of a study without its {CONFIG}. {_REMEDY}")
    try:
        found = parsed_json(read_text(path))
    except json.JSONDecodeError as error:
        raise _damaged(path, error.lineno, f"not valid JSON ({error.msg} at column {error.colno})") from None
    except ValueError as error:
        raise _damaged(path, 1, f"not valid JSON ({error})") from None
    version = found.get("flexact_study") if isinstance(found, dict) else None
    if not isinstance(version, int):
        return None
    if version > VERSION:
        raise FlexActError(f"{path} has version {version}, and this flexact reads up to {VERSION}; update flexact.")
    if not isinstance(found.get("study"), str):
        raise FlexActError(f'{path} does not name its study, such as "synthetic". {_REMEDY}')
    return dict(found)


def read_options(folder: Path, config: dict[str, Any]) -> Options:
    """What the run of a config.json was asked for."""
    try:
        return Options.from_dict(config["options"] if isinstance(config.get("options"), dict) else {})
    except FlexActError as error:
        raise FlexActError(f"{folder / CONFIG}: {error} {_REMEDY}") from None


def read_parts(folder: Path, study: str, options: Options) -> dict[str, Part]:
    """What each finished model left, every row checked; a missing history.csv or curves.csv is an empty one."""
    cells = [(cell.truth, cell.seed) for cell in options.cells]
    wanted = set(cells)
    found: dict[tuple[str, str, int], Result] = {}
    path = folder / RESULTS
    if not path.is_file():
        raise FlexActError(f"there is no {path}: no model of this run is done. Go on with it with --resume.")
    for number, row in enumerate(_rows(path, Result), start=2):
        key = (row.model, row.truth, row.seed)
        if row.study != study or row.model not in options.models or key[1:] not in wanted:
            told = f"{row.study}, {row.model}, {row.truth}, seed {row.seed}"
            raise _damaged(path, number, f"{told} is no part of this run")
        if row.pick not in (row.model, *options.candidates):
            raise _damaged(path, number, f"the pick is {row.pick!r}, which is no candidate of this run")
        if key in found:
            raise _damaged(path, number, f"{row.model}, {row.truth}, seed {row.seed} is there twice")
        found[key] = row
    done = [model for model in options.models if all((model, *cell) in found for cell in cells)]
    parts = {model: Part([found[model, truth, seed] for truth, seed in cells], [], []) for model in done}
    for number, moment in enumerate(_rows(folder / HISTORY, Moment), start=2):
        if (moment.truth, moment.seed) not in wanted or moment.candidate not in options.candidates:
            told = f"{moment.model}, {moment.truth}, seed {moment.seed}, {moment.candidate}"
            raise _damaged(folder / HISTORY, number, f"{told} is no part of this run")
        if moment.model in parts:
            parts[moment.model].history.append(moment)
    for number, point in enumerate(_rows(folder / CURVES, Point), start=2):
        if point.truth not in options.truths:
            raise _damaged(folder / CURVES, number, f"{point.model}, {point.truth} is no part of this run")
        if point.model in parts:
            parts[point.model].curves.append(point)
    return parts


def read_results(path: Path) -> list[Result]:
    """The rows of a results.csv, each checked; what is wrong is told with its line.

    >>> read_results(Path("nowhere/results.csv"))
    Traceback (most recent call last):
    ...
    flexact.errors.FlexActError: there is no nowhere/results.csv.
    """
    if not path.is_file():
        raise FlexActError(f"there is no {path}.")
    return _rows(path, Result)


def read_text(path: Path) -> str:
    """A text file; bytes that are none are told with their line."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _damaged(path, data[: error.start].count(b"\n") + 1, "not UTF-8 text") from None


def _rows(path: Path, kind: type[Row]) -> list[Row]:
    """The rows below the header; none where there is no file."""
    if not path.is_file():
        return []
    content = read_text(path)
    if not content.endswith("\n"):
        raise _damaged(path, content.count("\n") + 1, "the line is cut off, or there is none")
    reader = csv.reader(content.splitlines())
    try:
        lines: list[list[str]] = list(reader)
    except csv.Error as error:
        raise _damaged(path, reader.line_num, f"not valid CSV ({error})") from None
    if tuple(lines[0]) != kind._fields:
        raise _damaged(path, 1, f"expected the columns {','.join(kind._fields)}")
    types = get_type_hints(kind)
    return [_row(path, number, kind, types, cells) for number, cells in enumerate(lines[1:], start=2)]


def _row(path: Path, number: int, kind: type[Row], types: dict[str, type], cells: list[str]) -> Row:
    if len(cells) != len(types):
        raise _damaged(path, number, f"expected {len(types)} columns, found {len(cells)}")
    values = []
    for (name, one), cell in zip(types.items(), cells, strict=True):
        try:
            values.append(one(cell))
        except ValueError:
            what = "a whole number" if one is int else "a number"
            raise _damaged(path, number, f"{name} is {cell!r}, not {what}") from None
    row = kind(*values)
    if not isinstance(row, Point) and (row.probability < -1e-6 or row.probability > 1 + 1e-6):
        raise _damaged(path, number, f"probability is {row.probability:g}, not between 0 and 1")
    if isinstance(row, Result) and row.mse < 0:
        raise _damaged(path, number, f"mse is {row.mse:g}, below 0")
    return row


def text(value: Any, digits: int = 9) -> str:
    """A value as it stands in a CSV file; nine digits say everything about a float32."""
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _write(path: Path, kind: type[Row], rows: Iterable[Row]) -> None:
    written = [kind._fields, *([text(value, _DIGITS[kind]) for value in row] for row in rows)]
    write_whole(path, "".join(",".join(cells) + "\n" for cells in written))


def _clear(folder: Path) -> None:
    """Remove what a study writes, and nothing else."""
    for name in (RESULTS, HISTORY, CURVES, TABLE, "report.html", CONFIG):
        (folder / name).unlink(missing_ok=True)
        (folder / (name + ".new")).unlink(missing_ok=True)
    shutil.rmtree(folder / "figures", ignore_errors=True)


def differences(before: dict[str, Any], now: dict[str, Any], groups: Iterable[str]) -> list[str]:
    """What decides about the results and is not the same, as "name: before → now"."""
    changes = []
    for group in groups:
        old, new = _flat(before.get(group)), _flat(now.get(group))
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        changes += [f"{name}: {_shown(old.get(name))} → {_shown(new.get(name))}" for name in names]
    return changes[:6] + ([f"and {len(changes) - 6} more"] if len(changes) > 6 else [])


def _flat(group: Any) -> dict[str, Any]:
    """One level of names: a policy's fields become "model.field"."""
    flat: dict[str, Any] = {}
    for name, value in (group if isinstance(group, dict) else {}).items():
        flat.update({f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value})
    return flat


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, Sequence) and not isinstance(value, str) else str(value)


_REMEDY = "Restore the file, or run the study again with --overwrite."


def _damaged(path: Path, number: int, what: str) -> FlexActError:
    return FlexActError(f"{path}, line {number}: {what}. The file was edited or damaged. {_REMEDY}")
