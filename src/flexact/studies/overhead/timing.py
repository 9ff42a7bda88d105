"""Timing several contenders against each other, and the memory that a step needs."""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

Run = Callable[[], object]
"""One step, or one call, of a contender."""
Key = TypeVar("Key", bound=Hashable)

MAX_IN_A_BURST = 100


class Spread(NamedTuple):
    """The median of several measurements, and their 10th and 90th percentiles."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the percentiles, interpolated linearly.

    >>> spread([5.0, 1.0, 3.0, 2.0, 4.0])
    Spread(median=3.0, low=1.4, high=4.6)
    """
    levels = torch.tensor([0.5, 0.1, 0.9], dtype=torch.float64)
    return Spread(*torch.tensor(values, dtype=torch.float64).quantile(levels).tolist())


def ratios(values: Sequence[float], baseline: Sequence[float]) -> Spread:
    """Return the spread of the ratios, which are taken round by round.

    >>> ratios([2.0, 6.0, 3.0], [1.0, 2.0, 1.5]).median
    2.0
    """
    return spread([value / base for value, base in zip(values, baseline, strict=True)])


def interleaved(
    runs: Mapping[Key, Run],
    repeats: int,
    device: torch.device,
    burst_ms: float = 30.0,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[Key, list[float]], dict[Key, Exception]]:
    """Return the milliseconds per call of each contender, one value per round, and the errors of those whose first call
    failed.

    The contenders run in turns, in an order that changes from round to round, so that whatever slows the machine down
    slows all of them. On a GPU each burst of calls is timed by two events.

    burst_ms: about how long a contender runs per round.
    clock: the clock for devices other than a GPU; with time.process_time, other programs on the machine do not count.
    """
    bursts: dict[Key, int] = {}
    failed: dict[Key, Exception] = {}
    for key, run in runs.items():
        try:
            run()
            one = _timed(run, 1, device, clock)
            bursts[key] = max(1, min(MAX_IN_A_BURST, round(burst_ms / max(one, 1e-6))))
        except Exception as error:
            failed[key] = error
    times: dict[Key, list[float]] = {key: [] for key in bursts}
    order, shuffled = list(bursts), random.Random(0)
    for _ in range(repeats):
        gc.collect()
        gc.disable()  # a collection during a burst would count as the contender's time
        try:
            shuffled.shuffle(order)
            for key in order:
                if bursts[key] > 1:
                    runs[key]()  # brings its weights and code back into the caches
                times[key].append(_timed(runs[key], bursts[key], device, clock))
        finally:
            gc.enable()
    return times, failed


def _timed(run: Run, count: int, device: torch.device, clock: Callable[[], float]) -> float:
    """Return the milliseconds per call over `count` calls."""
    if device.type != "cuda":
        start = clock()
        for _ in range(count):
            run()
        return (clock() - start) * 1e3 / count
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count


def allocated(device: torch.device) -> int:
    """Return the bytes that are allocated now; 0 without a GPU."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def peak_mb(run: Callable[[], None], device: torch.device, before: int) -> float | None:
    """Run something, and return its peak memory in MB beyond `before`, weights included; None without a GPU."""
    if device.type != "cuda":
        run()
        return None
    allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def release(device: torch.device) -> None:
    """Free compiled code, graphs and cached memory of networks that are no longer referenced."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
