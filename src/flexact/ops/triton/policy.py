"""Two Triton kernels that process all sites of a model in one launch: sampling, and the policy's logit step.

Both do little arithmetic on a (rows, K) table, so the cost is dominated by launches, of which plain torch needs about
forty. `routing.router` and `policy.logit_updates` do the same in plain torch, for readers and as the oracle
of the tests.

The numbers of all sites are concatenated without padding into one flat tensor, `values`. Two integer tables hold the
offsets of each row in it:

- layout, (rows, 3): offset of the row's first number, number of candidates, offset of the temperature;
- calls, (rows, 2 + maximum number of calls): whether the row was called, number of calls, and offset of the
  sensitivities of each call.

No sum goes over rows, so programs are independent.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexact.ops.operators import is_traced
from flexact.ops.triton.launch import Launch
from flexact.ops.triton.routed import MOST_CANDIDATES

_ROWS = 8
"""Rows per program."""
_WARPS = 1
"""Warps per program. With more, a thread could load a running average after another thread has updated it."""

# The same constants as in `flexact.routing.corrections` and `flexact.policy.running_gradient`.
_TINY = tl.constexpr(1e-30)
_SMALLEST_SIZE = tl.constexpr(torch.finfo(torch.float32).tiny)


class Rule(NamedTuple):
    """The operations that the policy applies to a gradient, in this order."""

    clips: bool
    """Clip the norm of each row to `clip`."""
    pulls: bool
    """Add the gradient of the relative KL."""
    clips_sensitivity: bool
    """Clip the sensitivities in the KL's target to `clip`."""
    paced: bool
    """Replace the gradient by its running mean, divided by its running size and multiplied by the step size."""
    mean_rate: float
    """Weight of a new gradient in the running mean."""
    square_rate: float
    """Weight of a new squared gradient in the running square."""
    lam: float | None
    """λ of the KL's target; None ties it to the temperature."""
    clip: float

    @property
    def tied(self) -> bool:
        """Whether λ is tied to the temperature."""
        return self.pulls and self.lam is None


def takes(logits: Tensor, k: int) -> bool:
    """Return whether the kernels support k candidates and these logits, which must not be traced."""
    return k <= MOST_CANDIDATES.value and logits.dtype == torch.float32 and not is_traced(logits)


