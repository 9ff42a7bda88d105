"""A study's folder: what is in it, and how it is written so that a killed run can be gone on with.

Every file is written whole under another name and then renamed. `results.csv` is written last: a model whose rows are
in it is done, and rows of any other model in the other files are left over from a kill and are dropped.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexact.errors import FlexActError

VERSION = 1

RESULTS, HISTORY, CURVES, CONFIG, TABLE = "results.csv", "history.csv", "curves.csv", "config.json", "table.md"

RESULT_COLUMNS = ("study", "model", "truth", "seed", "pick", "probability", "mse", "spread", "epochs")
HISTORY_COLUMNS = ("model", "truth", "seed", "epoch", "candidate", "probability")
CURVE_COLUMNS = ("model", "truth", "x1", "prediction", "target")

Line = tuple[str, ...]
"""One row of a CSV file, as text: what was read is written back to the byte."""


@dataclass(frozen=True)
class Result:
    """One row of results.csv."""

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

    def line(self) -> Line:
        return tuple(text(getattr(self, column)) for column in RESULT_COLUMNS)


@dataclass(frozen=True)
class Part:
    """What one model leaves in the folder."""

    results: list[Line]
    history: list[Line]
    curves: list[Line]


def text(value: Any) -> str:
    """A value as it stands in a CSV file; nine digits say everything about a float32."""
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def write_text(path: Path, content: str) -> None:
    """Write a file whole or not at all."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w", encoding="utf-8", newline="") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def read_results(path: Path) -> list[Result]:
    """The rows of a results.csv, each checked; what is wrong is told with its line.

    >>> read_results(Path("nowhere/results.csv"))
    Traceback (most recent call last):
    ...
    flexact.errors.FlexActError: there is no nowhere/results.csv; ...
    """
    return [_result(path, number, line) for number, line in _lines(path, RESULT_COLUMNS)]


class Store:
    """The folder of one run: opened new, or to go on with."""

    def __init__(self, folder: Path, config: dict[str, Any], models: Sequence[str]) -> None:
        self.folder, self.config, self.models = folder, config, tuple(models)
        self.parts: dict[str, Part] = {}

    @property
    def done(self) -> list[str]:
        """The finished models, in their fixed order."""
        return [model for model in self.models if model in self.parts]

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
                write_text(self.folder / CONFIG, json.dumps(self.config, indent=2) + "\n")
        except OSError as error:
            raise FlexActError(f"cannot write to {self.folder}: {error.strerror}; give another --out.") from None

    def add(self, model: str, part: Part) -> None:
        """Keep a finished model: `results.csv`, which says that it is, comes last."""
        self.parts[model] = part
        parts = [self.parts[model] for model in self.done]
        self._write(HISTORY, HISTORY_COLUMNS, (line for part in parts for line in part.history))
        self._write(CURVES, CURVE_COLUMNS, (line for part in parts for line in part.curves))
        self._write(RESULTS, RESULT_COLUMNS, (line for part in parts for line in part.results))

    def results(self) -> list[Result]:
        """All rows so far."""
        path = self.folder / RESULTS
        return [_result(path, 0, line) for model in self.done for line in self.parts[model].results]

    def _write(self, name: str, columns: Sequence[str], lines: Iterable[Line]) -> None:
        write_text(self.folder / name, "".join(",".join(line) + "\n" for line in (columns, *lines)))

    def _enter(self, resume: bool, overwrite: bool) -> None:
        """Enter a folder that holds something."""
        found = _read_config(self.folder)
        if found is None:
            leftovers = {path.name for path in self.folder.iterdir()} - {CONFIG + ".new"}
            if leftovers:
                raise FlexActError(
                    f"{self.folder} is not empty and holds no run of a study ({', '.join(sorted(leftovers)[:3])}); "
                    "give --out another folder."
                )
            return
        if overwrite:
            _clear(self.folder)
            return
        study = self.config["study"]
        if found.get("study") != study:
            raise FlexActError(
                f"{self.folder} holds a run of the study {found.get('study')!r}, not of {study!r}; give --out another "
                "folder, or --overwrite to replace that run."
            )
        if not resume:
            raise FlexActError(
                f"{self.folder} holds a run of this study already; go on with it with --resume, replace it with "
                "--overwrite, or give --out another folder."
            )
        changes = _differences(found, self.config)
        if changes:
            raise FlexActError(
                f"the run in {self.folder} has another configuration ({'; '.join(changes)}); --resume needs the same. "
                "Give --out another folder, or --overwrite to start again."
            )
        self._take_up()

    def _take_up(self) -> None:
        """Read what an earlier run has done."""
        path = self.folder / RESULTS
        if not path.exists():
            return
        options = self.config["options"]
        seeds = range(options["first_seed"], options["first_seed"] + options["seeds"])
        wanted = [(truth, seed) for truth in options["truths"] for seed in seeds]
        rows: dict[tuple[str, str, int], Line] = {}
        for number, line in _lines(path, RESULT_COLUMNS):
            row = _result(path, number, line)
            key = (row.model, row.truth, row.seed)
            if row.study != self.config["study"] or row.model not in self.models or key[1:] not in wanted:
                told = f"{row.study}, {row.model}, {row.truth}, seed {row.seed} is no part of this run"
                raise _corrupt(path, number, told)
            if row.pick not in (row.model, *options["candidates"]):
                raise _corrupt(path, number, f"the pick is {row.pick!r}, which is no candidate of this run")
            if key in rows:
                raise _corrupt(path, number, f"{row.model}, {row.truth}, seed {row.seed} is there twice")
            rows[key] = line
        history = [line for _, line in _lines(self.folder / HISTORY, HISTORY_COLUMNS)]
        curves = [line for _, line in _lines(self.folder / CURVES, CURVE_COLUMNS)]
        for model in self.models:
            keys = [(model, truth, seed) for truth, seed in wanted]
            if all(key in rows for key in keys):
                self.parts[model] = Part(
                    [rows[key] for key in keys],
                    [line for line in history if line[0] == model],
                    [line for line in curves if line[0] == model],
                )


