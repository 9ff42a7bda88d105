"""The time that a study may take."""

from __future__ import annotations

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
        self._longest = 0.0

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def share(self, part: float) -> Deadline:
        """A part of the time left."""
        return Deadline(self.left() * part)

    def check(self) -> None:
        """Raise where the time left is less than what the longest piece so far took."""
        if self.left() < self._longest:
            raise OutOfTime("left out: the time given by --minutes is used up")

    def took(self, seconds: float) -> None:
        """A piece of work was done."""
        self._longest = max(self._longest, seconds)
