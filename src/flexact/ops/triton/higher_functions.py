"""The second and third derivatives of the basis functions in Triton, with the formulas of `ops.derivatives`.

They are exact in float32, in half precision as well. Factors are clamped where another factor is 0, so that no
derivative is NaN for an infinite or huge input.
"""

import triton
import triton.language as tl

from flexact.candidates import elementwise
from flexact.ops.triton.basis_functions import (
    CLIPPED_GELU,
    GELU,
    GELU_TANH,
    HARD_MISH,
    HARDSWISH,
    LAPLACE,
    LOGSIGMOID,
    MISH,
    NEGATIVE_EXP,
    QUICK_GELU,
    RELU_SQUARED,
    SIGMOID,
    SILU,
    SINE,
    SNAKE,
    SOFTPLUS,
    SOFTSIGN,
    SQRT_SOFTPLUS,
    STAR_RELU,
    TANH,
    TANHSHRINK,
)

_QUICK_GELU_RATE = tl.constexpr(elementwise.QUICK_GELU_RATE)
_GELU_LIMIT = tl.constexpr(elementwise.GELU_LIMIT)
_LAPLACE_MEAN = tl.constexpr(elementwise.LAPLACE_MEAN)
_LAPLACE_RATE = tl.constexpr(1 / elementwise.LAPLACE_DEVIATION)
_STAR_RELU_SCALE = tl.constexpr(elementwise.STAR_RELU_SCALE)
_DENSITY_AT_0 = tl.constexpr(0.3989422804014327)
_GELU_TANH_RATE = tl.constexpr(0.7978845608028654)  # √(2/π)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def second_and_third(h, PART: tl.constexpr):
    """Return the second and the third derivative of a basis function; at a kink, one-sided derivatives."""
    if PART == SIGMOID:
        _slope, second, third = _of_sigmoid(h)
    elif PART == TANH:
        _slope, second, third = _of_tanh(h)
    elif PART == GELU:
        second, third = _of_gelu(h)
    elif PART == SILU:
        second, third = _of_silu(h)
    elif PART == MISH:
        second, third = _of_mish(h)
    elif PART == NEGATIVE_EXP:
        second = tl.where(h < 0, tl.exp(-tl.abs(h)), 0.0)
        third = second
    elif PART == SOFTPLUS:
        second, third, _fourth = _of_sigmoid(h)
    elif PART == HARDSWISH:
        second = tl.where(tl.abs(h) < 3, 1 / 3, 0.0)
        third = tl.zeros_like(h)
    elif PART == SOFTSIGN:
        reciprocal = 1 / (1 + tl.abs(h))
        cube = reciprocal * reciprocal * reciprocal
        second = tl.where(h < 0, 2 * cube, tl.where(h > 0, -2 * cube, 0.0))
        third = 6 * cube * reciprocal
    elif PART == RELU_SQUARED:
        second = tl.where(h > 0, 2.0, 0.0)
        third = tl.zeros_like(h)
    elif PART == SINE:
        second = -tl.sin(h)
        third = -tl.cos(h)
    elif PART == LOGSIGMOID:
        slope, next_slope, _fourth = _of_sigmoid(h)
        second = -slope
        third = -next_slope
    elif PART == TANHSHRINK:
        _slope, tanh_second, tanh_third = _of_tanh(h)
        second = -tanh_second
        third = -tanh_third
    elif PART == GELU_TANH:
        second, third = _of_gelu_tanh(h)
    elif PART == QUICK_GELU:
        silu_second, silu_third = _of_silu(_QUICK_GELU_RATE * h)
        second = _QUICK_GELU_RATE * silu_second
        third = _QUICK_GELU_RATE * _QUICK_GELU_RATE * silu_third
    elif PART == CLIPPED_GELU:
        gelu_second, gelu_third = _of_gelu(h)
        second = tl.where(h <= _GELU_LIMIT, gelu_second, 0.0)
        third = tl.where(h <= _GELU_LIMIT, gelu_third, 0.0)
    elif PART == HARD_MISH:
        second = tl.where((h > -2) & (h < 0), 1.0, 0.0)
        third = tl.zeros_like(h)
    elif PART == LAPLACE:
        z = _clamped((h - _LAPLACE_MEAN) * _LAPLACE_RATE)
        slope = (_DENSITY_AT_0 * _LAPLACE_RATE) * tl.exp(-0.5 * z * z)
        second = -_LAPLACE_RATE * z * slope
        third = (_LAPLACE_RATE * _LAPLACE_RATE) * (z * z - 1) * slope
    elif PART == SQRT_SOFTPLUS:
        second, third = _of_sqrt_softplus(h)
    elif PART == STAR_RELU:
        second = tl.where(h > 0, 2 * _STAR_RELU_SCALE, 0.0)
        third = tl.zeros_like(h)
    elif PART == SNAKE:
        second = 2 * tl.cos(2 * h)
        third = -4 * tl.sin(2 * h)
    else:  # piecewise linear
        second = tl.zeros_like(h)
        third = second
    return second, third


