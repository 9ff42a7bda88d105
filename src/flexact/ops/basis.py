"""The built-in candidates as Triton functions.

Candidates share parts: leaky_relu is 0.01·h + 0.99·relu(h), elu is relu(h) plus a negative exponential. So a blend is
computed over a *basis* of functions, each evaluated once, with coefficients folded from the candidates' weights; and a
sum over a candidate's values, or over its slopes, is the same combination of the basis's sums. Only functions that rise
everywhere are taken apart, so that |σ′| is the combination of the parts' slopes too.

Every function is written with e = exp(−|h|), which cannot overflow and which the compiler evaluates once for all. For
inputs in half precision the card's approximate instructions take the place of exponentials and divisions.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from flexact.candidates import SELU_ALPHA, SELU_SCALE

_log = logging.getLogger(__name__)
_said: set[str] = set()

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

_FORMS: dict[str, dict[int, float]] = {
    "relu": {RELU.value: 1.0},
    "leaky_relu": {LINEAR.value: 0.01, RELU.value: 0.99},
    "sigmoid": {SIGMOID.value: 1.0},
    "tanh": {TANH.value: 1.0},
    "identity": {LINEAR.value: 1.0},
    "gelu": {GELU.value: 1.0},
    "silu": {SILU.value: 1.0},
    "mish": {MISH.value: 1.0},
    "elu": {RELU.value: 1.0, NEGATIVE_EXP.value: 1.0},
    "selu": {RELU.value: SELU_SCALE, NEGATIVE_EXP.value: SELU_SCALE * SELU_ALPHA},
    "softplus": {SOFTPLUS.value: 1.0},
    "hardswish": {HARDSWISH.value: 1.0},
    "relu6": {RELU6.value: 1.0},
    "softsign": {SOFTSIGN.value: 1.0},
}

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY_AT_0 = tl.constexpr(0.3989422804014327)


@dataclass(frozen=True)
class Blend:
    """A set of candidates as the kernels take it: compile-time constants."""

    alive: tuple[int, ...]
    """The candidates' columns in the table of weights."""
    basis: tuple[int, ...]
    """The functions to evaluate."""
    forms: tuple[tuple[float, ...], ...]
    """By function of the basis, then by candidate alive: its coefficient."""

    def constants(self, h: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[float, ...], ...], bool]:
        """For an input h, in the order in which every kernel takes them; in half precision the card's own
        approximations will do."""
        return self.alive, self.basis, self.forms, h.element_size() == 2 and h.is_cuda


