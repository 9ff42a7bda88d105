"""The study's one table: a row per measurement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexact.studies.overhead.timing import Spread

FILE = "overhead.csv"
BASELINE = "relu"
"""Placement and way of a network in which nothing is routed."""
EXTRACTED = "extracted"
"""The way of what extraction leaves behind, which does not depend on how the routed network was computed."""
TRAIN, INFERENCE = "train_ms", "inference_ms"
TO_COMPILED = "train_ratio_to_compiled_graph"
"""A replayed step's time relative to the compiled ReLU network, replayed too."""
PEAK, SAVED = "peak_memory_mb", "saved_for_backward_mb"
PARAMETERS, SAME = "extra_parameters", "same_modules"


@dataclass(frozen=True)
class Cell:
    """One network of the table, run in one mode."""

    network: str
    placement: str
    """"relu" (nothing is routed), "penultimate" or "all"."""
    way: str
    mode: str

    @property
    def compiled(self) -> bool:
        return self.mode.startswith("compiled")

    @property
    def captured(self) -> bool:
        return self.mode.endswith("graph")


class Measurement(NamedTuple):
    """One row of overhead.csv. A failed measurement has an error and no value."""

    network: str
    placement: str
    way: str
    mode: str
    quantity: str
    value: float | None = None
    """The median over rounds for times."""
    p10: float | None = None
    p90: float | None = None
    ratio: float | None = None
    """To the network with ReLU in the same mode, the median over rounds."""
    ratio_p10: float | None = None
    ratio_p90: float | None = None
    repeats: int = 0
    error: str = ""

    @property
    def cell(self) -> Cell:
        return Cell(self.network, self.placement, self.way, self.mode)


class Measurements:
    """The rows so far."""

    def __init__(self, rows: Iterable[Measurement] = ()) -> None:
        self.rows = list(rows)

    @property
    def by_key(self) -> dict[tuple[Cell, str], Measurement]:
        """The successful rows by cell and quantity."""
        return {(row.cell, row.quantity): row for row in self.rows if row.value is not None}

    def add(self, cell: Cell, quantity: str, value: float, ratio: float | None = None) -> None:
        """Add a single figure."""
        self.rows.append(Measurement(*_key(cell), quantity, float(value), ratio=ratio))

    def add_times(self, cell: Cell, quantity: str, values: Spread, ratio: Spread | None, repeats: int) -> None:
        """Add a time with its spread over rounds."""
        row = Measurement(*_key(cell), quantity, values.median, values.low, values.high, repeats=repeats)
        if ratio is not None:
            row = row._replace(ratio=ratio.median, ratio_p10=ratio.low, ratio_p90=ratio.high)
        self.rows.append(row)

    def fail(self, cells: Sequence[Cell], quantity: str, error: BaseException) -> None:
        """Add rows that say why a quantity could not be measured."""
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
        self.rows += [Measurement(*_key(cell), quantity, error=message) for cell in cells]


def _key(cell: Cell) -> tuple[str, str, str, str]:
    return cell.network, cell.placement, cell.way, cell.mode
