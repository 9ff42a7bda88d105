"""The functions of the basis for inputs in half precision, with a card's approximate instructions.

Right to about 11 bits of the larger of 0.1 and the value, and near 0 of the value itself: more than half precision has.
In the far tails, where a sigmoid or a gelu is nearly 0, fewer bits are right. A site that picks among many candidates
is bound by arithmetic, so what counts here is the number of instructions. Everything is written with e = exp(−|h|) and
t = tanh(h/2), which the compiler evaluates once for all.

Over all numbers of both half precisions, on an H200, the sine and its slope are off by less than 6e-7 up to |h| = 1e7
(the sine by 4.2e-4 of itself where it is taken for h, below 0.05), and by 1.1e-5 up to 1e9. Beyond that they are some
number from −1 to 1: neighbours in bfloat16 are hundreds of thousands of turns apart there.
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
_TURN = tl.constexpr(6.2831854820251465)  # 2π in float32, and what is missing of it
_TURN_REST = tl.constexpr(-1.7484556025237907e-07)


@triton.jit
def fast_value(h, PART: tl.constexpr):
    """One function of the basis."""
    if PART == LINEAR:
        v = h
    elif PART == RELU:
        v = _at_least_0(h)
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
        v = h * _sixth_part(h)
    elif PART == RELU6:
        v = tl.minimum(_at_least_0(h), 6.0, tl.PropagateNan.ALL)
    elif PART == SOFTSIGN:
        v = h * _fast_reciprocal(1 + tl.abs(h))
    elif PART == RELU_SQUARED:
        r = _at_least_0(h)
        v = r * r
    else:
        tl.static_assert(PART == SINE)
        v = tl.where(tl.abs(h) < 0.05, h, _fast_sin(_within_half_a_turn(h)))  # the card's is off by 3e-7
    return v


@triton.jit
def fast_slope(h, v, PART: tl.constexpr):
    """Its derivative, given its value; at a kink that of torch's own backward."""
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
        d = _sixth_part(h) + tl.where(tl.abs(h) >= 3, 0.0, h * (1 / 6))
    elif PART == RELU6:
        d = tl.where((h <= 0) | (h >= 6), 0.0, 1.0)
    elif PART == SOFTSIGN:
        reciprocal = _fast_reciprocal(1 + tl.abs(h))
        d = reciprocal * reciprocal
    elif PART == RELU_SQUARED:
        d = 2 * _at_least_0(h)
    else:
        tl.static_assert(PART == SINE)
        d = _fast_cos(_within_half_a_turn(h))
    return d


@triton.jit
def _at_least_0(h):
    return tl.maximum(h, 0.0, tl.PropagateNan.ALL)


@triton.jit
def _fast_sigmoid(h):
    return 0.5 + 0.5 * _fast_tanh(0.5 * h)


@triton.jit
def _fast_softplus(h):
    return _at_least_0(h) + _LN_2 * _fast_log2(1 + _fast_exp(-tl.abs(h)))


@triton.jit
def _fast_normal_cdf(h):
    """Φ(h), by Abramowitz and Stegun's 7.1.25: off by less than 1.3e-5. Its exponential is that of the density."""
    t = _fast_reciprocal(1 + (0.47047 * 0.7071067811865476) * tl.abs(h))
    tail = t * (0.1740121 + t * (-0.0479399 + t * 0.3739278)) * _fast_exp(-0.5 * h * h)
    return tl.where(h < 0, tail, 1 - tail)


@triton.jit
def _within_half_a_turn(h):
    """h − 2πn, from −π to π, where the card's sine is most accurate; 2π is subtracted in two parts."""
    n = tl.floor(h * (0.5 / 3.141592653589793) + 0.5)
    return tl.fma(n, -_TURN_REST, tl.fma(n, -_TURN, h))


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
def _sixth_part(h):
    """h/6 + 1/2, kept between 0 and 1."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 sixth; mov.f32 sixth, 0f3E2AAAAB; fma.rn.sat.f32 $0, $1, sixth, 0f3F000000; }",
        "=f,f", [h], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
