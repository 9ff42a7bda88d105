"""The progress of a study: a bar with the remaining time on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Progress:
    """Shows the progress of several pieces of work."""

    def __init__(self, quiet: bool = False, pieces: str = "models") -> None:
        self.quiet = quiet
        self._named = pieces
        self._bar: Any = None
        self._task: Any = None

    @contextmanager
    def over(self, count: int, done: int = 0) -> Iterator[None]:
        """Show progress while the work runs. count: the number of pieces; done: that of pieces finished earlier."""
        self._shares, self._done, self._start = [0.0] * count, done, time.monotonic()
        if self.quiet or not sys.stderr.isatty():
            yield
            return
        from rich import progress
        from rich.console import Console

        shares = ("{task.description}", progress.BarColumn(), "{task.percentage:>3.0f} %")
        times = (progress.TimeElapsedColumn(), "left", progress.TimeRemainingColumn())
        with progress.Progress(*shares, *times, console=Console(stderr=True), transient=True) as self._bar:
            self._task = self._bar.add_task(self._described(), total=count or 1)
            try:
                yield
            finally:
                self._bar = None

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Show a spinner during work of unknown length, such as building a page."""
        if self.quiet or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console

        with Console(stderr=True).status(what):
            yield

    def at(self, piece: int, share: float) -> None:
        """Set the progress of one piece, from 0 to 1."""
        self._shares[piece] = share
        if self._bar is not None:
            self._bar.update(self._task, completed=sum(self._shares), description=self._described())

    def finished(self, piece: int, name: str) -> None:
        """Mark one piece as done."""
        self.at(piece, 1.0)
        if self._bar is None and not self.quiet:
            seconds = time.monotonic() - self._start
            left = seconds * (len(self._shares) / sum(self._shares) - 1)
            told = f"{seconds:.0f} s, about {left:.0f} s left"
            finished, every = self._counts()
            print(f"{finished}/{every} {name} ({told})", file=sys.stderr, flush=True)

    def _counts(self) -> tuple[int, int]:
        """The number of finished pieces, and the total."""
        return self._done + self._shares.count(1.0), self._done + len(self._shares)

    def _described(self) -> str:
        finished, every = self._counts()
        return f"{self._named}: {finished} of {every}"
