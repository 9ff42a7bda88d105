"""Two Triton kernels that process all sites of a model in one launch; see `flexact.ops.policy_tables`.

Their cost is dominated by launches. In the logit step, one program processes the rows of one group of sites that pick
together; a row that picks alone is a group of its own. No sum spans several groups, so programs are independent.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexact.config import Policy
from flexact.ops.policy_tables import Tables, concatenated
from flexact.ops.triton import extension
from flexact.ops.triton.kernels import MOST_CANDIDATES
from flexact.ops.triton.launch import Launch
from flexact.ops.triton.passes import Pass

_ROWS = 8
"""Rows per program."""
_WARPS = 1
"""Warps per program. With more, a thread could load a running average after another thread has updated it."""

# The same constants as in `policy.evidence` and `policy.logit_updates`.
_SMALLEST_P = tl.constexpr(1e-30)
_SMALLEST_SIZE = tl.constexpr(torch.finfo(torch.float32).tiny)
_SMALLEST_NORM = tl.constexpr(1e-100)


def draw(values: Sequence[Tensor], layout: Tensor, alive: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return π and p; see `PolicyKernels.draw`."""
    pi, p = _run(_draw_pass(*noise.shape), values, (layout, alive, noise))
    return pi, p


def update(
    values: Sequence[Tensor],
    size: int,
    tables: Tables,
    statistics: tuple[Tensor, ...],
    rates: tuple[float, float],
    policy: Policy,
) -> Tensor:
    """Return the changes to subtract from the logits; see `PolicyKernels.update`."""
    (found,) = _run(_pass_of(size, tables, rates, policy), values, _others(tables, statistics))
    return found


def move(
    logits: Sequence[Tensor],
    sensitivities: Sequence[Tensor],
    size: int,
    tables: Tables,
    statistics: tuple[Tensor, ...],
    rates: tuple[float, float],
    policy: Policy,
) -> bool:
    """Do the whole step in one call of the extension, if it can; see `PolicyKernels.move`."""
    steps, others = _pass_of(size, tables, rates, policy), _others(tables, statistics)
    module = extension.ready()
    native = None if module is None else _native(module, steps, logits[0].get_device(), others)
    return native is not None and module.move(native, tuple(logits), tuple(sensitivities), others)


def _pass_of(size: int, tables: Tables, rates: tuple[float, float], policy: Policy) -> Pass:
    groups, most = tables.group_starts.shape[0] - 1, tables.calls.shape[1] - 2
    return _update_pass(size, *tables.alive.shape, groups, most, tables.factors is not None, rates, policy)


