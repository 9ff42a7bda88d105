"""Axes of a chart: positions of values, and ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

_MAX = 1e300
"""Values beyond it are not shown, since their differences may overflow."""
_MIN_RANGE = 1e-12
"""Shortest range, relative to its values, that floats can divide."""


@dataclass(frozen=True)
class Axis:
    """The range of an axis.

    >>> Axis(0.0, 90.0).ticks()
    [0.0, 20.0, 40.0, 60.0, 80.0]
    >>> Axis(0.001, 20.0, log=True).ticks()
    [0.001, 0.01, 0.1, 1.0, 10.0]
    >>> Axis(0.0, 200.0).at(50.0)
    0.25
    """

    low: float
    high: float
    log: bool = False

    @classmethod
    def around(cls, values: Iterable[float], room: float = 0.0) -> Axis:
        """Return the axis of all values that can be shown, with a fraction of its length free at both ends."""
        shown = [value for value in values if abs(value) <= _MAX]
        low, high = min(shown, default=0.0), max(shown, default=1.0)
        spare = room * (high - low)
        if high - low <= _MIN_RANGE * max(abs(low), abs(high)):
            spare = 0.5 * abs(low) or 0.5
        return cls(low - spare, high + spare)

    def at(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high end, NaN for what cannot be shown."""
        if self.log:
            return Axis(math.log10(self.low), math.log10(self.high)).at(math.log10(value) if value > 0 else math.nan)
        return (value - self.low) / (self.high - self.low) if abs(value) <= _MAX else math.nan

    def ticks(self, most: int = 6) -> list[float]:
        """Return round numbers on the axis: powers of ten on a logarithmic axis, multiples of 1, 2 or 5 otherwise."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**power for power in range(first, last + 1, math.ceil((last - first + 1) / most) or 1)]
        power = 10.0 ** math.floor(math.log10((self.high - self.low) / most))
        step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if self.high - self.low <= step * most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [float(f"{count * step:.12g}") for count in range(first, last + 1)]
