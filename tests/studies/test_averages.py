import math
import statistics

from flexact.studies.grid.statistics import mean_and_deviation


def test_mean_and_deviation_are_those_of_the_standard_library() -> None:
    values = [0.1, 0.25, 0.7, 0.05]
    mean, deviation = mean_and_deviation(values)
    assert math.isclose(mean, statistics.mean(values))
    assert math.isclose(deviation, statistics.stdev(values))


def test_one_value_does_not_deviate() -> None:
    assert mean_and_deviation([0.3]) == (0.3, 0.0)


def test_a_run_that_diverged_is_not_left_out() -> None:
    assert all(math.isnan(value) for value in mean_and_deviation([0.1, math.nan]))
    assert mean_and_deviation([0.1, math.inf])[0] == math.inf
