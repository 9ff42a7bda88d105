"""Statistics beyond the paired t-test: Wilcoxon, Holm's correction, effect sizes, and the seeds that a gain needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flexact.errors import missing_extra
from flexact.io.markdown_tables import markdown
from flexact.studies.grid.statistics import mean_and_deviation, p_value, paired

MIN_FOR_WILCOXON = 6
"""Minimum number of seeds for Wilcoxon's test: with fewer, its two-sided p cannot be below 0.05."""
WANTED_GAIN = 0.5
"""The gain in points for which tables show the number of seeds."""
LEVEL, POWER = 0.05, 0.8
MAX_SEEDS = 100_000
_POINTS = 4001
"""Points of the integral over a chi distribution."""


@dataclass(frozen=True)
class Effect:
    """The differences between two methods over the seeds that both have. None: too few seeds, or no spread."""

    seeds: int
    gain: float
    """Mean difference in points."""
    p: float | None
    """Two-sided paired t-test."""
    wilcoxon: float | None
    """Two-sided Wilcoxon signed-rank test."""
    size: float | None
    """Cohen's d of the differences: their mean divided by their standard deviation."""
    interval: tuple[float, float] | None
    """The 95 % confidence interval of the size."""
    needed: int | None
    """Seeds with which a paired t-test finds a gain of `WANTED_GAIN` points with 80 % power, if the differences keep
    their standard deviation."""


def effect(ours: Mapping[int, float], baseline: Mapping[int, float]) -> Effect | None:
    """The differences over the seeds that both have; None if there is no such seed."""
    found = paired(ours, baseline)
    if found is None or found.p is None:
        return None if found is None else Effect(found.seeds, found.gain, None, None, None, None, None)
    gains = [ours[seed] - baseline[seed] for seed in sorted(set(ours) & set(baseline))]
    mean, deviation = mean_and_deviation(gains)
    enough = found.seeds >= MIN_FOR_WILCOXON
    return Effect(
        found.seeds,
        found.gain,
        found.p,
        float(_scipy().wilcoxon(gains).pvalue) if enough else None,
        mean / deviation,
        interval_of(mean / deviation, found.seeds),
        seeds_needed(deviation),
    )


def interval_of(size: float, seeds: int) -> tuple[float, float]:
    """The 95 % confidence interval of Cohen's d of paired differences, from the noncentral t distribution.

    Its ends are the sizes at which the observed t has a probability of 2.5 % on either side.
    """
    t, root = size * math.sqrt(seeds), math.sqrt(seeds)
    low = _solved(lambda noncentrality: _noncentral_t(t, seeds - 1, noncentrality) - (1 - LEVEL / 2), t)
    high = _solved(lambda noncentrality: _noncentral_t(t, seeds - 1, noncentrality) - LEVEL / 2, t)
    return low / root, high / root


def power(gain: float, deviation: float, seeds: int) -> float:
    """The probability that a two-sided paired t-test over these seeds finds a gain at the 5 % level.

    deviation: the standard deviation of the differences.

    >>> round(power(0.5, 1.0, 34), 3)
    0.808
    """
    noncentrality = gain / deviation * math.sqrt(seeds)
    bound = float(_scipy().t.ppf(1 - LEVEL / 2, seeds - 1))
    return 1 - _noncentral_t(bound, seeds - 1, noncentrality) + _noncentral_t(-bound, seeds - 1, noncentrality)


def seeds_needed(deviation: float, gain: float = WANTED_GAIN) -> int | None:
    """The smallest number of seeds with 80 % power for a gain; None if it is above `MAX_SEEDS`.

    >>> seeds_needed(1.0), seeds_needed(0.5), seeds_needed(0.1)
    (34, 10, 3)
    """
    low, high = 1, 2  # a test needs two seeds
    while power(gain, deviation, high) < POWER:
        low, high = high, 2 * high
        if low > MAX_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(gain, deviation, middle) >= POWER else (middle, high)
    return high


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """The p-values with Holm's step-down correction, in their order; None stays None and is not counted as a test.

    >>> holm([0.01, None, 0.04, 0.03])
    [0.03, None, 0.06, 0.06]
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(order):
        largest = max(largest, min(1.0, p * (len(order) - rank)))
        adjusted[index] = largest
    return adjusted


_HEADER = ("method", "gain", "p", "p (Holm)", "p (Wilcoxon)", "d", "95 % CI of d", "seeds needed for 0.5")


def explained(baseline: str) -> str:
    """What the columns of `effects_table` mean. baseline: what the methods are compared with."""
    return (
        f"Statistics: differences from {baseline} on the same seeds. p: two-sided paired t-test; p (Holm): corrected "
        "for all tests of the same table; p (Wilcoxon): signed-rank test, from six seeds on. d: Cohen's effect size of "
        "the paired differences, with its 95 % confidence interval (CI). seeds needed for 0.5: how many seeds a t-test "
        "at the 5 % level needs to find a gain of 0.5 points with 80 % power, if the differences keep their standard "
        "deviation."
    )


def effects_table(methods: Mapping[str, Effect | None]) -> str:
    """The statistics of the methods, with Holm's correction over all of them; empty if nothing could be tested.

    methods: title of a method → its effect.
    """
    shown = {title: one for title, one in methods.items() if one is not None}
    if not any(one.p is not None for one in shown.values()):
        return ""
    adjusted = holm([one.p for one in shown.values()])
    return markdown(_HEADER, [[name, *_row(one, p)] for (name, one), p in zip(shown.items(), adjusted, strict=True)])


def _row(one: Effect, adjusted: float | None) -> list[str]:
    tests = [p_value(one.p), p_value(adjusted), p_value(one.wilcoxon)]
    if one.size is None or one.interval is None:
        return [f"{one.gain:+.2f}", *tests, "-", "-", "-"]
    needed = f"> {MAX_SEEDS:,}" if one.needed is None else f"{one.needed:,}"
    low, high = one.interval
    return [f"{one.gain:+.2f}", *tests, f"{one.size:.2f}", f"{low:.1f} to {high:.1f}", needed]


def _noncentral_t(t: float, df: int, noncentrality: float) -> float:
    """The distribution function of the noncentral t distribution: P((Z + noncentrality) / √(V / df) ≤ t).

    It integrates over √V, which has a chi distribution, by Simpson's rule. scipy's own is NaN far from the
    noncentrality.
    """
    import numpy
    from scipy.integrate import simpson

    stats = _scipy()
    root = numpy.linspace(0, stats.chi.isf(1e-14, df), _POINTS)
    below = stats.norm.cdf(t * root / math.sqrt(df) - noncentrality)
    return float(simpson(below * stats.chi.pdf(root, df), x=root))


def _solved(falling: Callable[[float], float], near: float) -> float:
    """The zero of a decreasing function, searched in both directions from a point."""
    from scipy.optimize import brentq

    step = 1.0
    while falling(near - step) < 0 or falling(near + step) > 0:
        step *= 2
    return float(brentq(falling, near - step, near + step))


def _scipy() -> Any:
    try:
        from scipy import stats
    except ImportError:
        raise missing_extra("scipy", "studies") from None
    return stats
