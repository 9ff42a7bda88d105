"""Tests of evidence: margins and standard errors of a round, against numpy's mean and standard deviation."""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexact.policy.evidence import RoundStatistics

CPU = torch.device("cpu")


def gathered(steps: numpy.ndarray) -> RoundStatistics:
    """steps: (steps, rows, K)."""
    evidence = RoundStatistics(*steps.shape[1:], CPU)
    for step in steps:
        evidence.add(torch.from_numpy(step).float())
    return evidence


@given(
    steps=st.integers(3, 40),
    rows=st.integers(1, 3),
    k=st.integers(2, 6),
    seed=st.integers(0, 1000),
    leader=st.integers(0, 5),
)
def test_a_lead_is_the_mean_of_paired_differences_with_its_standard_error(
    steps: int, rows: int, k: int, seed: int, leader: int
) -> None:
    advantages = numpy.random.default_rng(seed).normal(size=(steps, rows, k))
    leaders = [(leader + row) % k for row in range(rows)]
    margin, error = gathered(advantages).leads(torch.tensor(leaders))
    for row, own in enumerate(leaders):
        difference = advantages[:, row] - advantages[:, row, own : own + 1]
        expected = difference.std(axis=0, ddof=1) / numpy.sqrt(steps)
        numpy.testing.assert_allclose(margin[row], difference.mean(axis=0), rtol=1e-3, atol=1e-5)
        numpy.testing.assert_allclose(error[row], expected, rtol=1e-2, atol=2e-3)
        assert margin[row, own] == error[row, own] == 0


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_nothing_is_significant_before_the_third_step(steps: int) -> None:
    margin, error = gathered(numpy.random.default_rng(0).normal(size=(steps, 2, 3))).leads(torch.tensor([0, 1]))
    assert not margin.any()
    assert error.isinf().all()


def test_the_leader_is_ahead_of_less_favoured_candidates() -> None:
    """A negative advantage is a falling loss: the leader's is the lowest, and its lead over the others is positive."""
    advantages = numpy.random.default_rng(0).normal(size=(50, 1, 3)) * 0.1 + numpy.array([0.0, -1.0, 1.0])
    margin, error = gathered(advantages).leads(torch.tensor([1]))
    assert margin[0].tolist() == pytest.approx([1.0, 0.0, 2.0], abs=0.1)
    assert (margin[0, [0, 2]] > 10 * error[0, [0, 2]]).all()


def test_a_reset_forgets_the_round() -> None:
    numbers = numpy.random.default_rng(0).normal(size=(20, 1, 3))
    evidence = gathered(numbers[:10])
    evidence.reset()
    for step in numbers[10:]:
        evidence.add(torch.from_numpy(step).float())
    torch.testing.assert_close(evidence.leads(torch.tensor([0])), gathered(numbers[10:]).leads(torch.tensor([0])))
