"""Timing several contenders against each other.

They run in turns, in an order that changes from round to round, so that what slows the machine down slows all of them;
a ratio is taken within a round. On a GPU each burst of calls is timed by two events.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

Run = Callable[[], object]
"""One step, or one call, of a contender."""
Key = TypeVar("Key", bound=Hashable)

WARM_UP = 3
"""Runs of a contender before it is measured."""
FEWEST_ROUNDS = 3
MOST_IN_A_BURST = 100


class OutOfTime(Exception):
    """The time of the study is used up; nothing more begins."""


class Deadline:
    """A point in time, checked before each piece of work that takes long.

    >>> Deadline(60).share(0.5).left() <= 30
    True
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def share(self, part: float) -> Deadline:
        """A deadline after a part of the time left."""
        return Deadline(self.left() * part)

    def check(self) -> None:
        """Raise `OutOfTime` past the deadline."""
        if self.left() <= 0:
            raise OutOfTime("left out: the time given by --minutes is used up")


@dataclass(frozen=True)
class Spread:
    """The median of several measurements, and their 10th and 90th percentiles."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """
    >>> spread([5.0, 1.0, 3.0, 2.0, 4.0])
    Spread(median=3.0, low=1.4, high=4.6)
    """
    ordered = sorted(values)
    return Spread(_quantile(ordered, 0.5), _quantile(ordered, 0.1), _quantile(ordered, 0.9))


def ratios(values: Sequence[float], baseline: Sequence[float]) -> Spread:
    """The spread of the ratios of the two, round by round.

    >>> ratios([2.0, 6.0, 3.0], [1.0, 2.0, 1.5]).median
    2.0
    """
    return spread([value / base for value, base in zip(values, baseline, strict=True)])


def interleaved(
    runs: Mapping[Key, Run], repeats: int, device: torch.device, burst_ms: float, deadline: Deadline
) -> tuple[dict[Key, list[float]], dict[Key, Exception]]:
    """Milliseconds per call of each contender, one value per round, and the errors of those that failed.

    Past the deadline no round begins after the first few.
    """
    bursts: dict[Key, int] = {}
    failed: dict[Key, Exception] = {}
    for key, run in runs.items():
        try:
            run()
            one = _timed(run, 1, device)
            bursts[key] = max(1, min(MOST_IN_A_BURST, round(burst_ms / max(one, 1e-6))))
        except Exception as error:
            failed[key] = error
    times: dict[Key, list[float]] = {key: [] for key in bursts}
    order = list(bursts)
    shuffled = random.Random(0)
    with _no_garbage_collection():
        for number in range(repeats):
            if number >= FEWEST_ROUNDS and deadline.left() < 0:
                break
            if number % 5 == 4:
                gc.collect()
            shuffled.shuffle(order)
            for key in order:
                if key in failed:
                    continue
                try:
                    if bursts[key] > 1:
                        runs[key]()  # brings its own weights and code back to the caches
                    times[key].append(_timed(runs[key], bursts[key], device))
                except Exception as error:
                    failed[key] = error
    return {key: values for key, values in times.items() if key not in failed}, failed


def _timed(run: Run, count: int, device: torch.device) -> float:
    """Milliseconds per call over `count` calls."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - start) * 1e3 / count
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection in the middle of a burst would be counted as the contender's."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between neighbours, as numpy has it."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
