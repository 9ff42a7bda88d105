"""Triton kernels for the mean and variance of each channel of a batch.

A program iterates over tiles. For each position in a tile it accumulates the value and its square, shifted by the value
at that position in the first tile, so an outlier affects the accuracy at its own position only. The means and squared
deviations of all positions, and then of all programs, are merged with Chan's formula, without cancellation.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op

from flexact.ops.batch_norm import Running
from flexact.ops.operators import is_traced
from flexact.ops.triton import pass_operators
from flexact.ops.triton.launch import Launch
from flexact.ops.triton.passes import Pass
from flexact.ops.triton.tiles import (
    MOMENTS,
    STAGES,
    Tiles,
    add_up,
    by_channel,
    columns,
    load,
    part_of,
    places,
    store_sum,
    zeros,
)

_FINISH_BLOCK = 256


def moments(y: Tensor, running: Running | None, momentum: float | None, eps: float) -> Tensor:
    """Return the mean and 1/√(variance + ε) of each channel, (2, channels), without a graph.

    The running statistics are updated in place.
    momentum: weight of this batch in the running statistics; None takes the cumulative average.
    """
    if is_traced(y):
        found: Tensor = _operator(y.detach(), *(running or (None, None, None)), momentum, eps)
        return found
    return _moments(y, running, momentum, eps)


@triton_op("flexact::batch_moments", mutates_args={"running_mean", "running_var", "batches"})
def _operator(
    y: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None,
    momentum: float | None,
    eps: float,
) -> Tensor:
    running = None
    if running_mean is not None and running_var is not None and batches is not None:
        running = (running_mean, running_var, batches)
    return _moments(y, running, momentum, eps)


def _moments(y: Tensor, running: Running | None, momentum: float | None, eps: float) -> Tensor:
    choices = (running is not None, momentum, eps)
    given = (y, *(running or ()))
    if pass_operators.records(*given):
        return pass_operators.run_moments(y, running or (), *choices)
    (found,) = moments_pass(y, *choices).run(*given)
    return found


def moments_pass(y: Tensor, track: bool, momentum: float | None, eps: float) -> Pass:
    """Return the pass from y and, if they are tracked, the running statistics to the moments."""
    return by_channel(y, 1, MOMENTS).plan(_plan, track, momentum, eps)


pass_operators.makers["moments"] = lambda tensors, *choices: moments_pass(tensors[0], *choices)


def _plan(tiles: Tiles, track: bool, momentum: float | None, eps: float) -> Pass:
    sweep = Launch(_sweep, tiles.grid, tiles.sizes, (track, *tiles.constants))
    channels = tiles.channels
    numbers = (momentum or 0.0, eps, channels, tiles.inner, *tiles.parts(channels), tiles.numel // channels)
    finish = Launch(_finish, (channels,), numbers, (track, momentum is None, _FINISH_BLOCK), 1)
    sweep.prepares(finish, lambda y, partials, batches: (y, *[partials] * 4, batches))
    steps = Pass(4 if track else 1)
    partials, found = steps.floats(tiles.room(3)), steps.floats(2, channels)
    running = (1, 2, 3) if track else (found,) * 3  # without tracking, the kernels do not use them
    steps.launch(sweep, (0, partials, running[2]))
    steps.launch(finish, (0, partials, found, *running))
    steps.outputs = (found,)
    return steps


@triton.jit(do_not_specialize=["outer"])
def _sweep(
    y_ptr, partials_ptr, batches_ptr, numel, outer, channels, inner, TRACK: tl.constexpr,
    LAST: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store the count, the sum, and the sum of squared deviations of this program's values per channel.

    The stored sum is that of the values minus the first value of their channel.
    """
    if TRACK and tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(batches_ptr, tl.load(batches_ptr) + 1)
    channel, column, inside = columns(tl.program_id(0), channels, inner, LAST, BLOCK_J)
    shift = tl.load(y_ptr + channel.to(tl.int64) * inner, inside, other=0.0).to(tl.float32)[None, :]
    offset, mask = places(tl.program_id(1), column, inside, numel, outer, channels, inner, BLOCK_A)
    first = load(y_ptr, offset, mask, EVEN)
    total, square, count = zeros(3, BLOCK_A, BLOCK_J)
    for row_tile in tl.range(tl.program_id(1), tl.cdiv(outer, BLOCK_A), tl.num_programs(1), num_stages=STAGES):
        offset, mask = places(row_tile, column, inside, numel, outer, channels, inner, BLOCK_A)
        off = load(y_ptr, offset, mask, EVEN) - first
        if not EVEN:
            off = tl.where(mask, off, 0.0)
            count += tl.where(mask, 1.0, 0.0)
        total += off
        square += off * off
    if EVEN:
        count += tl.cdiv(tl.cdiv(outer, BLOCK_A) - tl.program_id(1), tl.num_programs(1))
    off = total / tl.maximum(count, 1.0)
    square -= off * total
    mean = first - shift + off
    off = mean - _over_channel(count * mean, LAST) / tl.maximum(_over_channel(count, LAST), 1.0)
    store_sum(partials_ptr, count, 0, 3, channel, inside, channels, LAST, True)
    store_sum(partials_ptr, count * mean, 1, 3, channel, inside, channels, LAST, True)
    store_sum(partials_ptr, square + count * off * off, 2, 3, channel, inside, channels, LAST, True)


@triton.jit
def _over_channel(values, LAST: tl.constexpr):
    """Return the sum over a tile per channel, shaped to broadcast against the tile."""
    total = tl.sum(values, axis=0, keep_dims=True)
    if LAST:
        return total
    else:
        return tl.sum(total, axis=1, keep_dims=True)


@triton.jit(do_not_specialize=["parts", "elements"])
def _finish(
    y_ptr, partials_ptr, found_ptr, running_mean_ptr, running_var_ptr, batches_ptr, momentum, eps,
    channels, inner, parts, per_channel, elements,
    TRACK: tl.constexpr, CUMULATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the moments of one channel, and update its running statistics."""
    channel = tl.program_id(0)
    off = add_up(partials_ptr, 1, 3, channel, channels, parts, per_channel, BLOCK) / elements
    square = add_up(partials_ptr, 2, 3, channel, channels, parts, per_channel, BLOCK)
    start = 0
    while start < parts * per_channel:
        part, mask = part_of(start, channel, channels, parts, per_channel, BLOCK)
        count = tl.load(partials_ptr + part * 3, mask, other=0.0)
        difference = tl.load(partials_ptr + part * 3 + 1, mask, other=0.0) / tl.maximum(count, 1.0) - off
        square += tl.sum(count * difference * difference)
        start += BLOCK
    mean, variance = tl.load(y_ptr + channel.to(tl.int64) * inner).to(tl.float32) + off, square / elements
    tl.store(found_ptr + channel, mean)
    tl.store(found_ptr + channels + channel, 1 / tl.sqrt(variance + eps))
    if TRACK:
        if CUMULATIVE:
            momentum = 1.0 / tl.load(batches_ptr).to(tl.float32)
        running_mean = tl.load(running_mean_ptr + channel).to(tl.float32)
        running_var = tl.load(running_var_ptr + channel).to(tl.float32)
        unbiased = variance * elements / (elements - 1)
        tl.store(running_mean_ptr + channel, running_mean + momentum * (mean - running_mean))
        tl.store(running_var_ptr + channel, running_var + momentum * (unbiased - running_var))
