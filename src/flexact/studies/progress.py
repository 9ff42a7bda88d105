"""The progress of a study: a bar with the remaining time on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Progress:
    """Shows how many pieces of work are done."""

    def __init__(self, quiet: bool = False, pieces: str = "models") -> None:
        self.quiet = quiet
        self._named = pieces
        self._bar: Any = None
        self._task: Any = None

    @contextmanager
    def over(self, count: int, done: int = 0) -> Iterator[None]:
        """Show progress while the work runs. count: the number of pieces. done: how many were finished earlier."""
        self._earlier, self._finished, self._every, self._start = done, 0, done + count, time.monotonic()
        if self.quiet or not sys.stderr.isatty():
            yield
            return
        from rich import progress
        from rich.console import Console

        columns = ("{task.description}", progress.BarColumn(), progress.MofNCompleteColumn())
        times = (progress.TimeElapsedColumn(), "left", progress.TimeRemainingColumn())
        with progress.Progress(*columns, *times, console=Console(stderr=True), transient=True) as self._bar:
            self._task = self._bar.add_task(self._named, total=self._every, completed=done)
            try:
                yield
            finally:
                self._bar = None

    def finished(self, name: str) -> None:
        """Mark one piece as done."""
        self._finished += 1
        done = self._earlier + self._finished
        if self._bar is not None:
            self._bar.advance(self._task)
        elif not self.quiet:
            seconds = time.monotonic() - self._start
            left = seconds * (self._every - done) / self._finished
            times = f"{seconds:.0f} s, about {left:.0f} s left"
            print(f"{done}/{self._every} {name} ({times})", file=sys.stderr, flush=True)
