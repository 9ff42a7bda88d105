"""Tests of the differential equation unit against a numerical solver, in each case and at the transitions between
cases.
"""

from __future__ import annotations

import math

import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from flexact.baselines import DifferentialEquationUnit
from flexact.baselines.deu import LEAST, solution

CASES = {
    "two real roots": (1.0, 3.0, 2.0),
    "a double root": (1.0, 2.0, 1.0),
    "complex roots": (1.0, 1.0, 2.0),
    "imaginary roots": (1.0, 0.0, 2.0),
    "roots of both signs": (1.0, 0.0, -0.5),
    "one root at 0": (1.0, 1.0, 0.0),
    "both roots at 0": (1.0, 0.0, 0.0),
    "a root near 0": (1.0, 1.0, 1e-7),
    "roots nearly equal": (1.0, 2.0, 1 + 1e-9),
    "roots far apart": (1.0, 4.0, 0.001),
    "a growing solution": (2.0, -0.3, 0.1),
    "a negative": (-1.0, 0.5, 0.3),
}
PLACES = (-1.5, -0.3, 0.0, 0.2, 1.0, 2.5, 6.0)


def evaluated(t: Tensor, *equation: float) -> Tensor:
    return solution(t, *(torch.tensor(value, dtype=t.dtype) for value in equation))


def solved(t: float, a: float, b: float, c: float, start: float, slope: float) -> float:
    """Returns y(t), integrated from 0 to t by an adaptive solver of order 8."""
    if t == 0:
        return start
    force = 1.0 if t > 0 else 0.0
    found = solve_ivp(
        lambda _, y: [y[1], (force - b * y[1] - c * y[0]) / a],
        (0, t),
        [start, slope],
        method="DOP853",
        rtol=1e-11,
        atol=1e-12,
    )
    return float(found.y[0, -1])


@pytest.mark.parametrize("equation", CASES.values(), ids=CASES)
def test_the_closed_form_is_the_solution_of_the_equation(equation: tuple[float, float, float]) -> None:
    t = torch.tensor(PLACES, dtype=torch.float64)
    expected = [solved(place, *equation, 0.7, -0.4) for place in PLACES]
    assert evaluated(t, *equation, 0.7, -0.4).tolist() == pytest.approx(expected, rel=1e-8, abs=1e-9)


@pytest.mark.parametrize("equation", CASES.values(), ids=CASES)
def test_single_precision_loses_no_digits_to_cancellation(equation: tuple[float, float, float]) -> None:
    t = torch.linspace(-1.5, 6, 301, dtype=torch.float64)
    exact = evaluated(t, *equation, 0.7, -0.4)
    torch.testing.assert_close(evaluated(t.float(), *equation, 0.7, -0.4).double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("equation", "nudged"),
    [((1.0, 2.0, 1.0), 2), ((1.0, 1.0, 0.0), 2), ((1.0, 0.0, 0.0), 2), ((1.0, 0.0, 0.0), 1)],
    ids=["real to complex roots", "c through 0", "both roots leave 0", "b through 0"],
)
def test_the_unit_is_continuous_between_its_cases_with_its_gradients(
    equation: tuple[float, float, float], nudged: int
) -> None:
    def value_and_gradients(change: float) -> tuple[Tensor, ...]:
        values = [*equation, 0.7, -0.4]
        values[nudged] += change
        leaves = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in values]
        t = torch.linspace(-1.5, 6, 61, dtype=torch.float64, requires_grad=True)
        y = solution(t, *leaves)
        return (y, *torch.autograd.grad(y.sum(), [t, *leaves]))

    below, at, above = value_and_gradients(-1e-7), value_and_gradients(0.0), value_and_gradients(1e-7)
    for left, middle, right in zip(below, at, above, strict=True):
        torch.testing.assert_close(left, middle, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(right, middle, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("equation", CASES.values(), ids=CASES)
def test_gradcheck_passes_in_every_case(equation: tuple[float, float, float]) -> None:
    t = torch.tensor(PLACES, dtype=torch.float64)[[0, 1, 3, 4, 5]].requires_grad_()
    values = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (*equation, 0.7, -0.4)]
    assert torch.autograd.gradcheck(solution, (t, *values), atol=1e-4)


def test_it_starts_as_a_smooth_relu_and_has_five_parameters_per_set() -> None:
    unit, z = DifferentialEquationUnit().double(), torch.linspace(-5, 50, 56, dtype=torch.float64)
    expected = torch.where(z > 0, z - 1 + torch.exp(-z), torch.zeros_like(z))
    torch.testing.assert_close(unit(z), expected)
    assert sum(parameter.numel() for parameter in unit.parameters()) == 5
    assert sum(parameter.numel() for parameter in DifferentialEquationUnit(7).parameters()) == 35


def test_an_equation_without_its_second_derivative_is_approximated_and_stays_finite() -> None:
    """With a = 0 the equation is y′ + y/2 = 1 for positive inputs; |a| is at least LEAST."""
    t = torch.linspace(0.5, 6, 20)
    first_order = 2 * (1 - torch.exp(-t / 2))
    torch.testing.assert_close(evaluated(t, 0.0, 1.0, 0.5, 0.0, 0.0), first_order, rtol=0, atol=2 * LEAST)
    for equation in [(0.0, 1.0, 0.5), (0.0, 0.0, 1.0), (0.0, 0.0, 0.0), (-1e-9, 0.0, -3.0), (0.0, -1.0, 0.0)]:
        leaves = [torch.tensor(value, requires_grad=True) for value in (*equation, 0.7, -0.4)]
        z = torch.tensor([-1e4, -3.0, 0.0, 3.0, 1e4], requires_grad=True)
        y = solution(z, *leaves)
        assert y.isfinite().all(), equation
        gradients = torch.autograd.grad(y.sum(), [z, *leaves])
        assert all(gradient.isfinite().all() for gradient in gradients), equation


def test_exponential_growth_is_clamped() -> None:
    """y″ = y with y(0) = y′(0) = 1 is exp(t) for t < 0; from there on e⁻ᵗ terms are limited to e⁷."""
    t = torch.tensor([-6.0, -8.0, -80.0], dtype=torch.float64)
    y = evaluated(t, 1.0, 0.0, -1.0, 0.0, 1.0)
    assert y[0].item() == pytest.approx(math.sinh(-6.0))
    assert y[1].item() == y[2].item() == pytest.approx(math.sinh(-7.0), rel=1e-4)
