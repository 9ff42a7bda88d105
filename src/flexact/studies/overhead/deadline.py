"""The time that a study may take."""

from __future__ import annotations

import statistics
import time


class OutOfTime(Exception):
    """Nothing more is begun."""


class Deadline:
    """A point in time, checked before each piece of work that takes long.

    >>> Deadline(60).share(0.5).left() <= 30
    True
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._pieces: list[float] = []

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def share(self, part: float) -> Deadline:
        """A part of the time left."""
        return Deadline(self.left() * part)

    def check(self) -> None:
        """Raise where the time left is less than what a piece took so far.

        That is the median, not the longest: kernels are built in the first piece that needs them, once for all.
        """
        usual = statistics.median_low(self._pieces) if self._pieces else 0.0
        if self.left() < usual:
            raise OutOfTime("left out: the time given by --minutes is used up")

    def took(self, seconds: float) -> None:
        """A piece of work was done."""
        self._pieces.append(seconds)
