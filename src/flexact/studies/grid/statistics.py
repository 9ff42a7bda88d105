"""Statistics over seeds: means, paired t-tests, and how tables show means and gains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from flexact.errors import missing_extra
from flexact.studies.grid.store import DONE
from flexact.studies.grid.study import Row


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; the deviation of one value is 0. A value that is not finite makes both not finite,
    so a run that diverged is not hidden.

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
    why: str = ""


def paired(ours: Mapping[int, float], baseline: Mapping[int, float]) -> Comparison | None:
    """A two-sided paired t-test over the seeds that both have; None if there is no such seed.

    >>> paired({0: 71.0, 1: 72.0}, {0: 70.0})
    Comparison(seeds=1, gain=1.0, p=None, why='one seed: a test needs two')
    """
    shared = sorted(set(ours) & set(baseline))
    if not shared:
        return None
    first, second = [ours[seed] for seed in shared], [baseline[seed] for seed in shared]
    gains = [a - b for a, b in zip(first, second, strict=True)]
    gain = mean_and_deviation(gains)[0]
    if not all(map(math.isfinite, gains)):
        return Comparison(len(shared), gain, None, "a score is not finite")
    if len(shared) < 2:
        return Comparison(1, gain, None, "one seed: a test needs two")
    if not any(gains):
        return Comparison(len(shared), 0.0, None, "all differences are 0")
    if max(gains) - min(gains) <= 1e-9 * max(map(abs, first + second)):
        return Comparison(len(shared), gain, None, "the same difference on every seed: no spread to test against")
    try:
        from scipy.stats import ttest_rel
    except ImportError:
        raise missing_extra("scipy", "studies") from None
    return Comparison(len(shared), gain, float(ttest_rel(first, second).pvalue))


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
    """The ratio of the seconds of two runs, for each pair that ran on the same device."""
    return [one.seconds / base.seconds for one, base in pairs if one.device == base.device and base.seconds > 0]


def figure(value: float, unit: str = "") -> str:
    """A number with two decimals; "-" for NaN.

    >>> figure(0.126), figure(1.149, "×"), figure(math.nan)
    ('0.13', '1.15×', '-')
    """
    return f"{value:.2f}{unit}" if math.isfinite(value) else "-"


def times(value: float) -> str:
    """A ratio in a table."""
    return figure(value, "×")


def spread(by_seed: Mapping[int, float], decimals: int = 2) -> str:
    """The mean over seeds and its standard deviation.

    >>> spread({0: 1.0, 1: 3.0}), spread({0: 1.0}), spread({})
    ('2.00 ± 1.41', '1.00', '-')
    """
    if not by_seed:
        return "-"
    mean, deviation = mean_and_deviation(list(by_seed.values()))
    return f"{mean:.{decimals}f}" + (f" ± {deviation:.{decimals}f}" if len(by_seed) > 1 else "")
