"""The progress of a study: a bar with the remaining time on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
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
    def over(self, costs: Sequence[float], done: int = 0) -> Iterator[None]:
        """Show progress while the work runs. costs: one per piece, in any unit; done: pieces that are done already."""
        self._costs, self._shares = list(costs), [0.0] * len(costs)
        self._finished, self._pieces = done, done + len(costs)
        self._start = time.monotonic()
        if self.quiet or not sys.stderr.isatty():
            yield
            return
        from rich import progress
        from rich.console import Console

        shares = ("{task.description}", progress.BarColumn(), "{task.percentage:>3.0f} %")
        times = (progress.TimeElapsedColumn(), "left", progress.TimeRemainingColumn())
        with progress.Progress(*shares, *times, console=Console(stderr=True), transient=True) as self._bar:
            self._task = self._bar.add_task(self._description(), total=sum(self._costs) or 1.0)
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
            self._bar.update(self._task, completed=self._spent())

    def finished(self, piece: int, name: str) -> None:
        """Mark one piece as done."""
        self._finished += 1
        self.at(piece, 1.0)
        if self._bar is not None:
            self._bar.update(self._task, description=self._description())
        elif not self.quiet:
            seconds = time.monotonic() - self._start
            spent = self._spent()
            left = seconds * (sum(self._costs) / spent - 1) if spent else 0.0
            told = f"{seconds:.0f} s, about {left:.0f} s left"
            print(f"{self._finished}/{self._pieces} {name} ({told})", file=sys.stderr, flush=True)

    def _spent(self) -> float:
        return sum(cost * share for cost, share in zip(self._costs, self._shares, strict=True))

    def _description(self) -> str:
        return f"{self._named}: {self._finished} of {self._pieces}"
