"""Where the host's time goes in a piece of work, by Python function."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from pathlib import Path

from flexact.studies.overhead.launches import Kernel

RUNS = 10


def functions_of_run(run: Callable[[], object], runs: int = RUNS) -> list[Kernel]:
    """The functions that one run calls, as kernels on the host: the one with the longest time of its own first.

    The profiler slows Python down, and what it calls it does not: take the shares, not the microseconds.

    >>> functions_of_run(lambda: sorted([2, 1]), runs=2)[0].calls
    1
    """
    profile = cProfile.Profile()
    for _ in range(runs):
        profile.runcall(run)
    rows = [
        Kernel(_name(*where), round(calls / runs), own * 1e6 / runs)
        for where, (_, calls, own, _, _) in pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    ]
    return sorted(rows, key=lambda row: (-row.microseconds, row.name))


def _name(file: str, line: int, function: str) -> str:
    return function if file == "~" else f"{Path(file).parent.name}/{Path(file).name}:{line} {function}"
