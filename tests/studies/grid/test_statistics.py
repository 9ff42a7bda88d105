"""Tests of comparing two methods over the seeds that both have."""

from __future__ import annotations

import math

import pytest

from flexact.studies.grid.statistics import paired


def test_the_paired_test_equals_the_closed_form_of_students_for_three_seeds() -> None:
    """With two degrees of freedom, the two-sided p of t is 1 − t/√(2 + t²)."""
    found = paired({0: 71.0, 1: 72.5, 2: 73.0}, {0: 70.0, 1: 71.0, 2: 72.5})
    mean, std = 1.0, 0.5
    t = mean / (std / math.sqrt(3))
    assert found is not None
    assert found.gain == pytest.approx(mean)
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t))


def test_only_seeds_that_both_methods_have_are_compared() -> None:
    found = paired({0: 71.0, 1: 72.0, 7: 10.0}, {0: 70.0, 1: 71.5, 3: 99.0})
    assert found is not None
    assert (found.seeds, found.gain) == (2, 0.75)
    assert paired({0: 1.0}, {1: 1.0}) is None


@pytest.mark.parametrize(
    ("ours", "p", "why"),
    [
        ({0: 71.0}, None, "one seed: a test needs two"),
        ({0: 70.0, 1: 71.0}, None, "all differences are 0"),
        ({0: 70.1, 1: 71.1}, None, "the same difference on every seed"),
        ({0: math.nan, 1: 71.0}, None, "not finite"),
    ],
)
def test_the_reason_for_a_missing_test_is_reported(ours: dict[int, float], p: float | None, why: str) -> None:
    found = paired(ours, {0: 70.0, 1: 71.0})
    assert found is not None
    assert found.p == p
    assert why in found.why
