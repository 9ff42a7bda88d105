"""The time that a study may take."""

from __future__ import annotations

import math
import statistics
import time


class OutOfTime(Exception):
    """Nothing more is begun."""


class Deadline:
    """A point in time, checked before each piece of work that takes long.

    >>> Deadline(60).share(0.5).left() <= 30
    True
    """

    def __init__(self, seconds: float, latest: float = -math.inf) -> None:
        self._end = time.monotonic() + seconds
        self._latest = latest
        """Until then a piece may begin all the same, late."""
        self._pieces: list[float] = []

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def share(self, part: float, late: bool = False) -> Deadline:
        """A part of the time left. late: past it, pieces may begin as long as this deadline lets them."""
        return Deadline(self.left() * part, max(self._end, self._latest) if late else self._latest)

    def at_least(self, seconds: float) -> Deadline:
        """The same, or a later one where less time than that is left."""
        return Deadline(max(seconds, self.left()), self._latest)

    def check(self) -> None:
        """Raise where the time left is less than what a piece took so far.

        That is the median, not the longest: kernels are built in the first piece that needs them, once for all.
        """
        usual = statistics.median_low(self._pieces) if self._pieces else 0.0
        if max(self._end, self._latest) - time.monotonic() < usual:
            raise OutOfTime("left out: the time given by --minutes is used up")

    def took(self, seconds: float) -> None:
        """A piece of work was done."""
        self._pieces.append(seconds)
