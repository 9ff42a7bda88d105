import math
import statistics

from flexact.studies.grid.statistics import mean_and_deviation


def test_mean_and_standard_deviation_equal_the_standard_librarys() -> None:
    values = [0.1, 0.25, 0.7, 0.05]
    mean, deviation = mean_and_deviation(values)
    assert math.isclose(mean, statistics.mean(values))
    assert math.isclose(deviation, statistics.stdev(values))


def test_one_value_has_no_standard_deviation() -> None:
    assert mean_and_deviation([0.3]) == (0.3, 0.0)


def test_a_run_that_diverged_is_not_left_out() -> None:
    assert all(math.isnan(value) for value in mean_and_deviation([0.1, math.nan]))
    assert mean_and_deviation([0.1, math.inf])[0] == math.inf
