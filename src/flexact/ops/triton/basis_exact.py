"""The basis functions in float32, with an error of about 1e-7 relative to max(0.1, |value|).

All are written in terms of e = exp(−|h|), which cannot overflow and which the compiler evaluates only once.
"""

import triton
import triton.language as tl

from flexact.ops.triton.basis_parts import (
    GELU,
    HARDSWISH,
    LINEAR,
    MISH,
    NEGATIVE_EXP,
    RELU,
    RELU6,
    RELU_SQUARED,
    SIGMOID,
    SILU,
    SINE,
    SOFTPLUS,
    SOFTSIGN,
    TANH,
)

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY_AT_0 = tl.constexpr(0.3989422804014327)


@triton.jit
def exact_value(h, PART: tl.constexpr):
    """Return the value of one basis function."""
    e = tl.exp(-tl.abs(h))
    if PART == LINEAR:
        v = h
    elif PART == RELU:
        v = tl.where(h <= 0, 0.0, h)  # propagates NaN
    elif PART == SIGMOID:
        v = _sigmoid(h, e)
    elif PART == TANH:
        v = _tanh(h, e)
    elif PART == GELU:
        v = h * _normal_cdf(h)
    elif PART == SILU:
        v = h * _sigmoid(h, e)
    elif PART == MISH:
        v = h * _tanh_of_softplus(h, e)
    elif PART == NEGATIVE_EXP:
        near_0 = h * (1 + h * (1 / 2 + h * (1 / 6 + h * (1 / 24 + h * (1 / 120 + h / 720)))))  # where e − 1 cancels
        v = tl.where(h <= 0, tl.where(h > -0.1, near_0, e - 1), 0.0)
    elif PART == SOFTPLUS:
        small = e * (1 + e * (-1 / 2 + e * (1 / 3 - e / 4)))  # where rounding 1 + e loses digits of e
        v = tl.where(h <= 0, 0.0, h) + tl.where(e < 0.01, small, tl.log(1 + e))
    elif PART == HARDSWISH:
        v = h * tl.where(h <= -3, 0.0, tl.where(h >= 3, 6.0, h + 3)) * (1 / 6)
    elif PART == RELU6:
        v = tl.where(h <= 0, 0.0, tl.where(h >= 6, 6.0, h))
    elif PART == SOFTSIGN:
        v = h * (1 / (1 + tl.abs(h)))
    elif PART == RELU_SQUARED:
        r = tl.where(h <= 0, 0.0, h)
        v = r * r
    else:
        tl.static_assert(PART == SINE)
        v = tl.sin(h)
    return v


@triton.jit
def exact_slope(h, v, PART: tl.constexpr):
    """Return the derivative of a basis function from its value v; at a kink it is that of torch's backward."""
    e = tl.exp(-tl.abs(h))
    if PART == LINEAR:
        d = tl.full(h.shape, 1.0, h.dtype)
    elif PART == RELU:
        d = tl.where(h <= 0, 0.0, 1.0)
    elif PART == SIGMOID:
        d = v - v * v
    elif PART == TANH:
        d = 1 - v * v
    elif PART == GELU:
        d = _normal_cdf(h) + h * _DENSITY_AT_0 * tl.exp(-0.5 * h * h)
    elif PART == SILU:
        s = _sigmoid(h, e)
        d = s + v * (1 - s)
    elif PART == MISH:
        t = _tanh_of_softplus(h, e)
        d = t + h * (1 - t * t) * _sigmoid(h, e)
    elif PART == NEGATIVE_EXP:
        d = tl.where(h <= 0, e, 0.0)
    elif PART == SOFTPLUS:
        d = _sigmoid(h, e)
    elif PART == HARDSWISH:
        d = tl.where(h <= -3, 0.0, tl.where(h >= 3, 1.0, h * (1 / 3) + 0.5))
    elif PART == RELU6:
        d = tl.where((h <= 0) | (h >= 6), 0.0, 1.0)
    elif PART == SOFTSIGN:
        reciprocal = 1 / (1 + tl.abs(h))
        d = reciprocal * reciprocal
    elif PART == RELU_SQUARED:
        d = tl.where(h <= 0, 0.0, 2 * h)
    else:
        tl.static_assert(PART == SINE)
        d = tl.cos(h)
    return d


@triton.jit
def _sigmoid(h, e):
    return tl.where(h < 0, e, 1.0) / (1 + e)


@triton.jit
def _tanh(h, e):
    size = (1 - e * e) / (1 + e * e)
    square = h * h
    near_0 = h * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315))))  # where 1 − e² cancels
    return tl.where(tl.abs(h) < 0.1, near_0, tl.where(h < 0, -size, size))


@triton.jit
def _tanh_of_softplus(h, e):
    """Return (n² + 2n)/(n² + 2n + 2) with n = exp(h), written so that n cannot overflow."""
    above = tl.where(h < 0, e * e + 2 * e, 1 + 2 * e)
    return above * (1 / (above + tl.where(h < 0, 2.0, 2 * e * e)))


@triton.jit
def _normal_cdf(h):
    """Return Φ(h) by Abramowitz and Stegun 7.1.26, with an error below 1.5e-7. It shares its exponential with gelu′."""
    t = 1 / (1 + 0.3275911 * _SQRT_HALF * tl.abs(h))
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * tl.exp(-0.5 * h * h)
    return tl.where(h < 0, tail, 1 - tail)
