"""A cell's folder: its curve.csv, and the file that is locked while the cell runs."""

from __future__ import annotations

import csv
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

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


class Taken(Exception):
    """Another process holds the lock; the message names it."""


@contextmanager
def locked(path: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold a lock file; raise `Taken` if another process still holds it after `patience` seconds."""
    try:
        with FileLock(path).acquire(timeout=patience, poll_interval=0.1):
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
            yield
    except Timeout:
        raise Taken(path.read_text(encoding="utf-8") or "another process") from None


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock now."""
    if not path.exists():
        return False
    try:
        FileLock(path).acquire(timeout=0).lock.release()
    except Timeout:
        return True
    return False
