"""Tests of the candidates' closed-form second and third derivatives, against autograd in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexact.candidates.registry import BUILT_IN, Candidate
from flexact.ops import derivatives

KINKS = (0.0, 0.5, -0.5, 1.0, -1.0, -2.0, 3.0, -3.0, 6.0)


def away_from_kinks() -> Tensor:
    h = torch.linspace(-9.1, 9.1, 301, dtype=torch.float64)
    for kink in KINKS:
        h = torch.where((h - kink).abs() < 0.05, h + 0.1, h)
    return torch.cat([h, torch.tensor([-45.0, -30.0, 15.0, 19.0, 30.0], dtype=torch.float64)])


@pytest.mark.parametrize("candidate", BUILT_IN, ids=lambda candidate: candidate.name)
def test_higher_derivatives_equal_autograds(candidate: Candidate) -> None:
    h = away_from_kinks().requires_grad_()
    found = [candidate.function(h)]
    for _ in range(3):
        total = found[-1].sum() + 0 * h.sum()  # a constant has no graph
        found += torch.autograd.grad(total, h, create_graph=True)
    value, _, second, third = (one.detach() for one in found)
    given = derivatives.higher(candidate.name, h.detach(), value, candidate.derivative(h.detach(), value))
    torch.testing.assert_close(given[0], second, rtol=1e-6, atol=1e-7)
    fine = third.isfinite()  # torch's derivative of the tanh form of GELU is NaN far from 0
    torch.testing.assert_close(given[1][fine], third[fine], rtol=1e-6, atol=1e-7)
    assert given[1].isfinite().all()
