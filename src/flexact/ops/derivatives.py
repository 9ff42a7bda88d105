"""Second and third derivatives of the built-in candidates in closed form, for `higher_order`.

A formula takes the input h, the value a = σ(h) and the slope d = σ′(h), and returns σ″(h) and σ‴(h). At a kink, both
are one-sided derivatives. Each operation is a pass over the tensor, so the formulas of the smooth candidates, which
physics-informed networks use, have few operations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from flexact.candidates import elementwise
from flexact.candidates.registry import SELU_ALPHA, SELU_SCALE, lookup

Pair = tuple[Tensor, Tensor]
Formula = Callable[[Tensor, Tensor, Tensor], Pair]

MOST = 3
"""The highest derivative that is known in closed form."""
_LOG_ROOT = 0.5 * math.log(2 * math.pi)


@functools.cache
def known(keys: tuple[str, ...], alive: tuple[int, ...]) -> bool:
    """Return whether all alive candidates have formulas. Custom candidates have none."""
    return all(lookup(keys[k]).name in _FORMULAS for k in alive)


def higher(key: str, h: Tensor, value: Tensor, slope: Tensor) -> Pair:
    """Return the second and the third derivative of a built-in candidate."""
    return _FORMULAS[lookup(key).name](h, value, slope)


def _flat(h: Tensor, a: Tensor, d: Tensor) -> Pair:
    """Return zeros, for piecewise linear functions."""
    zero = torch.zeros_like(h)
    return zero, zero


def _sigmoid(h: Tensor, a: Tensor, d: Tensor) -> Pair:
    return d * (1 - 2 * a), d * (1 - 6 * d)


def _tanh(h: Tensor, a: Tensor, d: Tensor) -> Pair:
    return -2 * a * d, d * (4 - 6 * d)


def _gelu(h: Tensor, a: Tensor, d: Tensor) -> Pair:
    square = h * h
    density = torch.exp(-0.5 * square - _LOG_ROOT)
    return density * (2 - square), density * (h * (square - 4))


def _silu(h: Tensor, a: Tensor, d: Tensor) -> Pair:
    s = torch.sigmoid(h)
    slope, odd = s - s * s, 1 - 2 * s
    product = h * odd
    return slope * (product + 2), slope * (odd * (product + 3) - 2 * h * slope)


def _quick_gelu(h: Tensor, a: Tensor, d: Tensor) -> Pair:
    rate = elementwise.QUICK_GELU_RATE
    second, third = _silu(rate * h, a, d)
    return rate * second, rate**2 * third


def _of_product(h: Tensor, slope: Tensor, second: Tensor, third: Tensor) -> Pair:
    """Return the derivatives of h·g(h) from those of g."""
    return torch.addcmul(2 * slope, h, second), torch.addcmul(3 * second, h, third)


def _mish(h: Tensor, a: Tensor, d: Tensor) -> Pair:
    s = torch.sigmoid(h)
    s_slope = s * (1 - s)
    s_second = s_slope * (1 - 2 * s)
    g = torch.tanh(torch.nn.functional.softplus(h))
    q = 1 - g * g
    slope = q * s
    q_slope = -2 * g * slope
    second = q_slope * s + q * s_slope
    q_second = -2 * (slope * slope + g * second)
    return _of_product(h, slope, second, q_second * s + 2 * q_slope * s_slope + q * s_second)


def _elu(h: Tensor, a: Tensor, d: Tensor, scale: float = 1.0) -> Pair:
    second = torch.where(h < 0, scale * torch.exp(h), 0.0)
    return second, second


def _softplus(h: Tensor, a: Tensor, d: Tensor) -> Pair:
    s = torch.sigmoid(h)
    slope = s * (1 - s)
    return slope, slope * (1 - 2 * s)


def _logsigmoid(h: Tensor, a: Tensor, d: Tensor) -> Pair:
    second, third = _softplus(h, a, d)
    return -second, -third


def _softsign(h: Tensor, a: Tensor, d: Tensor) -> Pair:
    inverse = (1 + h.abs()).reciprocal()
    cube = inverse**3
    return -2 * h.sign() * cube, 6 * cube * inverse


def _tanhshrink(h: Tensor, a: Tensor, d: Tensor) -> Pair:
    t = torch.tanh(h)
    second, third = _tanh(h, t, 1 - d)
    return -second, -third


def _gelu_tanh(h: Tensor, a: Tensor, d: Tensor) -> Pair:
    c, cubic = math.sqrt(2 / math.pi), 0.044715
    h = h.clamp(-100, 100)  # outside this range the derivatives are 0, and h³ could overflow
    u_slope, u_second, u_third = c * (1 + 3 * cubic * h * h), 6 * c * cubic * h, 6 * c * cubic
    t = torch.tanh(c * (h + cubic * h**3))
    slope = 1 - t * t
    second, third = _tanh(h, t, slope)
    inner_second = second * u_slope**2 + slope * u_second
    inner_third = third * u_slope**3 + 3 * second * u_slope * u_second + slope * u_third
    return _of_product(h, 0.5 * slope * u_slope, 0.5 * inner_second, 0.5 * inner_third)


def _clipped_gelu(h: Tensor, a: Tensor, d: Tensor) -> Pair:
    second, third = _gelu(h, a, d)
    inside = h <= elementwise.GELU_LIMIT
    return second * inside, third * inside


def _laplace(h: Tensor, a: Tensor, d: Tensor) -> Pair:
    deviation = elementwise.LAPLACE_DEVIATION
    z = (h - elementwise.LAPLACE_MEAN) / deviation
    return -z * d / deviation, (z * z - 1) * d / deviation**2


def _sqrt_softplus(h: Tensor, a: Tensor, d: Tensor) -> Pair:
    second, third = _softplus(h, a, d)
    own = (second - 2 * d * d) / (2 * a)
    far = h < -40  # there the function is exp(h/2), and the divisor may underflow
    return torch.where(far, a / 4, own), torch.where(far, a / 8, (third - 6 * d * own) / (2 * a))


def _between(low: float, high: float, second: float) -> Formula:
    """Return the formula of a function that is quadratic between two kinks and linear elsewhere."""
    return lambda h, a, d: (((h > low) & (h < high)).to(h.dtype) * second, torch.zeros_like(h))


_PIECEWISE_LINEAR = (
    *("relu", "leaky_relu", "identity", "relu6"),
    *("hardsigmoid", "hardtanh", "hardshrink", "softshrink"),
)
_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(_PIECEWISE_LINEAR, _flat),
    "sigmoid": _sigmoid,
    "tanh": _tanh,
    "gelu": _gelu,
    "silu": _silu,
    "mish": _mish,
    "elu": _elu,
    "selu": lambda h, a, d: _elu(h, a, d, SELU_ALPHA * SELU_SCALE),
    "softplus": _softplus,
    "hardswish": _between(-3, 3, 1 / 3),
    "softsign": _softsign,
    "relu_squared": _between(0, math.inf, 2.0),
    "sine": lambda h, a, d: (-a, -d),
    "logsigmoid": _logsigmoid,
    "tanhshrink": _tanhshrink,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "clipped_gelu": _clipped_gelu,
    "hard_mish": _between(-2, 0, 1.0),
    "laplace": _laplace,
    "sqrt_softplus": _sqrt_softplus,
    "star_relu": _between(0, math.inf, 2 * elementwise.STAR_RELU_SCALE),
    "snake": lambda h, a, d: (2 * torch.cos(2 * h), -4 * torch.sin(2 * h)),
}
"""The formulas by name. A candidate without one runs in the plain blend (see `known`)."""
