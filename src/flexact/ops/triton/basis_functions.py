"""The basis functions in Triton: identifiers, values and slopes, and the built-in candidates in terms of them.

The exact ones are in float32, with an error of about 1e-7 relative to max(0.1, |value|). All are written in terms of
exp(−|h|), which cannot overflow and which the compiler evaluates only once.

The fast ones, for half-precision inputs, use the GPU's approximate instructions. They are accurate to about 11 bits
relative to max(0.1, |value|), and near 0 relative to the value: finer than half precision. They are less accurate in
the far tails, where a sigmoid or a gelu is nearly 0. A site with many candidates is bound by arithmetic, so these
functions minimise the number of instructions, and share tanh(h/2) as well.

Measured on an H200 over all float16 and bfloat16 numbers, the error of the fast sine and its derivative is below 6e-7
up to |h| = 1e7, and below 1.1e-5 up to 1e9. For |h| < 0.05 the sine is replaced by h, with a relative error of 4.2e-4.
Beyond 1e9 the results are arbitrary numbers in [−1, 1]; consecutive bfloat16 numbers are hundreds of thousands of
periods apart there.
"""

import triton
import triton.language as tl

from flexact.candidates import elementwise
from flexact.candidates.registry import BUILT_IN, SELU_ALPHA, SELU_SCALE

LINEAR = tl.constexpr(0)
RELU = tl.constexpr(1)
SIGMOID = tl.constexpr(2)
TANH = tl.constexpr(3)
GELU = tl.constexpr(4)
SILU = tl.constexpr(5)
MISH = tl.constexpr(6)
NEGATIVE_EXP = tl.constexpr(7)
SOFTPLUS = tl.constexpr(8)
HARDSWISH = tl.constexpr(9)
RELU6 = tl.constexpr(10)
SOFTSIGN = tl.constexpr(11)
RELU_SQUARED = tl.constexpr(12)
SINE = tl.constexpr(13)
HARDSIGMOID = tl.constexpr(14)
HARDTANH = tl.constexpr(15)
LOGSIGMOID = tl.constexpr(16)
TANHSHRINK = tl.constexpr(17)
HARDSHRINK = tl.constexpr(18)
SOFTSHRINK = tl.constexpr(19)
GELU_TANH = tl.constexpr(20)
QUICK_GELU = tl.constexpr(21)
CLIPPED_GELU = tl.constexpr(22)
HARD_MISH = tl.constexpr(23)
LAPLACE = tl.constexpr(24)
SQRT_SOFTPLUS = tl.constexpr(25)
STAR_RELU = tl.constexpr(26)
SNAKE = tl.constexpr(27)

_NUMBERS = {name.lower(): number.value for name, number in globals().items() if isinstance(number, tl.constexpr)}
FORMS: dict[str, dict[int, float]] = {
    **{one.name: {_NUMBERS[one.name]: 1.0} for one in BUILT_IN if one.name in _NUMBERS},
    "identity": {LINEAR.value: 1.0},
    "leaky_relu": {LINEAR.value: 0.01, RELU.value: 0.99},
    "elu": {RELU.value: 1.0, NEGATIVE_EXP.value: 1.0},
    "selu": {RELU.value: SELU_SCALE, NEGATIVE_EXP.value: SELU_SCALE * SELU_ALPHA},
}
"""The built-in candidates: coefficients by basis function. Most are the basis function of the same name."""

_QUICK_GELU_RATE = tl.constexpr(elementwise.QUICK_GELU_RATE)
_GELU_LIMIT = tl.constexpr(elementwise.GELU_LIMIT)
_LAPLACE_MEAN = tl.constexpr(elementwise.LAPLACE_MEAN)
_LAPLACE_RATE = tl.constexpr(1 / elementwise.LAPLACE_DEVIATION)
_STAR_RELU_SCALE = tl.constexpr(elementwise.STAR_RELU_SCALE)
_STAR_RELU_BIAS = tl.constexpr(elementwise.STAR_RELU_BIAS)
_GELU_TANH_RATE = tl.constexpr(1.5957691216057308)  # 2·√(2/π)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY_AT_0 = tl.constexpr(0.3989422804014327)
_LOG2_DENSITY_AT_0 = tl.constexpr(-1.3257480647361592)
_TWO_PI = tl.constexpr(6.2831854820251465)  # rounded to float32
_TWO_PI_REST = tl.constexpr(-1.7484556025237907e-07)  # 2π minus the above


