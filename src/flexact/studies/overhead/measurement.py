"""The study's one table, with a row per measurement."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flexact.studies.overhead.options import BASELINE

FILE = "overhead.csv"
TRAIN = "train_ms"
TO_COMPILED = "train_ratio_to_compiled_graph"
"""A replayed step's time relative to the compiled ReLU network, also replayed."""
PEAK, PARAMETERS = "peak_memory_mb", "extra_parameters"


class Cell(NamedTuple):
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

    @property
    def baseline(self) -> Cell:
        """The same network with ReLU in the same mode."""
        return self._replace(placement=BASELINE, way=BASELINE)


class Measurement(NamedTuple):
    """One row of overhead.csv. A failed measurement has an error and no value."""

    network: str
    placement: str
    way: str
    mode: str
    quantity: str
    value: float | None = None
    """For times, the median over rounds."""
    p10: float | None = None
    p90: float | None = None
    ratio: float | None = None
    """Ratio to the network with ReLU in the same mode, for times the median over rounds."""
    ratio_p10: float | None = None
    ratio_p90: float | None = None
    repeats: int = 0
    error: str = ""

    @property
    def cell(self) -> Cell:
        return Cell(self.network, self.placement, self.way, self.mode)


def by_key(rows: Iterable[Measurement]) -> dict[tuple[Cell, str], Measurement]:
    """Return the successful rows by cell and quantity."""
    return {(row.cell, row.quantity): row for row in rows if row.value is not None}


def failed(cell: Cell, error: Exception) -> Measurement:
    """Return the row of a step that could not be measured."""
    return Measurement(*cell, TRAIN, error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:400])
