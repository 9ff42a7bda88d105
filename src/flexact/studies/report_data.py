"""What a report reads: the plain files of a study's folder, and the histories a Recorder wrote."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

from flexact.errors import FlexActError
from flexact.recorder import Recorder

VERSION = 1
RESULTS = ("study", "model", "truth", "seed", "pick", "probability", "mse")
HISTORY = ("model", "truth", "seed", "epoch", "candidate", "probability")
CURVES = ("model", "truth", "x1", "prediction", "target")


@dataclass(frozen=True)
class Result:
    """One trained model: what it picked, and its error."""

    model: str
    truth: str
    seed: str
    pick: str
    probability: float
    mse: float


@dataclass(frozen=True)
class Curve:
    """What a model predicts over the grid of x₁, and what it should."""

    x: list[float]
    prediction: list[float]
    target: list[float]


@dataclass(frozen=True)
class Study:
    """A study's folder."""

    name: str
    config: dict[str, Any]
    results: list[Result]
    history: dict[tuple[str, str], dict[str, dict[float, list[float]]]]
    """(model, truth) → candidate → epoch → the probabilities of all seeds."""
    curves: dict[tuple[str, str], Curve]
    """(model, truth) → curve."""
    table: str
    """Markdown."""

    @property
    def truths(self) -> list[str]:
        """In the order of the results."""
        keys = [*(result.truth for result in self.results), *(truth for _, truth in (*self.history, *self.curves))]
        return list(dict.fromkeys(keys))

    @property
    def models(self) -> list[str]:
        """In the order of the results."""
        keys = [*(result.model for result in self.results), *(model for model, _ in (*self.history, *self.curves))]
        return list(dict.fromkeys(keys))

    @property
    def candidates(self) -> list[str]:
        """Those that a probability was written for."""
        return list(dict.fromkeys(candidate for of_model in self.history.values() for candidate in of_model))


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds; the deviation of one seed is 0."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return math.nan, 0.0
    return fmean(finite), stdev(finite) if len(finite) > 1 else 0.0


def read_study(folder: Path) -> Study | None:
    """The study in a folder; None where its config.json is missing or not one of a study."""
    config = _config(folder)
    if config is None:
        return None
    results = [
        Result(row["model"], row["truth"], row["seed"], row["pick"], number("probability"), number("mse"))
        for row, number in _rows(folder / "results.csv", RESULTS, required=True)
    ]
    history: dict[tuple[str, str], dict[str, dict[float, list[float]]]] = {}
    for row, number in _rows(folder / "history.csv", HISTORY):
        of_model = history.setdefault((row["model"], row["truth"]), {})
        of_model.setdefault(row["candidate"], {}).setdefault(number("epoch"), []).append(number("probability"))
    curves: dict[tuple[str, str], Curve] = {}
    for row, number in _rows(folder / "curves.csv", CURVES):
        curve = curves.setdefault((row["model"], row["truth"]), Curve([], [], []))
        curve.x.append(number("x1"))
        curve.prediction.append(number("prediction"))
        curve.target.append(number("target"))
    table = folder / "table.md"
    return Study(str(config["study"]), config, results, history, curves, _text(table) if table.is_file() else "")


def read_histories(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """File name → records of every history in a folder; a last line that a kill cut off is left out."""
    histories = {}
    for path in sorted(folder.glob("*.jsonl")):
        if not _is_history(path):
            continue
        entries = _records(path)
        for line, entry in enumerate(entries, start=2):
            _check_record(path, line, entry)
        if entries:
            histories[path.name] = entries
    return histories


def _config(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(_text(path))
    except json.JSONDecodeError as error:
        if not (folder / "results.csv").is_file():
            return None  # somebody else's config.json
        raise FlexActError(
            f"{path}, line {error.lineno}: not valid JSON ({error.msg} at column {error.colno}); it is what the study "
            "wrote when it began. Run the study again."
        ) from None
    version = config.get("flexact_study") if isinstance(config, dict) else None
    if not isinstance(version, int):
        return None
    if version > VERSION:
        raise FlexActError(f"{path} has version {version}, and this flexact reads up to {VERSION}; update flexact.")
    if not isinstance(config.get("study"), str):
        raise FlexActError(f"{path} does not name its study; it needs 'study', such as \"synthetic\".")
    return dict(config)


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise FlexActError(f"{path}, line {line}: not UTF-8 text; the file is corrupt.") from None


class _Numbers:
    """Reads the numbers of one row, and says where one is not."""

    def __init__(self, path: Path, line: int, row: dict[str, str]) -> None:
        self.path, self.line, self.row = path, line, row

    def __call__(self, column: str) -> float:
        text = self.row[column]
        try:
            return float(text) if text else math.nan
        except ValueError:
            raise FlexActError(f"{self.path}, line {self.line}: {column} is {text!r}, not a number.") from None


def _rows(path: Path, columns: tuple[str, ...], required: bool = False) -> Iterator[tuple[dict[str, str], _Numbers]]:
    if not path.is_file():
        if required:
            raise FlexActError(f"there is no {path.name} in {path.parent}; run the study to its end, or with --resume.")
        return
    reader = csv.reader(_text(path).splitlines())
    try:
        header = next(reader, [])
        if header[: len(columns)] != list(columns):
            found = ",".join(header) or "nothing"
            raise FlexActError(f"{path}, line 1: the columns must begin with {','.join(columns)}; found {found}.")
        for cells in reader:
            if len(cells) != len(header):
                raise FlexActError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells where the first line has {len(header)}; the "
                    "file is cut off or was edited. Remove that line to read the rest."
                )
            row = dict(zip(header, cells, strict=True))
            yield row, _Numbers(path, reader.line_num, row)
    except csv.Error as error:
        raise FlexActError(f"{path}, line {reader.line_num}: not valid CSV ({error}).") from None


def _records(path: Path) -> list[dict[str, Any]]:
    text = _text(path)
    if text.endswith("\n"):
        return Recorder.load(path)
    # A run that is going on, or was killed, may leave its last line unfinished: it is no record yet.
    with TemporaryDirectory() as folder:
        whole = Path(folder, path.name)
        whole.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
        try:
            return Recorder.load(whole)
        except FlexActError as error:
            raise FlexActError(str(error).replace(str(whole), str(path))) from None


def _is_history(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline())
    except (ValueError, IsADirectoryError):  # no JSON, or no text at all
        return False
    return isinstance(header, dict) and "flexact_history" in header


def _check_record(path: Path, line: int, entry: dict[str, Any]) -> None:
    for site, probabilities in entry["sites"].items():
        if not isinstance(probabilities, dict) or not all(isinstance(p, int | float) for p in probabilities.values()):
            raise FlexActError(f"{path}, line {line}: the probabilities of site {site!r} are not numbers by candidate.")
    for name, value in entry.items():
        if name not in ("sites", "picks") and not isinstance(value, int | float):
            raise FlexActError(f"{path}, line {line}: {name} is {value!r}, not a number.")