@triton.jit
def evaluated(h, PART: tl.constexpr, FAST: tl.constexpr):
    """Return the value and the slope of one basis function; the compiler removes the one that is not used.

    At a kink the slope is that of torch's backward. PART is a number, or the Triton form of a custom candidate.
    """
    e = _exp(-tl.abs(h), FAST)
    if not isinstance(PART, int):
        value, slope = PART(h)
    elif PART == LINEAR:
        value = h
        slope = tl.full(h.shape, 1.0, h.dtype)
    elif PART == RELU:
        value = _relu(h, FAST)
        slope = tl.where(h <= 0, 0.0, 1.0)
    elif PART == SIGMOID:
        value = _sigmoid(h, e, FAST)
        slope = value - value * value
    elif PART == TANH:
        value = _tanh(h, e, FAST)
        slope = 1 - value * value
    elif PART == GELU:
        bell, cdf = _normal(h, FAST)
        value = h * cdf
        slope = cdf + (h * (_DENSITY_AT_0 * bell) if FAST else h * _DENSITY_AT_0 * bell)
    elif PART == SILU:
        s = _sigmoid(h, e, FAST)
        value = h * s
        slope = s + value - value * s if FAST else s + value * (1 - s)
    elif PART == MISH:
        t, s = _tanh_of_softplus(h, e, FAST), _sigmoid(h, e, FAST)
        value = h * t
        slope = t + ((h * s) * (1 - t * t) if FAST else h * (1 - t * t) * s)
    elif PART == NEGATIVE_EXP:
        if FAST:
            value = tl.minimum(_tanh(0.5 * h, e, FAST), 0.0, tl.PropagateNan.ALL) * (1 + e)  # no cancellation
        else:
            near_0 = h * (1 + h * (1 / 2 + h * (1 / 6 + h * (1 / 24 + h * (1 / 120 + h / 720)))))  # where e − 1 cancels
            value = tl.where(h <= 0, tl.where(h > -0.1, near_0, e - 1), 0.0)
        slope = tl.where(h <= 0, e, 0.0)
    elif PART == SOFTPLUS:
        value = _softplus(h, e, FAST)
        slope = _sigmoid(h, e, FAST)
    elif PART == HARDSWISH:
        if FAST:
            clamped = _hard_sigmoid(h)
            value = h * clamped
            slope = clamped + tl.where(tl.abs(h) >= 3, 0.0, h * (1 / 6))
        else:
            value = h * tl.where(h <= -3, 0.0, tl.where(h >= 3, 6.0, h + 3)) * (1 / 6)
            slope = tl.where(h <= -3, 0.0, tl.where(h >= 3, 1.0, h * (1 / 3) + 0.5))
    elif PART == RELU6:
        if FAST:
            value = tl.minimum(_relu(h, FAST), 6.0, tl.PropagateNan.ALL)
        else:
            value = tl.where(h <= 0, 0.0, tl.where(h >= 6, 6.0, h))
        slope = tl.where((h <= 0) | (h >= 6), 0.0, 1.0)
    elif PART == SOFTSIGN:
        reciprocal = _reciprocal(1 + tl.abs(h), FAST)
        value = h * reciprocal
        slope = reciprocal * reciprocal
    elif PART == RELU_SQUARED:
        r = _relu(h, FAST)
        value = r * r
        slope = 2 * r
    elif PART == SINE:
        if FAST:
            angle = _reduced_angle(h)
            # The absolute error of the GPU's sine, 3e-7, is too large near 0.
            value = tl.where(tl.abs(h) < 0.05, h, _approximate(angle, "sin.approx.ftz.f32 $0, $1;"))
            slope = _approximate(angle, "cos.approx.ftz.f32 $0, $1;")
        else:
            value = tl.sin(h)
            slope = tl.cos(h)
    elif PART == HARDSIGMOID:
        value = tl.where(h <= -3, 0.0, tl.where(h >= 3, 1.0, h * (1 / 6) + 0.5))
        slope = tl.where((h <= -3) | (h >= 3), 0.0, 1 / 6)
    elif PART == HARDTANH:
        value = tl.where(h <= -1, -1.0, tl.where(h >= 1, 1.0, h))
        slope = tl.where((h <= -1) | (h >= 1), 0.0, 1.0)
    elif PART == LOGSIGMOID:
        value = -_softplus(-h, e, FAST)
        slope = _sigmoid(-h, e, FAST)
    elif PART == TANHSHRINK:
        t, square = _tanh(h, e, False), h * h  # not the fast tanh: its 11 bits would cancel
        near_0 = h * square * (1 / 3 + square * (-2 / 15 + square * (17 / 315 - square * (62 / 2835))))
        value = tl.where(tl.abs(h) < 0.25, near_0, h - t)
        slope = t * t
    elif PART == HARDSHRINK:
        value = tl.where(tl.abs(h) <= 0.5, 0.0, h)
        slope = tl.where(tl.abs(h) <= 0.5, 0.0, 1.0)
    elif PART == SOFTSHRINK:
        value = tl.where(tl.abs(h) <= 0.5, 0.0, h - tl.where(h < 0, -0.5, 0.5))
        slope = tl.where(tl.abs(h) <= 0.5, 0.0, 1.0)
    elif PART == GELU_TANH:
        square = tl.minimum(h * h, 1e4)  # does not overflow; beyond ±100, s is 0 or 1
        angle = _GELU_TANH_RATE * h * (1 + 0.044715 * square)
        s = _sigmoid(angle, _exp(-tl.abs(angle), FAST), FAST)
        value = h * s
        slope = s + value * (1 - s) * (_GELU_TANH_RATE * (1 + 0.134145 * square))
    elif PART == QUICK_GELU:
        angle = _QUICK_GELU_RATE * h
        s = _sigmoid(angle, _exp(-tl.abs(angle), FAST), FAST)
        value = h * s
        slope = s + angle * s * (1 - s)
    elif PART == CLIPPED_GELU:
        bell, cdf = _normal(h, FAST)
        value = tl.where(h >= _GELU_LIMIT, _GELU_LIMIT, h * cdf)
        slope = tl.where(h > _GELU_LIMIT, 0.0, cdf + h * _DENSITY_AT_0 * bell)
    elif PART == HARD_MISH:
        value = h * tl.where(h <= -2, 0.0, tl.where(h >= 0, 1.0, 0.5 * h + 1))
        slope = tl.where(h < -2, 0.0, tl.where(h > 0, 1.0, h + 1))
    elif PART == LAPLACE:
        bell, value = _normal((h - _LAPLACE_MEAN) * _LAPLACE_RATE, FAST)
        slope = (_DENSITY_AT_0 * _LAPLACE_RATE) * bell
    elif PART == SQRT_SOFTPLUS:
        root = tl.sqrt(_softplus(h, e, FAST))
        value = tl.where(h < -20, _exp(0.5 * h, FAST), root)  # where softplus is e^h, which may underflow
        slope = tl.where(h < -20, 0.5 * value, 0.5 * _sigmoid(h, e, FAST) * _reciprocal(root, FAST))
    elif PART == STAR_RELU:
        r = _relu(h, FAST)
        value = _STAR_RELU_SCALE * r * r + _STAR_RELU_BIAS
        slope = 2 * _STAR_RELU_SCALE * r
    else:
        tl.static_assert(PART == SNAKE)
        if FAST:
            angle = _reduced_angle(h)
            sine = _approximate(angle, "sin.approx.ftz.f32 $0, $1;")
            cosine = _approximate(angle, "cos.approx.ftz.f32 $0, $1;")
        else:
            sine = tl.sin(h)
            cosine = tl.cos(h)
        value = h + sine * sine
        slope = 1 + 2 * sine * cosine
    return value, slope