def _read_config(folder: Path) -> dict[str, Any] | None:
    path = folder / CONFIG
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise FlexActError(
            f"{path} is not valid JSON, so the run in it is unknown; give --out another folder."
        ) from None
    if not isinstance(found, dict) or "flexact_study" not in found:
        return None
    version = found["flexact_study"]
    if not isinstance(version, int) or version > VERSION:
        raise FlexActError(f"{path} has version {version!r}, and this flexact reads up to {VERSION}; update flexact.")
    return found


def _clear(folder: Path) -> None:
    """Remove what a study writes, and nothing else."""
    for name in (RESULTS, HISTORY, CURVES, TABLE, "report.html", CONFIG):
        (folder / name).unlink(missing_ok=True)
        (folder / (name + ".new")).unlink(missing_ok=True)
    shutil.rmtree(folder / "figures", ignore_errors=True)


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What decides about the results and is not the same, as "name: before → now"."""
    changes = []
    for group in ("options", "policies", "versions"):
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
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(path: Path, columns: Sequence[str]) -> list[tuple[int, Line]]:
    """The rows below the header, each with the number of its line."""
    if not path.is_file():
        raise FlexActError(f"there is no {path}; the run is not complete. Start it again with --overwrite.")
    content = path.read_bytes().decode("utf-8", errors="replace")
    if not content.endswith("\n"):
        raise _corrupt(path, content.count("\n") + 1, "the line is cut off")
    rows = list(csv.reader(content.splitlines()))
    if not rows or tuple(rows[0]) != tuple(columns):
        raise _corrupt(path, 1, f"expected the columns {','.join(columns)}")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(columns):
            raise _corrupt(path, number, f"expected {len(columns)} columns, found {len(row)}")
    return [(number, tuple(row)) for number, row in enumerate(rows[1:], start=2)]


def _result(path: Path, number: int, line: Line) -> Result:
    fields = dict(zip(RESULT_COLUMNS, line, strict=True))
    values: dict[str, Any] = dict(fields)
    for name in ("seed", "epochs"):
        try:
            values[name] = int(fields[name])
        except ValueError:
            raise _corrupt(path, number, f"{name} is {fields[name]!r}, not a whole number") from None
    for name in ("probability", "mse", "spread"):
        try:
            values[name] = float(fields[name])
        except ValueError:
            raise _corrupt(path, number, f"{name} is {fields[name]!r}, not a number") from None
    if not -1e-6 <= values["probability"] <= 1 + 1e-6:
        raise _corrupt(path, number, f"probability is {fields['probability']}, not between 0 and 1")
    if math.isfinite(values["mse"]) and values["mse"] < 0:
        raise _corrupt(path, number, f"mse is {fields['mse']}, below 0")
    return Result(**values)


def _corrupt(path: Path, number: int, what: str) -> FlexActError:
    return FlexActError(
        f"{path}, line {number}: {what}. The file was edited or damaged; restore it, or start the run again with "
        "--overwrite."
    )
