"""Tests of the candidates that share a sigmoid, against torch in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexact.candidates.registry import lookup
from flexact.ops.shared_sigmoid import pairs

NAMES = sorted(pairs(torch.zeros(1)))


def inputs() -> Tensor:
    near, far = torch.linspace(-8, 8, 4001), torch.tensor([-1e30, -88.0, -17.0, 0.0, 17.0, 88.0, 1e30])
    return torch.cat([near, 1e-3 * near, far])


@pytest.mark.parametrize("name", NAMES)
def test_value_and_slope_are_exact_to_float32(name: str) -> None:
    h, candidate = inputs(), lookup(name)
    function, derivative = pairs(h)[name]
    value = candidate.function(h.double())
    for found, expected in (
        (function(h), value),
        (derivative(h, function(h)), candidate.derivative(h.double(), value)),
    ):
        error = (found.double() - expected).abs() / expected.abs().clamp(min=1)
        assert error.max() < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_infinity_and_nan_give_the_values_of_torch(name: str) -> None:
    h, candidate = torch.tensor([torch.inf, -torch.inf, torch.nan]), lookup(name)
    function, derivative = pairs(h)[name]
    value = candidate.function(h)
    torch.testing.assert_close(function(h), value, equal_nan=True)
    torch.testing.assert_close(derivative(h, function(h)), candidate.derivative(h, value), equal_nan=True)