_FACTORED = {LINEAR.value, GELU.value, SILU.value, MISH.value, HARDSWISH.value, SOFTSIGN.value}
FACTORED = tl.constexpr(tuple(number in _FACTORED for number in _NUMBERS.values()))
"""Of each basis function, whether `factored` takes it."""


@triton.jit
def factored(h, PART: tl.constexpr, FAST: tl.constexpr):
    """Return value/h, which is bounded, and the slope of one basis function.

    Blends and inner products of many functions then multiply by h once. The formulas take fewer instructions than those
    of `evaluated`, with which they agree up to rounding.
    """
    e = _exp(-tl.abs(h), FAST)
    if PART == GELU:
        quotient, density = _normal_and_density(h, FAST)
        slope = quotient + h * density
    elif PART == SILU:
        quotient = _sigmoid(h, e, FAST)
        slope = quotient + h * (quotient - quotient * quotient)
    elif PART == MISH:
        quotient = _tanh_of_softplus(h, e, FAST)
        slope = quotient + h * _sigmoid(h, e, FAST) * (1 - quotient * quotient)
    else:
        _value, slope = evaluated(h, PART, FAST)
        if PART == LINEAR:
            quotient = slope
        elif PART == HARDSWISH:
            quotient = _hard_sigmoid(h) if FAST else tl.where(h <= -3, 0.0, tl.where(h >= 3, 1.0, h * (1 / 6) + 0.5))
        else:
            tl.static_assert(PART == SOFTSIGN)
            quotient = _reciprocal(1 + tl.abs(h), FAST)
    return quotient, slope


