"""Statistics over seeds: means, paired tests, effect sizes, and how tables show them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from flexact.errors import missing_extra
from flexact.io.markdown_tables import markdown
from flexact.studies.grid.study import DONE, Row

MIN_FOR_WILCOXON = 6
"""Minimum number of seeds for Wilcoxon's test: with fewer, its two-sided p cannot be below 0.05."""
WANTED_GAIN = 0.5
"""The gain in points for which tables show the number of seeds that a test needs."""
LEVEL, POWER = 0.05, 0.8
MAX_SEEDS = 100_000


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; the deviation of one value is 0. A non-finite value makes the mean non-finite, so a
    diverged run is not hidden.

    >>> mean_and_deviation([1.0, 3.0])
    (2.0, 1.4142135623730951)
    """
    mean = fmean(values)
    if len(values) < 2:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) * (value - mean) for value in values) / (len(values) - 1))


def by_method(rows: Iterable[Row]) -> dict[str, dict[int, Row]]:
    """Method → seed → row of the finished cells, with the seeds in order."""
    found: dict[str, dict[int, Row]] = {}
    for row in sorted(rows, key=lambda row: row.seed):
        if row.state == DONE:
            found.setdefault(row.method, {})[row.seed] = row
    return found


@dataclass(frozen=True)
class Comparison:
    """Two methods over the seeds that both have. If no test is possible, p is None and `why` gives the reason."""

    seeds: int
    gain: float
    """Mean difference in points."""
    p: float | None
    """Two-sided paired t-test."""
    why: str = ""
    gains: tuple[float, ...] = field(default=(), repr=False, compare=False)
    """The difference of each seed."""

    @property
    def deviation(self) -> float:
        """The standard deviation of the differences."""
        return mean_and_deviation(self.gains)[1]

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the gain, from the t distribution; NaN if no test is possible.

        >>> low, high = paired({0: 1.0, 1: 3.0}, {0: 0.0, 1: 1.0}).interval
        >>> round(low, 2), round(high, 2)
        (-4.85, 7.85)
        """
        if self.p is None:
            return math.nan, math.nan
        half = float(_stats().t.ppf(1 - LEVEL / 2, self.seeds - 1)) * self.deviation / math.sqrt(self.seeds)
        return self.gain - half, self.gain + half

    @property
    def size(self) -> float:
        """Cohen's d of the differences: their mean divided by their standard deviation."""
        return self.gain / self.deviation

    @property
    def wilcoxon(self) -> float | None:
        """Two-sided Wilcoxon signed-rank test; None with too few seeds."""
        return float(_stats().wilcoxon(self.gains).pvalue) if self.seeds >= MIN_FOR_WILCOXON else None


def paired(ours: Mapping[int, float], baseline: Mapping[int, float]) -> Comparison | None:
    """A two-sided paired t-test over the seeds that both have; None if there is no such seed.

    >>> paired({0: 71.0, 1: 72.0}, {0: 70.0})
    Comparison(seeds=1, gain=1.0, p=None, why='one seed: a test needs two')
    """
    shared = sorted(set(ours) & set(baseline))
    if not shared:
        return None
    first, second = [ours[seed] for seed in shared], [baseline[seed] for seed in shared]
    gains = tuple(a - b for a, b in zip(first, second, strict=True))
    gain, p, why = mean_and_deviation(gains)[0], None, ""
    if not all(map(math.isfinite, gains)):
        why = "a score is not finite"
    elif len(shared) < 2:
        why = "one seed: a test needs two"
    elif not any(gains):
        why = "all differences are 0"
    elif max(gains) - min(gains) <= 1e-9 * max(map(abs, first + second)):
        why = "the same difference on every seed: no spread to test against"
    else:
        p = float(_stats().ttest_rel(first, second).pvalue)
    return Comparison(len(shared), gain, p, why, gains)


def p_value(p: float | None) -> str:
    """A p-value as the paper writes it.

    >>> p_value(0.0123), p_value(0.0002), p_value(None)
    ('0.012', '<0.001', '-')
    """
    if p is None or math.isnan(p):
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def gain_and_p(found: Comparison | None, decimals: int = 2) -> tuple[str, str]:
    """The mean difference and the p-value of a comparison in a table.

    >>> gain_and_p(Comparison(3, 0.5, 0.0123)), gain_and_p(None)
    (('+0.50', '0.012'), ('-', '-'))
    """
    return ("-", "-") if found is None else (f"{found.gain:+.{decimals}f}", p_value(found.p))


def seconds_ratios(pairs: Iterable[tuple[Row, Row]]) -> list[float]:
    """The ratio of the times of two runs, for each pair that ran on the same device."""
    return [one.seconds / base.seconds for one, base in pairs if one.device == base.device and base.seconds > 0]


def two_decimals(value: float, unit: str = "") -> str:
    """A number with two decimals; "-" for NaN.

    >>> two_decimals(0.126), two_decimals(1.149, "×"), two_decimals(math.nan)
    ('0.13', '1.15×', '-')
    """
    return f"{value:.2f}{unit}" if math.isfinite(value) else "-"


def times(value: float) -> str:
    """A ratio in a table."""
    return two_decimals(value, "×")


