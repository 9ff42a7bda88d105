"""Tests of the accuracy of the functions in kernels.c, against sympy's derivatives in 200 digits."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from unittest import mock

import mpmath
import pytest
import sympy
import torch
from torch import Tensor

from flexact.candidates.registry import SELU_ALPHA, SELU_SCALE, lookup
from flexact.ops import derivatives, dispatch
from flexact.ops.blending import Blending
from flexact.ops.native import library
from flexact.ops.native import routed as native
from flexact.ops.native.blends import NativeBlends

pytestmark = pytest.mark.skipif(not dispatch.c_compiler(), reason="there is no C compiler")

X = sympy.Symbol("x", real=True)
SMOOTH = {
    "sigmoid": 1 / (1 + sympy.exp(-X)),
    "tanh": sympy.tanh(X),
    "gelu": X * sympy.erfc(-X / sympy.sqrt(2)) / 2,
    "silu": X / (1 + sympy.exp(-X)),
    "mish": X - 2 * X / (1 + (1 + sympy.exp(X)) ** 2),
    "softplus": sympy.log(1 + sympy.exp(X)),
    "sine": sympy.sin(X),
    "gelu_tanh": X / (1 + sympy.exp(-sympy.sqrt(8 / sympy.pi) * (X + sympy.Rational(44715, 10**6) * X**3))),
}
BELOW_0 = {
    "elu": sympy.exp(X) - 1,
    "selu": sympy.Float(SELU_SCALE, 30) * sympy.Float(SELU_ALPHA, 30) * (sympy.exp(X) - 1),
    "softsign": X / (1 - X),
}
PIECEWISE_POLYNOMIAL = ("relu", "leaky_relu", "identity", "hardswish", "relu6", "relu_squared")
UNIT = 2.0**-24
"""The largest relative error of a rounding to float32."""
ULP = (8, 8, 8, 16)
"""The errors that kernels.c promises for the value and the first three derivatives, in units."""
UNDERFLOW = 1e-32

BUILDS = dict(zip(("all vector units", "without threads", "the oldest processor"), library.FLAGS, strict=True))


@pytest.fixture(scope="module", params=BUILDS, autouse=True)
def build(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles with each set of flags: without fused multiply-add, for example, results are rounded differently."""
    with mock.patch.object(library, "FLAGS", (BUILDS[request.param],)):
        found = library.load.__wrapped__()
    with mock.patch.object(library, "load", return_value=found), mock.patch.object(dispatch, "_forced", "native"):
        dispatch.active.cache_clear()
        yield
    dispatch.active.cache_clear()


def grid() -> Tensor:
    sizes = torch.cat([10.0 ** torch.arange(-30, 0, 3), torch.tensor([20.0, 50.0, 86.9, 87.1, 100.0, 1e3, 1e4, 1e6])])
    huge = torch.tensor([1e10, 1e20, 1e30, 3.4e38])
    return torch.cat([torch.linspace(-12, 12, 97), torch.linspace(-2, 2, 40), sizes, -sizes, huge, -huge])


@functools.cache
def exact(name: str) -> tuple[Tensor, list[Tensor]]:
    """Returns points, and a function with its first four derivatives there, in float64."""
    formula = SMOOTH.get(name, BELOW_0.get(name))
    h = grid() if name in SMOOTH else grid()[grid() < 0]
    found = []
    with mpmath.workdps(200):
        points = [mpmath.mpf(x) for x in h.tolist()]
        for order in range(5):
            function = sympy.lambdify(X, sympy.diff(formula, X, order), "mpmath")
            found.append(torch.tensor([float(function(x)) for x in points], dtype=torch.float64))
    return h, found


def computed(name: str, h: Tensor) -> list[Tensor]:
    """Returns the value and the first three derivatives in C."""
    one = torch.ones(1, 1)
    alone = Blending(one, one, torch.ones(()), (name,), (0,), 1, False)
    return [native.forward(h, alone)[0], *(NativeBlends(h, alone).blend(n) for n in (1, 2, 3))]


@pytest.mark.parametrize("name", [*SMOOTH, *BELOW_0])
def test_errors_are_a_few_units_in_the_last_place_of_the_value_and_of_the_input(name: str) -> None:
    h, expected = exact(name)
    for order, ours in enumerate(computed(name, h)):
        sensitive = (h.double() * expected[order + 1]).abs()
        allowed = ULP[order] * UNIT * (expected[order].abs() + sensitive) + UNDERFLOW
        error = (ours.double() - expected[order]).abs()
        assert bool((error <= allowed).all()), (order, h[error > allowed], (error / allowed).max() * ULP[order])


@pytest.mark.parametrize("name", PIECEWISE_POLYNOMIAL)
def test_polynomial_pieces_are_rounded_once_or_twice(name: str) -> None:
    h = grid()
    exact_h, candidate = h.double(), lookup(name)
    value = candidate.function(exact_h)
    slope = candidate.derivative(exact_h, value)
    expected = [value, slope, *derivatives.higher(name, exact_h, value, slope)]
    for order, ours in enumerate(computed(name, h)):
        allowed = 4 * UNIT * expected[order].abs() + (UNIT if name == "hardswish" else UNDERFLOW)
        overflows = expected[order].float().isinf()
        right = (ours.double() - expected[order]).abs() <= allowed
        assert bool(torch.where(overflows, ours == expected[order].float(), right).all()), h[~right & ~overflows]


def test_gelu_keeps_its_digits_where_the_distribution_function_is_small() -> None:
    h = torch.linspace(-6, -3, 400)
    with mpmath.workdps(30):
        exact = [x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2 for x in map(mpmath.mpf, h.tolist())]
    value = torch.tensor([float(x) for x in exact], dtype=torch.float64)
    ours = computed("gelu", h)[0].double()
    assert float(((ours - value) / value).abs().max()) < 1.2e-6


def test_every_formula_in_c_is_tested() -> None:
    assert {"given", *SMOOTH, *BELOW_0, *PIECEWISE_POLYNOMIAL} == {*native.FUNCTIONS}
