"""Reading a cell's curve.csv: its progress, and its score over the epochs."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

CURVE = "curve.csv"


@dataclass(frozen=True)
class Curve:
    """One entry per epoch; a missing value is NaN."""

    epochs: list[int]
    loss: list[float]
    score: list[float]
    seconds: list[float]
    """Seconds of training from the start of the run to the end of each epoch."""
    step_ms: list[float]

    @property
    def evaluated(self) -> dict[int, float]:
        """The score by epoch, for the epochs after which it was measured."""
        pairs = zip(self.epochs, self.score, strict=True)
        return {epoch: score for epoch, score in pairs if not math.isnan(score)}


def read_curve(folder: Path, measure: str = "test_accuracy") -> Curve:
    """The complete lines of a cell's curve; an empty curve if there is none yet.

    measure: the column of the score.
    """
    path = folder / CURVE
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    rows = [row for row in csv.DictReader(lines) if (row.get("epoch") or "").isdigit()]

    def column(name: str) -> list[float]:
        return [_number(row.get(name)) for row in rows]

    epochs = [int(row["epoch"]) for row in rows]
    return Curve(epochs, column("loss"), column(measure), column("seconds"), column("step_ms"))


def _number(cell: str | None) -> float:
    try:
        return float(cell or "nan")
    except ValueError:
        return math.nan
