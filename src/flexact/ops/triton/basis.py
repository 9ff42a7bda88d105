"""The built-in candidates as linear combinations of basis functions in Triton.

Candidates share terms: leaky_relu is 0.01·h + 0.99·relu(h), and elu is relu(h) plus a negative exponential. A blend is
therefore computed over a *basis* of functions, each evaluated once, with coefficients folded from the candidates'
weights. A sum over a candidate's values or slopes is the same combination of the sums of the basis functions. Only
candidates that are increasing everywhere are decomposed, so |σ′| is the combination of the slopes as well.

The functions are implemented in `basis_exact`, and in `basis_fast` for half-precision inputs on a GPU.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from flexact.candidates import SELU_ALPHA, SELU_SCALE
from flexact.ops.triton.basis_exact import exact_slope, exact_value
from flexact.ops.triton.basis_fast import fast_slope, fast_value
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

FEW = 10
"""Maximum size of a basis that is kept while candidates are eliminated; see `blend`."""

_log = logging.getLogger(__name__)
_said: set[str] = set()
"""Candidates that `without_form` has warned about."""

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
    "relu_squared": {RELU_SQUARED.value: 1.0},
    "sine": {SINE.value: 1.0},
}


@dataclass(frozen=True, eq=False)
class Blend:
    """A set of candidates in the form that the kernels take.

    `blend` caches the instances, so they are compared by identity. A kernel is compiled per basis, not per set of alive
    candidates, so sites that eliminated different candidates usually share it.
    """

    basis: tuple[int, ...]
    """The functions to evaluate: those of the alive candidates, or those of all candidates if they are few."""
    forms: tuple[tuple[float, ...], ...]
    """Coefficients, indexed by basis function and then by candidate (eliminated ones included)."""
    alive: int
    """Bit mask of the alive candidates; the weights of the others are 0."""

    def constants(self, fast: bool) -> tuple[tuple[int, ...], tuple[tuple[float, ...], ...], bool]:
        """Return the compile-time constants in the order in which every kernel takes them."""
        return self.basis, self.forms, fast


def is_fast(h: Tensor) -> bool:
    """Return whether the GPU's approximate instructions are accurate enough for h, which holds in half precision."""
    return h.is_cuda and h.element_size() == 2


@functools.cache
def without_form(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the candidates that have no Triton implementation, and log a warning once for each."""
    missing = tuple(key for key in keys if key not in _FORMS)
    if new := set(missing) - _said:
        _said.update(new)
        _log.warning(
            "no Triton kernel for %s: their sites fall back to the closed form, which is slower.",
            ", ".join(sorted(new)),
        )
    return missing


@functools.cache
def blend(keys: tuple[str, ...], alive: tuple[int, ...]) -> Blend:
    """Return the blend of the alive candidates.

    A basis of at most FEW functions is kept until one candidate is left. The kernels are bound by memory: five
    candidates instead of two cost 2 % of a training step (candidates.csv of the overhead study), while compiling a
    kernel for a smaller basis takes seconds.
    """
    forms = [_FORMS.get(key, {}) for key in keys]  # empty for custom candidates, which are eliminated here
    every, needed = ({part for k in some for part in forms[k]} for some in (range(len(keys)), alive))
    basis = tuple(sorted(every if len(every) <= FEW and len(alive) > 1 else needed))
    table = tuple(tuple(form.get(part, 0.0) for form in forms) for part in basis)
    return Blend(basis, table, sum(1 << k for k in alive))


@triton.jit
def value(h, PART: tl.constexpr, FAST: tl.constexpr):
    """Return the value of one basis function."""
    if FAST:
        return fast_value(h, PART)
    else:
        return exact_value(h, PART)


@triton.jit
def slope(h, v, PART: tl.constexpr, FAST: tl.constexpr):
    """Return the derivative of a basis function from its value v; at a kink it is that of torch's backward."""
    if FAST:
        return fast_slope(h, v, PART)
    else:
        return exact_slope(h, v, PART)


# A zero weight masks infinite values, which 0·∞ = NaN would spread; relu_squared overflows soon. Bounded functions skip
# the mask.


@triton.jit
def weighted_value(weight, v, PART: tl.constexpr):
    """Return weight times the value v of a basis function, or 0 if the weight is 0."""
    if PART == SIGMOID or PART == TANH or PART == NEGATIVE_EXP or PART == RELU6:  # noqa: SIM109  # Triton has no `in`
        return weight * v
    else:
        return weight * tl.where(weight == 0, 0.0, v)


@triton.jit
def weighted_slope(weight, d, PART: tl.constexpr):
    """Return weight times the derivative d of a basis function, or 0 if the weight is 0."""
    if PART == SILU or PART == GELU or PART == MISH or PART == RELU_SQUARED or PART == SINE:  # noqa: SIM109  # Triton has no `in`
        return weight * tl.where(weight == 0, 0.0, d)
    else:
        return weight * d


@triton.jit
def coefficients(weights_ptr, row, k, BASIS: tl.constexpr, FORMS: tl.constexpr):
    """Return the coefficient of each basis function, from row `row` of a (rows, k) table of weights."""
    found = ()
    for b in tl.static_range(len(BASIS)):
        total = tl.zeros_like(row).to(tl.float32)
        for i in tl.static_range(len(FORMS[b])):
            if FORMS[b][i] != 0:
                total += FORMS[b][i] * tl.load(weights_ptr + row * k + i)
        found = found + (total,)
    return found
