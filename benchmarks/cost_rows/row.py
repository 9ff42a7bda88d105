"""A row of a cost CSV."""

from __future__ import annotations

import math
from typing import NamedTuple


class Row(NamedTuple):
    """One measurement: the median over rounds, with its 10th and 90th percentiles."""

    case: str
    quantity: str
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    plain_ms: float = math.nan
    """The step of the unconverted network."""
    error: str = ""
    """Why there is no value."""


def failed(case: str, quantity: str, error: Exception) -> Row:
    """Return the row of a measurement that raised an error."""
    return Row(case, quantity, error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:400])
