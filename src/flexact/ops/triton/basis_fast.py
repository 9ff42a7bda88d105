"""The basis functions for half-precision inputs, with the GPU's approximate instructions.

They are accurate to about 11 bits relative to max(0.1, |value|), and near 0 relative to the value, which exceeds half
precision. They are less accurate in the far tails, where a sigmoid or a gelu is nearly 0. A site with many candidates
is bound by arithmetic, so these functions minimise the number of instructions. All are written in terms of
e = exp(−|h|) and t = tanh(h/2), which the compiler evaluates only once.

Measured on an H200 over all float16 and bfloat16 numbers, the error of the sine and its derivative is below 6e-7 up to
|h| = 1e7, and below 1.1e-5 up to 1e9. For |h| < 0.05 the sine is replaced by h, with a relative error of 4.2e-4. Beyond
1e9 the results are arbitrary numbers in [−1, 1]; consecutive bfloat16 numbers are hundreds of thousands of periods
apart there.
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

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_DENSITY = tl.constexpr(0.3989422804014327)
_TWO_PI = tl.constexpr(6.2831854820251465)  # rounded to float32
_TWO_PI_REST = tl.constexpr(-1.7484556025237907e-07)  # 2π minus the above


@triton.jit
def fast_value(h, PART: tl.constexpr):
    """Return the value of one basis function."""
    if PART == LINEAR:
        v = h
    elif PART == RELU:
        v = _relu(h)
    elif PART == SIGMOID:
        v = _fast_sigmoid(h)
    elif PART == TANH:
        v = _fast_tanh(h)
    elif PART == GELU:
        v = h * _fast_normal_cdf(h)
    elif PART == SILU:
        v = h * _fast_sigmoid(h)
    elif PART == MISH:
        v = h * _fast_tanh(_fast_softplus(h))
    elif PART == NEGATIVE_EXP:
        v = tl.minimum(_fast_tanh(0.5 * h), 0.0, tl.PropagateNan.ALL) * (1 + _fast_exp(-tl.abs(h)))  # no cancellation
    elif PART == SOFTPLUS:
        v = _fast_softplus(h)
    elif PART == HARDSWISH:
        v = h * _hard_sigmoid(h)
    elif PART == RELU6:
        v = tl.minimum(_relu(h), 6.0, tl.PropagateNan.ALL)
    elif PART == SOFTSIGN:
        v = h * _fast_reciprocal(1 + tl.abs(h))
    elif PART == RELU_SQUARED:
        r = _relu(h)
        v = r * r
    else:
        tl.static_assert(PART == SINE)
        # The absolute error of the GPU's sine, 3e-7, is too large near 0.
        v = tl.where(tl.abs(h) < 0.05, h, _fast_sin(_reduced_angle(h)))
    return v


@triton.jit
def fast_slope(h, v, PART: tl.constexpr):
    """Return the derivative of a basis function from its value v; at a kink it is that of torch's backward."""
    if PART == LINEAR:
        d = tl.full(h.shape, 1.0, h.dtype)
    elif PART == RELU:
        d = tl.where(h <= 0, 0.0, 1.0)
    elif PART == SIGMOID:
        d = v - v * v
    elif PART == TANH:
        d = 1 - v * v
    elif PART == GELU:
        d = _fast_normal_cdf(h) + h * (_DENSITY * _fast_exp(-0.5 * h * h))
    elif PART == SILU:
        s = _fast_sigmoid(h)
        d = s + v - v * s
    elif PART == MISH:
        t = _fast_tanh(_fast_softplus(h))
        s = _fast_sigmoid(h)
        d = t + (h * s) * (1 - t * t)
    elif PART == NEGATIVE_EXP:
        d = tl.where(h <= 0, _fast_exp(-tl.abs(h)), 0.0)
    elif PART == SOFTPLUS:
        d = _fast_sigmoid(h)
    elif PART == HARDSWISH:
        d = _hard_sigmoid(h) + tl.where(tl.abs(h) >= 3, 0.0, h * (1 / 6))
    elif PART == RELU6:
        d = tl.where((h <= 0) | (h >= 6), 0.0, 1.0)
    elif PART == SOFTSIGN:
        reciprocal = _fast_reciprocal(1 + tl.abs(h))
        d = reciprocal * reciprocal
    elif PART == RELU_SQUARED:
        d = 2 * _relu(h)
    else:
        tl.static_assert(PART == SINE)
        d = _fast_cos(_reduced_angle(h))
    return d


@triton.jit
def _relu(h):
    return tl.maximum(h, 0.0, tl.PropagateNan.ALL)


@triton.jit
def _fast_sigmoid(h):
    return 0.5 + 0.5 * _fast_tanh(0.5 * h)


@triton.jit
def _fast_softplus(h):
    return _relu(h) + _LN_2 * _fast_log2(1 + _fast_exp(-tl.abs(h)))


@triton.jit
def _fast_normal_cdf(h):
    """Return Φ(h) by Abramowitz and Stegun 7.1.25, with an error below 1.3e-5. It shares its exponential with gelu′."""
    t = _fast_reciprocal(1 + (0.47047 * 0.7071067811865476) * tl.abs(h))
    tail = t * (0.1740121 + t * (-0.0479399 + t * 0.3739278)) * _fast_exp(-0.5 * h * h)
    return tl.where(h < 0, tail, 1 - tail)


@triton.jit
def _reduced_angle(h):
    """Return h − 2πn in [−π, π], where the GPU's sine is most accurate; 2π is subtracted in two parts."""
    n = tl.floor(h * (0.5 / 3.141592653589793) + 0.5)
    return tl.fma(n, -_TWO_PI_REST, tl.fma(n, -_TWO_PI, h))


@triton.jit
def _fast_sin(x):
    return tl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _fast_cos(x):
    return tl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _fast_exp(x):
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * _LOG2_E], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _fast_log2(x):
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _fast_tanh(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _fast_reciprocal(x):
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _hard_sigmoid(h):
    """Return h/6 + 1/2, clamped to [0, 1]."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 sixth; mov.f32 sixth, 0f3E2AAAAB; fma.rn.sat.f32 $0, $1, sixth, 0f3F000000; }",
        "=f,f", [h], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