def _others(tables: Tables, statistics: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the tensors that the pass takes after `values`."""
    return (*tables[:-1], tables.width if tables.factors is None else tables.factors, *statistics)


def _run(steps: Pass, values: Sequence[Tensor], others: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run a pass on the concatenation of some tensors, and on others."""
    module = extension.ready()
    native = None if module is None else _native(module, steps, values[0].get_device(), others)
    found: tuple[Tensor, ...] | None = native and module.run_joined(native, tuple(values), others)
    return found or steps.run(concatenated(values), *others)


def _native(module: Any, steps: Pass, device: int, others: tuple[Tensor, ...]) -> Any:
    """Return a pass in the form that the extension takes; None until its kernels were launched once."""
    native = steps.native.get(device)
    if native is None:
        described = steps.described(device, (torch.float32, *[tensor.dtype for tensor in others]))
        if described is not None:
            native = steps.native[device] = module.make_joined(((), *described), steps.outputs, others)
    return native


@functools.lru_cache(maxsize=128)
def _draw_pass(rows: int, k: int) -> Pass:
    steps = Pass(4)
    values, layout, alive, noise = range(4)
    pi, p = steps.like(noise), steps.like(noise)
    launch = Launch(_draw, (triton.cdiv(rows, _ROWS),), (rows, k), (_ROWS,), _WARPS)
    steps.launch(launch, (values, layout, alive, noise, pi, p))
    steps.outputs = (pi, p)
    return steps


@functools.lru_cache(maxsize=128)
def _update_pass(
    size: int, rows: int, k: int, groups: int, most: int, has_factors: bool, rates: tuple[float, float], policy: Policy
) -> Pass:
    numbers = (k, most, *rates, float(policy.lam))
    constants = (policy.pulls_logits, has_factors, 1 if groups == rows else _ROWS)
    steps = Pass(18)
    found = steps.floats(size)
    steps.launch(Launch(_update, (groups,), numbers, constants, _WARPS), (*range(18), found))
    steps.outputs = (found,)
    return steps


@triton.jit
def _draw(values_ptr, layout_ptr, alive_ptr, noise_ptr, pi_ptr, p_ptr, rows, k, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, MOST_CANDIDATES)[None, :]
    valid = row < rows
    inside = valid & (column < k)
    start, own = _own(layout_ptr, row, column, valid)
    logits = tl.load(values_ptr + start + column, own, other=0.0)
    logits = tl.where(_alive(alive_ptr + row * k + column, inside, valid), logits, float("-inf"))
    shifted = logits - tl.max(logits, axis=1, keep_dims=True)
    log_pi = shifted - tl.log(tl.sum(tl.exp(shifted), axis=1, keep_dims=True))
    noise = tl.load(noise_ptr + row * k + column, inside, other=0.0)
    temperature = tl.load(values_ptr + tl.load(layout_ptr + row * 3 + 2, valid, other=0), valid, other=1.0)
    # Rounded as in torch: at a low temperature the quotients are large, and the softmax depends on their differences.
    p = _softmax(tl.div_rn(log_pi + noise, temperature))
    tl.store(pi_ptr + row * k + column, tl.exp(log_pi), inside)
    tl.store(p_ptr + row * k + column, p, inside)


@triton.jit
def _update(
    values_ptr, layout_ptr, calls_ptr, grouped_rows_ptr, group_starts_ptr, alive_ptr, p_ptr, q_ptr, width_ptr,
    alpha_ptr, step_size_ptr, factors_ptr, mean_ptr, square_ptr, weights_ptr, count_ptr, total_ptr, products_ptr,
    found_ptr, k, most, mean_rate, square_rate, lam,
    PULLS: tl.constexpr, HAS_FACTORS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Process one group: sum the changes and the advantages of its rows, then write their means to every row."""
    first = tl.load(group_starts_ptr + tl.program_id(0))
    end = tl.load(group_starts_ptr + tl.program_id(0) + 1)
    column = tl.arange(0, MOST_CANDIDATES)[None, :]
    change_sum = tl.zeros((1, MOST_CANDIDATES), tl.float32)
    advantage_sum = tl.zeros((1, MOST_CANDIDATES), tl.float32)
    moving = tl.zeros((1, 1), tl.int32)
    position = first
    while position < end:
        row, valid = _rows_at(grouped_rows_ptr, position, end, ROWS)
        inside = valid & (column < k)
        start, own = _own(layout_ptr, row, column, valid)
        alive = _alive(alive_ptr + row * k + column, inside, valid)
        gradient = tl.load(values_ptr + start + column, own, other=0.0)
        moves = valid
        if HAS_FACTORS:
            factor = tl.load(factors_ptr + row, valid, other=0.0)
            moves = factor != 0
            gradient = tl.where(moves, gradient * factor, 0.0)
        advantage_sum += tl.sum(_advantage(gradient, p_ptr + row * k + column, inside), axis=0, keep_dims=True)
        moving += tl.sum(moves.to(tl.int32), axis=0, keep_dims=True)
        change, size = _averages(
            gradient, alive, mean_ptr, square_ptr, weights_ptr, row, column, moves, k, mean_rate, square_rate
        )
        if PULLS:
            called, sensitivity = _sensitivity(values_ptr, calls_ptr, row, column, own, valid, most)
            target = _softmax(tl.where(alive, -sensitivity / lam, float("-inf")))
            q = tl.load(q_ptr + row * k + column, inside, other=0.0)
            width = tl.load(width_ptr + row, valid, other=1).to(tl.float32)
            pulled = change + tl.load(alpha_ptr) * size / width * (q - target)
            change = tl.where(called, pulled, change)  # a site without a call has no target
        change = tl.load(step_size_ptr) * (change / size)
        change_sum += tl.sum(tl.where(moves & own, change, 0.0), axis=0, keep_dims=True)
        position += ROWS
    change_sum = change_sum / (end - first).to(tl.float32)
    advantage_sum = advantage_sum / (end - first).to(tl.float32)
    position = first
    while position < end:
        row, valid = _rows_at(grouped_rows_ptr, position, end, ROWS)
        start, own = _own(layout_ptr, row, column, valid)
        tl.store(found_ptr + start + column, change_sum, own)
        _add(count_ptr + row, (moving > 0).to(tl.float32), valid)
        _add(total_ptr + row * k + column, advantage_sum, valid & (column < k))
        number = 0
        while number < k:
            factor_of_number = tl.sum(tl.where(column == number, advantage_sum, 0.0), axis=1, keep_dims=True)
            products = products_ptr + (row * k + number) * k + column
            _add(products, factor_of_number * advantage_sum, valid & (column < k))
            number += 1
        position += ROWS


@triton.jit
def _rows_at(grouped_rows_ptr, position, end, ROWS: tl.constexpr):
    """Return the group's rows from a position on, (ROWS, 1), and a mask of those before its end."""
    index = position + tl.arange(0, ROWS)[:, None]
    return tl.load(grouped_rows_ptr + index, index < end, other=0), index < end


@triton.jit
def _add(pointer, new, mask):
    """Add to a table in place."""
    tl.store(pointer, tl.load(pointer, mask, other=0.0) + new, mask)


@triton.jit
def _advantage(gradient, p_ptr, inside):
    """Return each row's advantages, scaled to a norm of 1."""
    p = tl.load(p_ptr, inside, other=1.0)
    advantage = gradient.to(tl.float64) / tl.where(p < _SMALLEST_P, _SMALLEST_P, p).to(tl.float64)
    norm = tl.sqrt(tl.sum(advantage * advantage, axis=1, keep_dims=True))
    smallest = tl.full(norm.shape, _SMALLEST_NORM, tl.float64)
    return (advantage / tl.where(norm < smallest, smallest, norm)).to(tl.float32)


@triton.jit
def _own(layout_ptr, row, column, valid):
    """Return the offset of each row in `values`, and a mask of its columns."""
    start = tl.load(layout_ptr + row * 3, valid, other=0)
    return start, column < tl.load(layout_ptr + row * 3 + 1, valid, other=0)


@triton.jit
def _alive(alive_ptr, inside, valid):
    """Return a mask of the alive candidates; all are alive in rows past the last, so that their softmax is finite."""
    return (tl.load(alive_ptr, inside, other=0) != 0) | (valid == 0)


@triton.jit
def _sensitivity(values_ptr, calls_ptr, row, column, own, valid, most):
    """Return whether each row was called, and its mean sensitivities over its calls."""
    first = calls_ptr + row * (2 + most)
    called = tl.load(first, valid, other=0) != 0
    count = tl.load(first + 1, valid, other=0)
    sensitivity = tl.zeros(own.shape, tl.float32)
    call = 0
    while call < most:
        offset = tl.load(first + 2 + call, call < count, other=0) + column
        sensitivity += tl.load(values_ptr + offset, own & (call < count), other=0.0)
        call += 1
    divisor = tl.where(count < 1, 1, count).to(tl.float32)
    return called, sensitivity / divisor


@triton.jit
def _averages(
    gradient, alive, mean_ptr, square_ptr, weights_ptr, row, column, moves, k, mean_rate, square_rate
):  # fmt: skip
    """Update the running averages of the rows that move; return the mean and the root mean square of all rows, with
    bias correction."""
    wide = gradient.to(tl.float64)  # as in `flexact.policy.evidence`
    count = tl.sum(alive.to(tl.float32), axis=1, keep_dims=True)
    square = tl.sum(wide * wide, axis=1, keep_dims=True) / count
    mean = _averaged(mean_ptr + row * k + column, gradient, mean_rate, moves & (column < k))
    square = _averaged(square_ptr + row, square, square_rate, moves)
    one = tl.full(square.shape, 1.0, tl.float32)
    mean_weight = _averaged(weights_ptr + row * 2, one, mean_rate, moves)
    square_weight = _averaged(weights_ptr + row * 2 + 1, one, square_rate, moves)
    size = tl.sqrt(square / square_weight).to(tl.float32)
    # Unlike `tl.maximum`, `tl.where` propagates NaN, as torch's clamp does.
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
