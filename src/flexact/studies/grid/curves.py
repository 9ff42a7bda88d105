"""Reading a cell's curve.csv: its progress, and its score over the epochs."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

CURVE = "curve.csv"

Curve = list[dict[str, Any]]
"""The columns of each epoch: its number, and figures; a missing figure is NaN."""


def read_curve(folder: Path) -> Curve:
    """The complete lines of a cell's curve; none if there is no curve yet."""
    path = folder / CURVE
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    rows = [row for row in csv.DictReader(lines) if (row.get("epoch") or "").isdigit()]
    return [{name: _number(row[name]) for name in row if name} | {"epoch": int(row["epoch"])} for row in rows]


def epochs_in(folder: Path) -> int:
    """The number of epochs that a cell has completed."""
    curve = read_curve(folder)
    return int(curve[-1]["epoch"]) if curve else 0


def evaluated(curve: Curve, measure: str) -> dict[int, float]:
    """One column by epoch, for the epochs after which it was measured."""
    return {line["epoch"]: line[measure] for line in curve if not math.isnan(line.get(measure, math.nan))}


def _number(cell: str | None) -> float:
    try:
        return float(cell or "nan")
    except ValueError:
        return math.nan
