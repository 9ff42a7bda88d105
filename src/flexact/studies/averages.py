"""Mean and standard deviation over seeds, for tables and figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; the deviation of one value is 0. A value that is not finite makes both not finite,
    so a run that diverged is not hidden.

    >>> mean_and_deviation([1.0, 3.0])
    (2.0, 1.4142135623730951)
    """
    mean = fmean(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) * (value - mean) for value in values) / (len(values) - 1))
