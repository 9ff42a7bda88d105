"""A cell's curve.csv: how far its run is, and its score over the epochs."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

CURVE = "curve.csv"


@dataclass(frozen=True)
class Curve:
    """One entry an epoch; what an epoch was not asked is NaN."""

    epochs: list[int]
    loss: list[float]
    score: list[float]
    seconds: list[float]
    """Of training, from the start of the run to the end of each epoch."""
    step_ms: list[float]

    @property
    def evaluated(self) -> dict[int, float]:
        """Epoch → score, where it was measured."""
        pairs = zip(self.epochs, self.score, strict=True)
        return {epoch: score for epoch, score in pairs if not math.isnan(score)}

    def left(self, total: int) -> float:
        """Seconds that the epochs after the last one will take; NaN before the first."""
        if not self.epochs or self.epochs[-1] < 1:
            return math.nan
        return (total - self.epochs[-1]) * self.seconds[-1] / self.epochs[-1]


def read_curve(folder: Path, measure: str = "test_accuracy") -> Curve:
    """The whole lines of a cell's curve; an empty one where there is none yet. A run may be writing it.

    measure: the column of the score.
    """
    curve = Curve([], [], [], [], [])
    path = folder / CURVE
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return curve
    for row in csv.DictReader(content[: content.rfind("\n") + 1].splitlines()):
        epoch = _number(row.get("epoch"))
        if not math.isnan(epoch):
            curve.epochs.append(int(epoch))
            curve.loss.append(_number(row.get("loss")))
            curve.score.append(_number(row.get(measure)))
            curve.seconds.append(_number(row.get("seconds")))
            curve.step_ms.append(_number(row.get("step_ms")))
    return curve


def _number(cell: str | None) -> float:
    try:
        return float(cell or "nan")
    except ValueError:
        return math.nan