def step_costs(
    done: Sequence[Row], methods: Sequence[str], place: Callable[[Row], str], title: Callable[[str], str]
) -> str:
    """A section with the milliseconds of a step, mean over seeds, of each method on each device.

    methods: the baseline comes first. place: names what was trained, from a row. title: the displayed name of a method.
    """
    heading = "## What a training step costs\n\n"
    if all(math.isnan(row.step_ms) for row in done):
        return f"{heading}Cells shared a device, so times are left out."
    lines = []
    for what, device in dict.fromkeys((place(row), row.device) for row in done):
        own = [row for row in done if (place(row), row.device) == (what, device) and math.isfinite(row.step_ms)]
        found = [[row.step_ms for row in own if row.method == method] for method in methods]
        means = [fmean(one) if one else math.nan for one in found]
        ratios = [math.nan, *(mean / means[0] for mean in means[1:])]
        cells = [
            two_decimals(mean) + (f" ({times(ratio)})" if math.isfinite(ratio) else "")
            for mean, ratio in zip(means, ratios, strict=True)
        ]
        lines.append([what, device, *cells])
    explained = f"Milliseconds per step of a run, mean over seeds; in brackets relative to {title(methods[0])}."
    header = ("trained", "device", *map(title, methods))
    return f"{heading}{explained}\n\n" + markdown(header, lines, words=["device"])


def spread(by_seed: Mapping[int, float], decimals: int = 2) -> str:
    """The mean over seeds and its standard deviation.

    >>> spread({0: 1.0, 1: 3.0}), spread({0: 1.0}), spread({})
    ('2.00 ± 1.41', '1.00', '-')
    """
    if not by_seed:
        return "-"
    mean, deviation = mean_and_deviation(list(by_seed.values()))
    return f"{mean:.{decimals}f}" + (f" ± {deviation:.{decimals}f}" if len(by_seed) > 1 else "")


def interval_of(size: float, seeds: int) -> tuple[float, float]:
    """The 95 % confidence interval of Cohen's d of paired differences, from the noncentral t distribution.

    Its ends are the effect sizes for which the observed t is the 97.5 % quantile (low) and the 2.5 % quantile (high).
    """
    from scipy.optimize import brentq

    root = math.sqrt(seeds)
    t = size * root

    def size_with(tail: float) -> float:
        def falling(noncentrality: float) -> float:
            return _noncentral_t(t, seeds - 1, noncentrality) - tail

        step = 1.0
        while falling(t - step) < 0 or falling(t + step) > 0:
            step *= 2
        return float(brentq(falling, t - step, t + step)) / root

    return size_with(1 - LEVEL / 2), size_with(LEVEL / 2)


def power(gain: float, deviation: float, seeds: int) -> float:
    """The probability that a two-sided paired t-test over these seeds finds a gain at the 5 % level.

    deviation: the standard deviation of the differences.

    >>> round(power(0.5, 1.0, 34), 3)
    0.808
    """
    noncentrality = gain / deviation * math.sqrt(seeds)
    bound = float(_stats().t.ppf(1 - LEVEL / 2, seeds - 1))
    return 1 - _noncentral_t(bound, seeds - 1, noncentrality) + _noncentral_t(-bound, seeds - 1, noncentrality)


def seeds_needed(deviation: float, gain: float = WANTED_GAIN) -> int | None:
    """The smallest number of seeds with 80 % power for a gain; None if it is above `MAX_SEEDS`.

    >>> seeds_needed(1.0), seeds_needed(0.5), seeds_needed(0.1)
    (34, 10, 3)
    """
    counts = range(2, MAX_SEEDS + 1)  # a test needs two seeds
    place = bisect_left(counts, POWER, key=lambda seeds: power(gain, deviation, seeds))
    return counts[place] if place < len(counts) else None


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


_EFFECTS = ("method", "gain", "p", "p (Holm)", "p (Wilcoxon)", "d", "95 % CI of d", "seeds needed for 0.5")


def explained(baseline: str) -> str:
    """What the columns of `effects_table` mean. baseline: what the methods are compared with."""
    return (
        f"Statistics: differences from {baseline} on the same seeds. p: two-sided paired t-test; p (Holm): corrected "
        "for all tests of the same table; p (Wilcoxon): signed-rank test, from six seeds on. d: Cohen's effect size of "
        "the paired differences, with its 95 % confidence interval (CI). seeds needed for 0.5: how many seeds a t-test "
        "at the 5 % level needs to find a gain of 0.5 points with 80 % power, if the differences keep their standard "
        "deviation."
    )


def effects_table(methods: Mapping[str, Comparison | None]) -> str:
    """The statistics of the methods, with Holm's correction over all of them; empty if nothing could be tested.

    methods: title of a method → its effect.
    """
    shown = {title: one for title, one in methods.items() if one is not None}
    if not any(one.p is not None for one in shown.values()):
        return ""
    adjusted = holm([one.p for one in shown.values()])
    return markdown(
        _EFFECTS, [[name, *_effect(one, p)] for (name, one), p in zip(shown.items(), adjusted, strict=True)]
    )


def _effect(one: Comparison, adjusted: float | None) -> list[str]:
    if one.p is None:
        return [f"{one.gain:+.2f}", *["-"] * 6]
    needed = seeds_needed(one.deviation)
    low, high = interval_of(one.size, one.seeds)
    return [
        f"{one.gain:+.2f}",
        *(p_value(p) for p in (one.p, adjusted, one.wilcoxon)),
        f"{one.size:.2f}",
        f"{low:.1f} to {high:.1f}",
        f"> {MAX_SEEDS:,}" if needed is None else f"{needed:,}",
    ]


def _noncentral_t(t: float, df: int, noncentrality: float) -> float:
    """The distribution function of the noncentral t distribution. scipy's is NaN where it is almost 0."""
    below = float(_stats().nct.cdf(t, df, noncentrality))
    return 0.0 if math.isnan(below) else below


def _stats() -> Any:
    try:
        from scipy import stats
    except ImportError:
        raise missing_extra("scipy", "studies") from None
    return stats
