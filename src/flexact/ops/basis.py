"""The built-in candidates as Triton functions.

Candidates share parts: leaky_relu is 0.01·h + 0.99·relu(h), elu is relu(h) plus a negative exponential. So a blend is
computed over a *basis* of functions, each evaluated once, with coefficients folded from the candidates' weights; and a
sum over a candidate's values, or over its slopes, is the same combination of the basis's sums. Only functions that rise
everywhere are taken apart, so that |σ′| is the combination of the parts' slopes too.

Every function is written with e = exp(−|h|), which cannot overflow and which the compiler evaluates once for all.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import triton
import triton.language as tl

from flexact.candidates import SELU_ALPHA, SELU_SCALE

_log = logging.getLogger(__name__)

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

    @property
    def constants(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[float, ...], ...]]:
        """In the order in which every kernel takes them."""
        return self.alive, self.basis, self.forms


@functools.cache
def without_form(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Which of these candidates cannot be evaluated here; said once in the log."""
    missing = tuple(key for key in keys if key not in _FORMS)
    if missing:
        _log.warning("no Triton form of %s: these sites take the closed form, which is slower.", ", ".join(missing))
    return missing


@functools.cache
def blend(keys: tuple[str, ...], alive: tuple[int, ...]) -> Blend:
    """The blend of the candidates that are still in."""
    forms = [_FORMS[keys[k]] for k in alive]
    basis = tuple(sorted({part for form in forms for part in form}))
    return Blend(alive, basis, tuple(tuple(form.get(part, 0.0) for form in forms) for part in basis))


@triton.jit
def value(h, PART: tl.constexpr):
    """One function of the basis."""
    e = tl.exp(-tl.abs(h))
    if PART == LINEAR:
        v = h
    elif PART == RELU:
        v = tl.where(h <= 0, 0.0, h)  # a NaN stays one
    elif PART == SIGMOID:
        v = tl.where(h < 0, e, 1.0) / (1 + e)
    elif PART == TANH:
        size = (1 - e * e) / (1 + e * e)
        v = tl.where(h < 0, -size, size)
    elif PART == GELU:
        v = 0.5 * h * (1 + tl.erf(h * _SQRT_HALF))
    elif PART == SILU:
        v = h * tl.where(h < 0, e, 1.0) / (1 + e)
    elif PART == MISH:
        v = h * _tanh_of_softplus(h, e)
    elif PART == NEGATIVE_EXP:
        v = tl.where(h <= 0, e - 1, 0.0)
    elif PART == SOFTPLUS:
        v = tl.where(h <= 0, 0.0, h) + tl.log(1 + e)
    elif PART == HARDSWISH:
        v = h * tl.where(h <= -3, 0.0, tl.where(h >= 3, 6.0, h + 3)) * (1 / 6)
    elif PART == RELU6:
        v = tl.where(h <= 0, 0.0, tl.where(h >= 6, 6.0, h))
    else:
        tl.static_assert(PART == SOFTSIGN)
        v = h / (1 + tl.abs(h))
    return v


@triton.jit
def slope(h, v, PART: tl.constexpr):
    """Its derivative, given its value; at a kink that of torch's own backward."""
    e = tl.exp(-tl.abs(h))
    if PART == LINEAR:
        d = tl.full(h.shape, 1.0, h.dtype)
    elif PART == RELU:
        d = tl.where(h <= 0, 0.0, 1.0)
    elif PART == SIGMOID:
        d = v * (1 - v)
    elif PART == TANH:
        d = 1 - v * v
    elif PART == GELU:
        d = 0.5 * (1 + tl.erf(h * _SQRT_HALF)) + h * _DENSITY_AT_0 * tl.exp(-0.5 * h * h)
    elif PART == SILU:
        s = tl.where(h < 0, e, 1.0) / (1 + e)
        d = s + v * (1 - s)
    elif PART == MISH:
        t = _tanh_of_softplus(h, e)
        d = t + h * (1 - t * t) * tl.where(h < 0, e, 1.0) / (1 + e)
    elif PART == NEGATIVE_EXP:
        d = tl.where(h <= 0, e, 0.0)
    elif PART == SOFTPLUS:
        d = tl.where(h < 0, e, 1.0) / (1 + e)
    elif PART == HARDSWISH:
        d = tl.where(h <= -3, 0.0, tl.where(h >= 3, 1.0, h * (1 / 3) + 0.5))
    elif PART == RELU6:
        d = tl.where((h <= 0) | (h >= 6), 0.0, 1.0)
    else:
        tl.static_assert(PART == SOFTSIGN)
        reciprocal = 1 / (1 + tl.abs(h))
        d = reciprocal * reciprocal
    return d


@triton.jit
def _tanh_of_softplus(h, e):
    """With n = exp(h): (n² + 2n)/(n² + 2n + 2), written so that n cannot overflow."""
    above = tl.where(h < 0, e * e + 2 * e, 1 + 2 * e)
    return above / (above + tl.where(h < 0, 2.0, 2 * e * e))


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
