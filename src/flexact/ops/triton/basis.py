"""The built-in candidates as Triton functions.

Candidates share parts: leaky_relu is 0.01·h + 0.99·relu(h), elu is relu(h) plus a negative exponential. So a blend is
computed over a *basis* of functions, each evaluated once, with coefficients folded from the candidates' weights; and a
sum over a candidate's values, or over its slopes, is the same combination of the basis's sums. Only functions that rise
everywhere are taken apart, so that |σ′| is the combination of the parts' slopes too.

The functions themselves are in `basis_exact` and, for inputs in half precision on a card, in `basis_fast`.
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
"""Functions that cost next to nothing."""

_log = logging.getLogger(__name__)
_said: set[str] = set()

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
    """A set of candidates as the kernels take it; `blend` makes each once, so that identity tells them apart.

    A kernel is built for a basis, not for the candidates that are in: most sites that dropped different ones share it.
    """

    basis: tuple[int, ...]
    """The functions to evaluate: those that the candidates still in are made of, or all where they are few."""
    forms: tuple[tuple[float, ...], ...]
    """By function of the basis, then by candidate, in or not: its coefficient."""
    alive: int
    """A bit for each candidate that is still in; the weights of others are 0."""

    def constants(self, fast: bool) -> tuple[tuple[int, ...], tuple[tuple[float, ...], ...], bool]:
        """In the order in which every kernel takes them."""
        return self.basis, self.forms, fast


def is_fast(h: Tensor) -> bool:
    """Whether the card's own approximations will do for an input: in half precision."""
    return h.is_cuda and h.element_size() == 2


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
    """The blend of the candidates that are still in.

    A few functions hide behind memory: five candidates instead of two are 2 % of a training step (candidates.csv of the
    overhead study), and kernels for fewer take seconds to build. So few stay until one candidate is left.
    """
    forms = [_FORMS.get(key, {}) for key in keys]  # of one without a form, which is out
    every, needed = ({part for k in some for part in forms[k]} for some in (range(len(keys)), alive))
    basis = tuple(sorted(every if len(every) <= FEW and len(alive) > 1 else needed))
    table = tuple(tuple(form.get(part, 0.0) for form in forms) for part in basis)
    return Blend(basis, table, sum(1 << k for k in alive))


@triton.jit
def value(h, PART: tl.constexpr, FAST: tl.constexpr):
    """One function of the basis."""
    if FAST:
        return fast_value(h, PART)
    else:
        return exact_value(h, PART)


@triton.jit
def slope(h, v, PART: tl.constexpr, FAST: tl.constexpr):
    """Its derivative, given its value; at a kink that of torch's own backward."""
    if FAST:
        return fast_slope(h, v, PART)
    else:
        return exact_slope(h, v, PART)


# A weight of 0 leaves out what is infinite too, as relu_squared soon is; what is bounded needs no such care.


@triton.jit
def weighted_value(weight, v, PART: tl.constexpr):
    """A weight times the value of a function of the basis."""
    if PART == SIGMOID or PART == TANH or PART == NEGATIVE_EXP or PART == RELU6:  # noqa: SIM109  # Triton has no `in`
        return weight * v
    else:
        return weight * tl.where(weight == 0, 0.0, v)


@triton.jit
def weighted_slope(weight, d, PART: tl.constexpr):
    """A weight times its derivative."""
    if PART == SILU or PART == GELU or PART == MISH or PART == RELU_SQUARED or PART == SINE:  # noqa: SIM109  # Triton has no `in`
        return weight * tl.where(weight == 0, 0.0, d)
    else:
        return weight * d


@triton.jit
def coefficients(weights_ptr, row, k, BASIS: tl.constexpr, FORMS: tl.constexpr):
    """What each function of the basis is multiplied with, from row `row` of a (rows, k) table of weights."""
    found = ()
    for b in tl.static_range(len(BASIS)):
        total = tl.zeros_like(row).to(tl.float32)
        for i in tl.static_range(len(FORMS[b])):
            if FORMS[b][i] != 0:
                total += FORMS[b][i] * tl.load(weights_ptr + row * k + i)
        found = found + (total,)
    return found
