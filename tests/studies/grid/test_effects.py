"""Tests of effect sizes, corrected p-values and numbers of seeds against closed forms, quadrature and published
tables.
"""

from __future__ import annotations

import math

import pytest
from scipy import integrate, stats

from flexact.studies.grid.statistics import effects_table, holm, interval_of, paired, power, seeds_needed

GAINS = (0.9, 0.2, 1.4, -0.3, 0.8, 1.1, 0.5)
OURS = {seed: 70.0 + seed + gain for seed, gain in enumerate(GAINS)}
BASELINE = {seed: 70.0 + seed for seed in range(len(GAINS))}


def noncentral_t(t: float, freedom: int, center: float) -> float:
    """P(T ≤ t) for T = (Z + center) / √(V / freedom), integrated over the chi distribution of √V."""

    def density(root: float) -> float:
        return float(stats.norm.cdf(t * root / math.sqrt(freedom) - center) * stats.chi.pdf(root, freedom))

    return float(integrate.quad(density, 0, 10 + math.sqrt(freedom), epsabs=1e-12, limit=500)[0])


def test_the_effect_size_is_the_mean_difference_in_standard_deviations() -> None:
    found = paired(OURS, BASELINE)
    mean = sum(GAINS) / 7
    deviation = math.sqrt(sum((gain - mean) ** 2 for gain in GAINS) / 6)
    assert found is not None
    assert (found.seeds, found.gain, found.size) == (7, pytest.approx(mean), pytest.approx(mean / deviation))
    assert found.p == pytest.approx(2 * stats.t.sf(mean / deviation * math.sqrt(7), 6))


def test_the_interval_of_the_gain_is_scipys() -> None:
    found = paired(OURS, BASELINE)
    assert found is not None
    expected = stats.ttest_1samp(GAINS, 0).confidence_interval(0.95)
    assert found.interval == (pytest.approx(expected.low), pytest.approx(expected.high))
    one = paired({0: 1.0}, {0: 0.0})
    assert one is not None
    assert all(map(math.isnan, one.interval))


def test_wilcoxons_p_is_counted_over_all_signs_of_the_ranks() -> None:
    found = paired(OURS, BASELINE)
    ranks = {gain: rank for rank, gain in enumerate(sorted(GAINS, key=abs), start=1)}
    against = sum(rank for gain, rank in ranks.items() if gain < 0)
    sums = [sum(rank for bit, rank in enumerate(range(1, 8)) if signs >> bit & 1) for signs in range(2**7)]
    assert found is not None
    assert found.wilcoxon == pytest.approx(2 * sum(one <= against for one in sums) / 2**7)
    five = paired({seed: OURS[seed] for seed in range(5)}, BASELINE)
    assert five is not None
    assert five.p is not None
    assert five.wilcoxon is None  # with five seeds its least p is 0.0625


@pytest.mark.parametrize(("size", "seeds"), [(0.6, 3), (1.25, 7), (-0.4, 10), (0.0, 5), (6.0, 4), (60.0, 3)])
def test_each_tail_of_the_interval_has_two_and_a_half_percent(size: float, seeds: int) -> None:
    low, high = interval_of(size, seeds)
    t, root = size * math.sqrt(seeds), math.sqrt(seeds)
    assert noncentral_t(t, seeds - 1, low * root) == pytest.approx(0.975, abs=1e-6)
    assert noncentral_t(t, seeds - 1, high * root) == pytest.approx(0.025, abs=1e-6)
    assert low < size < high


@pytest.mark.parametrize(("size", "seeds"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_the_number_of_seeds_matches_published_power_tables(size: float, seeds: int) -> None:
    """Paired t-test, two-sided, 5 %, 80 %: G*Power's numbers for Cohen's small, medium and large effects."""
    assert seeds_needed(1 / size, gain=1.0) == seeds


def test_power_is_the_noncentral_t_beyond_the_critical_value() -> None:
    bound = stats.t.ppf(0.975, 9)
    center = 0.5 / 0.6 * math.sqrt(10)
    expected = 1 - noncentral_t(bound, 9, center) + noncentral_t(-bound, 9, center)
    assert power(0.5, 0.6, 10) == pytest.approx(expected, abs=1e-8)
    assert power(1e-9, 1.0, 10) == pytest.approx(0.05)
    assert seeds_needed(1000.0) is None


def test_holm_equals_the_step_down_procedure() -> None:
    """Sorted: 0.001·4, 0.012·3, 0.03·2 and 0.04·1, of which the last may not be below the one before it."""
    assert holm([0.04, 0.001, 0.03, 0.012]) == pytest.approx([0.06, 0.004, 0.06, 0.036])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([None, 0.02, None]) == [None, 0.02, None]
    assert holm([]) == []


def test_a_table_shows_all_of_them_and_a_dash_where_there_is_no_test() -> None:
    one_seed = paired({0: 71.0}, BASELINE)
    methods = {"ours": paired(OURS, BASELINE), "another": paired(BASELINE | {0: 71.0}, BASELINE), "one": one_seed}
    text = effects_table(methods)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == ["method", "gain", "p", "p (Holm)", "p (Wilcoxon)", "d", "95 % CI of d", "seeds needed for 0.5"]
    found = methods["ours"]
    assert found is not None
    assert found.p is not None
    assert rows[2][:3] == ["ours", "+0.66", f"{found.p:.3f}"]
    assert rows[2][3] == f"{2 * found.p:.3f}"
    assert rows[4] == ["one", "+1.00", "-", "-", "-", "-", "-", "-"]
    assert effects_table({"one": one_seed, "none": None}) == ""
