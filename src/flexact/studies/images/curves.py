"""A cell's curve.csv: how far its run is, and its accuracy over the epochs."""

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
    test_accuracy: list[float]
    seconds: list[float]
    """Of training, from the start of the run to the end of each epoch."""

    @property
    def evaluated(self) -> dict[int, float]:
        """Epoch → accuracy on the test images."""
        pairs = zip(self.epochs, self.test_accuracy, strict=True)
        return {epoch: accuracy for epoch, accuracy in pairs if not math.isnan(accuracy)}

    def left(self, total: int) -> float:
        """Seconds that the epochs after the last one will take; NaN before the first."""
        if not self.epochs or self.epochs[-1] < 1:
            return math.nan
        return (total - self.epochs[-1]) * self.seconds[-1] / self.epochs[-1]


def read_curve(folder: Path) -> Curve:
    """The whole lines of a cell's curve; an empty one where there is none yet. A run may be writing it."""
    curve = Curve([], [], [], [])
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
            curve.test_accuracy.append(_number(row.get("test_accuracy")))
            curve.seconds.append(_number(row.get("seconds")))
    return curve


def _number(cell: str | None) -> float:
    try:
        return float(cell or "nan")
    except ValueError:
        return math.nan