def draw(values: Tensor, layout: Tensor, alive: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return π and p = softmax((log π + g)/τ), each (rows, K).

    values: all logits, then one temperature per site. alive, noise: (rows, K).
    """
    pi, p = torch.empty_like(noise), torch.empty_like(noise)
    _draw_launch(*noise.shape)(values, layout, alive, noise, pi, p)
    return pi, p


def direction(
    values: Tensor, size: int, layout: Tensor, calls: Tensor, alive: Tensor, running: tuple[Tensor, Tensor, Tensor],
    q: Tensor, width: Tensor, alpha: Tensor, step_size: Tensor, rule: Rule,
) -> Tensor:  # fmt: skip
    """Return the corrected gradients of the logits or, if paced, the steps to subtract from the logits.

    The result is flat, without padding. The running averages are updated in place.
    values: all gradients, `size` numbers; then, if λ is tied, one temperature per site; then the sensitivities of each
    call, (its rows, its candidates).
    calls: not read if the rule needs no statistics.
    running: the mean (rows, K), the square (rows, 1), and the bias-correction weights of both (rows, 2).
    q: (rows, K), the distribution that the KL acts on. width: (rows, 1). alpha, step_size: scalars.
    """
    found = values.new_empty(size)
    launch = _direction_launch(*alive.shape, calls.shape[1] - 2, rule)
    launch(values, layout, calls, alive, *running, q, width, alpha, step_size, found)
    return found


@functools.lru_cache(maxsize=128)
def _draw_launch(rows: int, k: int) -> Launch:
    return Launch(_draw, (triton.cdiv(rows, _ROWS),), (rows, k), (_ROWS,), _WARPS)


@functools.lru_cache(maxsize=128)
def _direction_launch(rows: int, k: int, most: int, rule: Rule) -> Launch:
    numbers = (rows, k, most, rule.mean_rate, rule.square_rate, float(rule.lam or 0), float(rule.clip))
    constants = (rule.clips, rule.pulls, rule.clips_sensitivity, rule.tied, rule.paced, _ROWS)
    return Launch(_direction, (triton.cdiv(rows, _ROWS),), numbers, constants, _WARPS)


@triton.jit
def _draw(values_ptr, layout_ptr, alive_ptr, noise_ptr, pi_ptr, p_ptr, rows, k, ROWS: tl.constexpr):
    row, column, inside = _tile(rows, k, ROWS)
    start, own = _own(layout_ptr, row, column, rows)
    logits = tl.load(values_ptr + start + column, own, other=0.0)
    logits = tl.where(_alive(alive_ptr, row, column, inside, rows, k), logits, float("-inf"))
    shifted = logits - tl.max(logits, axis=1, keep_dims=True)
    log_pi = shifted - tl.log(tl.sum(tl.exp(shifted), axis=1, keep_dims=True))
    noise = tl.load(noise_ptr + row * k + column, inside, other=0.0)
    # Rounded as in torch: at a low temperature the quotients are large, and the softmax depends on their differences.
    p = _softmax(tl.div_rn(log_pi + noise, _temperature(values_ptr, layout_ptr, row, rows)))
    tl.store(pi_ptr + row * k + column, tl.exp(log_pi), inside)
    tl.store(p_ptr + row * k + column, p, inside)


@triton.jit
def _direction(
    values_ptr, layout_ptr, calls_ptr, alive_ptr, mean_ptr, square_ptr, weights_ptr, q_ptr, width_ptr, alpha_ptr,
    step_size_ptr, found_ptr, rows, k, most, mean_rate, square_rate, lam, clip,
    CLIPS: tl.constexpr, PULLS: tl.constexpr, CLIPS_SENSITIVITY: tl.constexpr,
    TIED: tl.constexpr, PACED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, column, inside = _tile(rows, k, ROWS)
    start, own = _own(layout_ptr, row, column, rows)
    alive = _alive(alive_ptr, row, column, inside, rows, k)
    gradient = tl.load(values_ptr + start + column, own, other=0.0)
    if CLIPS:
        gradient = _clipped(gradient, clip)
    mean, size = _updated(
        gradient, alive, mean_ptr, square_ptr, weights_ptr, row, column, inside, rows, k, mean_rate, square_rate
    )
    if PACED:
        gradient = mean
    if PULLS:
        called, sensitivity = _sensitivity(values_ptr, calls_ptr, row, column, own, rows, most)
        if CLIPS_SENSITIVITY:
            sensitivity = tl.where(sensitivity > clip, clip, sensitivity)
        if TIED:
            lam = _temperature(values_ptr, layout_ptr, row, rows)
        target = _softmax(tl.where(alive, -sensitivity / lam, float("-inf")))
        q = tl.load(q_ptr + row * k + column, inside, other=0.0)
        width = tl.load(width_ptr + row, row < rows, other=1).to(tl.float32)
        pulled = gradient + tl.load(alpha_ptr) * size / width * (q - target)
        gradient = tl.where(called, pulled, gradient)  # a site without a call has no target
    if PACED:
        gradient = tl.load(step_size_ptr) * (gradient / size)
    tl.store(found_ptr + start + column, gradient, own)


@triton.jit
def _tile(rows, k, ROWS: tl.constexpr):
    """Return this program's rows (ROWS, 1), the columns (1, 16), and a mask of the positions inside the table."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, MOST_CANDIDATES)[None, :]
    return row, column, (row < rows) & (column < k)


@triton.jit
def _own(layout_ptr, row, column, rows):
    """Return the offset of each row in `values`, and a mask of its columns."""
    start = tl.load(layout_ptr + row * 3, row < rows, other=0)
    return start, column < tl.load(layout_ptr + row * 3 + 1, row < rows, other=0)


@triton.jit
def _temperature(values_ptr, layout_ptr, row, rows):
    offset = tl.load(layout_ptr + row * 3 + 2, row < rows, other=0)
    return tl.load(values_ptr + offset, row < rows, other=1.0)


@triton.jit
def _alive(alive_ptr, row, column, inside, rows, k):
    """Return a mask of the alive candidates; all are alive in rows past the last, so that their softmax is finite."""
    return (tl.load(alive_ptr + row * k + column, inside, other=0) != 0) | (row >= rows)


@triton.jit
def _sensitivity(values_ptr, calls_ptr, row, column, own, rows, most):
    """Return whether each row was called, and its mean sensitivities over its calls."""
    first = calls_ptr + row * (2 + most)
    called = tl.load(first, row < rows, other=0) != 0
    count = tl.load(first + 1, row < rows, other=0)
    sensitivity = tl.zeros(own.shape, tl.float32)
    call = 0
    while call < most:
        offset = tl.load(first + 2 + call, call < count, other=0) + column
        sensitivity += tl.load(values_ptr + offset, own & (call < count), other=0.0)
        call += 1
    divisor = tl.where(count < 1, 1, count).to(tl.float32)
    return called, sensitivity / divisor


# The bounds below use `tl.where`, which propagates NaN like torch's clamp; `tl.maximum` does not.


@triton.jit
def _clipped(gradient, bound):
    norm = tl.sqrt(tl.sum(gradient * gradient, axis=1, keep_dims=True))
    factor = bound / tl.where(norm < _TINY, _TINY, norm)
    return gradient * tl.where(factor > 1, 1.0, factor)


@triton.jit
def _updated(
    gradient, alive, mean_ptr, square_ptr, weights_ptr, row, column, inside, rows, k, mean_rate, square_rate
):  # fmt: skip
    """Update the running averages with a gradient; return its mean and root mean square with bias correction."""
    wide = gradient.to(tl.float64)  # as in `flexact.policy.running_gradient`
    count = tl.sum(alive.to(tl.float32), axis=1, keep_dims=True)
    square = tl.sum(wide * wide, axis=1, keep_dims=True) / tl.where(count < 1, 1.0, count)
    mean = _averaged(mean_ptr + row * k + column, gradient, mean_rate, inside)
    square = _averaged(square_ptr + row, square, square_rate, row < rows)
    one = tl.full(square.shape, 1.0, tl.float32)
    mean_weight = _averaged(weights_ptr + row * 2, one, mean_rate, row < rows)
    square_weight = _averaged(weights_ptr + row * 2 + 1, one, square_rate, row < rows)
    size = tl.sqrt(square / square_weight).to(tl.float32)
    return mean / mean_weight, tl.where(size < _SMALLEST_SIZE, _SMALLEST_SIZE, size)


@triton.jit
def _averaged(pointer, new, rate, mask):
    """Update a running average in place, and return it."""
    old = tl.load(pointer, mask, other=0.0)
    average = old + rate * (new - old)
    tl.store(pointer, average, mask)
    return average


@triton.jit
def _softmax(x):
    e = tl.exp(x - tl.max(x, axis=1, keep_dims=True))
    return e / tl.sum(e, axis=1, keep_dims=True)
