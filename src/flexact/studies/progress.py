"""How far a study is: a bar with the time left on a terminal, plain lines elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Progress:
    """Told how far each of several pieces of work is, shows how far all of them are."""

    def __init__(self, quiet: bool = False, pieces: str = "models") -> None:
        self.quiet = quiet
        self._named = pieces
        self._bar: Any = None
        self._task: Any = None

    @contextmanager
    def over(self, costs: Sequence[float], done: int = 0) -> Iterator[None]:
        """Around the work: costs, one a piece, in any unit; done, how many pieces an earlier run did."""
        self._costs, self._shares = list(costs), [0.0] * len(costs)
        self._finished, self._pieces = done, done + len(costs)
        self._start = time.monotonic()
        if self.quiet or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        with Bar(
            *columns,
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        ) as self._bar:
            self._task = self._bar.add_task(self._told(), total=sum(self._costs) or 1.0)
            try:
                yield
            finally:
                self._bar = None

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Around one piece of work whose end is not known, such as the building of a page."""
        if self.quiet or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console

        with Console(stderr=True).status(what):
            yield

    def at(self, piece: int, share: float) -> None:
        """One piece is done to a share between 0 and 1."""
        self._shares[piece] = share
        if self._bar is not None:
            spent = sum(cost * share for cost, share in zip(self._costs, self._shares, strict=True))
            self._bar.update(self._task, completed=spent)

    def finished(self, piece: int, name: str) -> None:
        """One piece is done."""
        self._finished += 1
        self.at(piece, 1.0)
        if self._bar is not None:
            self._bar.update(self._task, description=self._told())
        elif not self.quiet:
            seconds = time.monotonic() - self._start
            print(f"{self._finished}/{self._pieces} {name} ({seconds:.0f} s)", file=sys.stderr, flush=True)

    def _told(self) -> str:
        return f"{self._named}: {self._finished} of {self._pieces}"