@functools.cache
def without_form(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Which of these candidates cannot be evaluated here; said once in the log."""
    missing = tuple(key for key in keys if key not in _FORMS)
    if news := set(missing) - _said:
        _said.update(news)
        _log.warning(
            "no Triton form of %s: these sites take the closed form, which is slower.", ", ".join(sorted(news))
        )
    return missing


@functools.cache
def blend(keys: tuple[str, ...], alive: tuple[int, ...]) -> Blend:
    """The blend of the candidates that are still in."""
    forms = [_FORMS[keys[k]] for k in alive]
    basis = tuple(sorted({part for form in forms for part in form}))
    return Blend(alive, basis, tuple(tuple(form.get(part, 0.0) for form in forms) for part in basis))


@triton.jit
def value(h, PART: tl.constexpr, FAST: tl.constexpr):
    """One function of the basis."""
    e = tl.exp(-tl.abs(h))
    if PART == LINEAR:
        v = h
    elif PART == RELU:
        v = tl.where(h <= 0, 0.0, h)  # a NaN stays one
    elif PART == SIGMOID:
        v = _sigmoid(h, e, FAST)
    elif PART == TANH:
        v = _tanh(h, e, FAST)
    elif PART == GELU:
        v = h * _normal_cdf(h, FAST)
    elif PART == SILU:
        v = h * _sigmoid(h, e, FAST)
    elif PART == MISH:
        v = h * _tanh_of_softplus(h, e, FAST)
    elif PART == NEGATIVE_EXP:
        near_0 = h * (1 + h * (1 / 2 + h * (1 / 6 + h * (1 / 24 + h * (1 / 120 + h / 720)))))  # where e − 1 cancels
        v = tl.where(h <= 0, tl.where(h > -0.1, near_0, e - 1), 0.0)
    elif PART == SOFTPLUS:
        v = tl.where(h <= 0, 0.0, h) + tl.log(1 + e)
    elif PART == HARDSWISH:
        v = h * tl.where(h <= -3, 0.0, tl.where(h >= 3, 6.0, h + 3)) * (1 / 6)
    elif PART == RELU6:
        v = tl.where(h <= 0, 0.0, tl.where(h >= 6, 6.0, h))
    else:
        tl.static_assert(PART == SOFTSIGN)
        v = h * _reciprocal(1 + tl.abs(h), FAST)
    return v


@triton.jit
def slope(h, v, PART: tl.constexpr, FAST: tl.constexpr):
    """Its derivative, given its value; at a kink that of torch's own backward."""
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
        d = _normal_cdf(h, FAST) + h * _DENSITY_AT_0 * tl.exp(-0.5 * h * h)
    elif PART == SILU:
        s = _sigmoid(h, e, FAST)
        d = s + v * (1 - s)
    elif PART == MISH:
        t = _tanh_of_softplus(h, e, FAST)
        d = t + h * (1 - t * t) * _sigmoid(h, e, FAST)
    elif PART == NEGATIVE_EXP:
        d = tl.where(h <= 0, e, 0.0)
    elif PART == SOFTPLUS:
        d = _sigmoid(h, e, FAST)
    elif PART == HARDSWISH:
        d = tl.where(h <= -3, 0.0, tl.where(h >= 3, 1.0, h * (1 / 3) + 0.5))
    elif PART == RELU6:
        d = tl.where((h <= 0) | (h >= 6), 0.0, 1.0)
    else:
        tl.static_assert(PART == SOFTSIGN)
        reciprocal = _reciprocal(1 + tl.abs(h), FAST)
        d = reciprocal * reciprocal
    return d


@triton.jit
def _sigmoid(h, e, FAST: tl.constexpr):
    if FAST:
        return 0.5 + 0.5 * _fast_tanh(0.5 * h)
    else:
        return tl.where(h < 0, e, 1.0) / (1 + e)


@triton.jit
def _tanh(h, e, FAST: tl.constexpr):
    if FAST:
        return _fast_tanh(h)
    else:
        size = (1 - e * e) / (1 + e * e)
        square = h * h
        near_0 = h * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315))))  # where 1 − e² cancels
        return tl.where(tl.abs(h) < 0.1, near_0, tl.where(h < 0, -size, size))


@triton.jit
def _tanh_of_softplus(h, e, FAST: tl.constexpr):
    """With n = exp(h): (n² + 2n)/(n² + 2n + 2), written so that n cannot overflow."""
    above = tl.where(h < 0, e * e + 2 * e, 1 + 2 * e)
    return above * _reciprocal(above + tl.where(h < 0, 2.0, 2 * e * e), FAST)


@triton.jit
def _normal_cdf(h, FAST: tl.constexpr):
    """Φ(h), by Abramowitz and Stegun's 7.1.26: off by less than 1.5e-7. Its exponential is that of the density."""
    t = _reciprocal(1 + 0.3275911 * _SQRT_HALF * tl.abs(h), FAST)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * tl.exp(-0.5 * h * h)
    return tl.where(h < 0, tail, 1 - tail)


@triton.jit
def _reciprocal(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1 / x


@triton.jit
def _fast_tanh(x):
    """One instruction, right to 11 bits: more than half precision has."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def coefficients(weights_ptr, row, k, ALIVE: tl.constexpr, BASIS: tl.constexpr, FORMS: tl.constexpr):
    """What each function of the basis is multiplied with, from row `row` of a (rows, k) table of weights."""
    found = ()
    for b in tl.static_range(len(BASIS)):
        total = tl.zeros_like(row).to(tl.float32)
        for i in tl.static_range(len(ALIVE)):
            if FORMS[b][i] != 0:
                total += FORMS[b][i] * tl.load(weights_ptr + row * k + ALIVE[i])
        found = found + (total,)
    return found