@triton.jit
def _clamped(h):
    """Return h between −100 and 100. Beyond, an exponential of −|h| is 0 in float32, and powers of h could overflow."""
    return tl.where(h < -100, -100.0, tl.where(h > 100, 100.0, h))


@triton.jit
def _of_sigmoid(h):
    """Return the first three derivatives of the sigmoid."""
    e = tl.exp(-tl.abs(h))
    reciprocal = 1 / (1 + e)
    slope = e * reciprocal * reciprocal
    odd = tl.where(h < 0, 1 - e, e - 1) * reciprocal  # 1 − 2·sigmoid
    return slope, slope * odd, slope * (1 - 6 * slope)


@triton.jit
def _of_tanh(h):
    """Return the first three derivatives of tanh."""
    square = tl.exp(-2 * tl.abs(h))
    reciprocal = 1 / (1 + square)
    t = tl.where(h < 0, square - 1, 1 - square) * reciprocal
    slope = 4 * square * reciprocal * reciprocal
    return slope, -2 * t * slope, slope * (4 - 6 * slope)


@triton.jit
def _of_gelu(h):
    near = _clamped(h)
    square = near * near
    density = _DENSITY_AT_0 * tl.exp(-0.5 * square)
    return density * (2 - square), density * near * (square - 4)


@triton.jit
def _of_silu(h):
    near = _clamped(h)
    slope, second, third = _of_sigmoid(near)
    return 2 * slope + near * second, 3 * second + near * third


@triton.jit
def _of_mish(h):
    near = _clamped(h)
    e = tl.exp(-tl.abs(near))
    s = tl.where(near < 0, e, 1.0) / (1 + e)
    s_slope, s_second, _ = _of_sigmoid(near)
    # g = tanh(softplus(h)) = above/(above + rest), so that 1 − g² does not cancel
    above, rest = tl.where(near < 0, e * e + 2 * e, 1 + 2 * e), tl.where(near < 0, 2.0, 2 * e * e)
    reciprocal = 1 / (above + rest)
    g, q = above * reciprocal, rest * (2 * above + rest) * reciprocal * reciprocal
    slope = q * s
    q_slope = -2 * g * slope
    second = q_slope * s + q * s_slope
    q_second = -2 * (slope * slope + g * second)
    third = q_second * s + 2 * q_slope * s_slope + q * s_second
    return 2 * slope + near * second, 3 * second + near * third


@triton.jit
def _of_gelu_tanh(h):
    near = _clamped(h)
    square = near * near
    u_slope = _GELU_TANH_RATE * (1 + 3 * _CUBIC * square)
    u_second = (6 * _GELU_TANH_RATE * _CUBIC) * near
    t_slope, t_second, t_third = _of_tanh(_GELU_TANH_RATE * near * (1 + _CUBIC * square))
    slope = t_slope * u_slope
    second = t_second * u_slope * u_slope + t_slope * u_second
    third = t_third * u_slope * u_slope * u_slope + 3 * t_second * u_slope * u_second
    third += t_slope * (6 * _GELU_TANH_RATE * _CUBIC)
    return slope + 0.5 * near * second, 1.5 * second + 0.5 * near * third


@triton.jit
def _of_sqrt_softplus(h):
    e = tl.exp(-tl.abs(h))
    s = tl.where(h < 0, e, 1.0) / (1 + e)
    s_slope, s_second, _ = _of_sigmoid(h)
    small = e * (1 + e * (-1 / 2 + e * (1 / 3 - e / 4)))  # where rounding 1 + e loses digits of e
    value = tl.sqrt(tl.where(h < 0, 0.0, h) + tl.where(e < 0.01, small, tl.log(1 + e)))
    slope = 0.5 * s / value
    second = (0.5 * s_slope - slope * slope) / value
    third = (0.5 * s_second - 3 * slope * second) / value
    far, root = h < -20, tl.exp(0.5 * h)  # there the function is √eʰ, and the divisor may underflow
    return tl.where(far, 0.25 * root, second), tl.where(far, 0.125 * root, third)