# A zero weight masks infinite values, which 0·∞ = NaN would spread; relu_squared overflows soon. Bounded functions skip
# the mask.


@triton.jit
def weighted_value(weight, v, PART: tl.constexpr):
    """Return weight times the value v of a basis function, or 0 if the weight is 0."""
    if not isinstance(PART, int):
        return weight * tl.where(weight == 0, 0.0, v)
    elif PART == SIGMOID or PART == TANH or PART == NEGATIVE_EXP or PART == RELU6:  # noqa: SIM109  # Triton has no `in`
        return weight * v
    else:
        return weight * tl.where(weight == 0, 0.0, v)


@triton.jit
def weighted_slope(weight, d, PART: tl.constexpr):
    """Return weight times the derivative d of a basis function, or 0 if the weight is 0."""
    if not isinstance(PART, int):  # noqa: SIM114  # Triton compiles both sides of an `or`
        return weight * tl.where(weight == 0, 0.0, d)
    elif PART == SILU or PART == GELU or PART == MISH or PART == RELU_SQUARED or PART >= SINE:  # noqa: SIM109  # Triton has no `in`
        return weight * tl.where(weight == 0, 0.0, d)
    else:
        return weight * d


@triton.jit
def _relu(h, FAST: tl.constexpr):
    """Return max(h, 0), with NaN for NaN."""
    return tl.maximum(h, 0.0, tl.PropagateNan.ALL) if FAST else tl.where(h <= 0, 0.0, h)


@triton.jit
def _sigmoid(h, e, FAST: tl.constexpr):
    return 0.5 + 0.5 * _tanh(0.5 * h, e, FAST) if FAST else tl.where(h < 0, e, 1.0) / (1 + e)


@triton.jit
def _tanh(h, e, FAST: tl.constexpr):
    if FAST:
        return _approximate(h, "tanh.approx.f32 $0, $1;")
    else:
        size = (1 - e * e) / (1 + e * e)
        square = h * h
        near_0 = h * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315))))  # where 1 − e² cancels
        return tl.where(tl.abs(h) < 0.1, near_0, tl.where(h < 0, -size, size))


@triton.jit
def _softplus(h, e, FAST: tl.constexpr):
    if FAST:
        rest = _LN_2 * _approximate(1 + e, "lg2.approx.ftz.f32 $0, $1;")
    else:
        small = e * (1 + e * (-1 / 2 + e * (1 / 3 - e / 4)))  # where rounding 1 + e loses digits of e
        rest = tl.where(e < 0.01, small, tl.log(1 + e))
    return _relu(h, FAST) + rest


@triton.jit
def _tanh_of_softplus(h, e, FAST: tl.constexpr):
    """Return (n² + 2n)/(n² + 2n + 2) with n = exp(h), written so that n cannot overflow."""
    if FAST:
        return _tanh(_softplus(h, e, FAST), e, FAST)
    else:
        above = tl.where(h < 0, e * e + 2 * e, 1 + 2 * e)
        return above * (1 / (above + tl.where(h < 0, 2.0, 2 * e * e)))


@triton.jit
def _normal(h, FAST: tl.constexpr):
    """Return exp(−h²/2), and Φ(h) by Abramowitz and Stegun 7.1.26, or 7.1.25 if fast.

    The error of Φ is below 1.5e-7, or 1.3e-5 if fast.
    """
    bell = _exp(-0.5 * h * h, FAST)
    if FAST:
        t = _reciprocal(1 + (0.47047 * _SQRT_HALF) * tl.abs(h), FAST)
        tail = t * (0.1740121 + t * (-0.0479399 + t * 0.3739278)) * bell
    else:
        t = 1 / (1 + 0.3275911 * _SQRT_HALF * tl.abs(h))
        series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
        tail = 0.5 * series * bell
    return bell, tl.where(h < 0, tail, 1 - tail)


@triton.jit
def _normal_and_density(h, FAST: tl.constexpr):
    """Return Φ(h) and its derivative, with the errors of `_normal`."""
    if FAST:
        density = _approximate((-0.5 * _LOG2_E) * h * h + _LOG2_DENSITY_AT_0, "ex2.approx.ftz.f32 $0, $1;")
        t = _reciprocal(1 + (0.47047 * _SQRT_HALF) * tl.abs(h), True)
        tail = t * (0.4361836 + t * (-0.1201675 + t * 0.9372980)) * density  # 7.1.25 divided by the density at 0
        return tl.where(h <= 0, tail, 1 - tail), density
    else:
        bell, cdf = _normal(h, False)
        return cdf, _DENSITY_AT_0 * bell


@triton.jit
def _reduced_angle(h):
    """Return h − 2πn in [−π, π], where the GPU's sine is most accurate; 2π is subtracted in two parts."""
    n = tl.floor(h * (0.5 / 3.141592653589793) + 0.5)
    return tl.fma(n, -_TWO_PI_REST, tl.fma(n, -_TWO_PI, h))


@triton.jit
def _exp(x, FAST: tl.constexpr):
    return _approximate(x * _LOG2_E, "ex2.approx.ftz.f32 $0, $1;") if FAST else tl.exp(x)


@triton.jit
def _reciprocal(x, FAST: tl.constexpr):
    return _approximate(x, "rcp.approx.ftz.f32 $0, $1;") if FAST else 1 / x


@triton.jit
def _hard_sigmoid(h):
    """Return h/6 + 1/2, clamped to [0, 1], in one instruction."""
    return _approximate(h, "{ .reg .f32 sixth; mov.f32 sixth, 0f3E2AAAAB; fma.rn.sat.f32 $0, $1, sixth, 0f3F000000; }")


@triton.jit
def _approximate(x, INSTRUCTION: tl.constexpr):
    """Apply an instruction of the GPU to each element."""
    return tl.inline_asm_elementwise(INSTRUCTION, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
