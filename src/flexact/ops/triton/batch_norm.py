"""Triton kernels that fuse batch norm, the residual addition and the routed activation.

    h = norm(y) + residual,   x = Σ_k w_k σ_k(h)

The residual is optional, and may have a batch norm of its own. The forward is two passes: one computes the moments, one
reads y and the residual and writes x. The backward recomputes h from y, which batch norm saves anyway, also in two
passes: one for the sums over each channel, one that writes ∂y. It saves no more tensors than a ReLU would.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexact.ops.blending import Blending
from flexact.ops.closed_form import with_layout_of
from flexact.ops.triton.basis import Blend, blend, coefficients, is_fast
from flexact.ops.triton.launch import Launch
from flexact.ops.triton.routed import (
    blended,
    cut_for,
    differentiated,
    finish_statistics,
    finished_statistics,
    logit_gradient,
)
from flexact.ops.triton.tiles import STAGES, Tiles, add_up, by_channel, columns, load, places, store, store_sum, zeros

_FINISH_BLOCK = 256
_NOTHING = Blend((), (), 0)
_NO_RESIDUAL, _PLAIN, _NORMALISED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class Norm(NamedTuple):
    """The moments and the optional affine parameters with which one forward normalises."""

    moments: Tensor
    """(2, channels), float32: the mean and 1/√(variance + ε)."""
    weight: Tensor | None
    bias: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors in the order in which every kernel takes them; placeholders for missing ones are never read."""
        return tuple(self.moments if one is None else one for one in self)


class Normalising(NamedTuple):
    """How a fused site computes h = norm(y) + residual in one forward."""

    norm: Norm
    residual: Tensor | None
    residual_norm: Norm | None
    """The batch norm of the residual, if it has one."""
    batch_statistics: bool
    """Whether the moments are those of the batch, so that the gradient goes through them."""

    @property
    def flags(self) -> tuple[int, bool, bool]:
        """The kind of the residual, and whether the norm and the residual norm are affine."""
        norm, residual, other, _ = self
        kind = _NO_RESIDUAL if residual is None else _PLAIN if other is None else _NORMALISED
        return kind.value, norm.weight is not None, other is not None and other.weight is not None

    def tensors(self, y: Tensor) -> tuple[Tensor, ...]:
        """Return y, the residual and the norms in the order in which every kernel takes them."""
        norm, residual, residual_norm, _ = self
        return y, y if residual is None else residual, *norm.tensors, *(residual_norm or norm).tensors


def forward(y: Tensor, normalising: Normalising, blending: Blending) -> tuple[Tensor, Tensor]:
    """Return x and its sensitivities, (rows, K)."""
    parts, weights = blend(blending.keys, blending.alive), blending.weights.contiguous()
    tiles = by_channel(y, 1, cut_for(parts))
    choices = (normalising.batch_statistics, normalising.flags, *weights.shape, is_fast(y))
    sweep, finish, room = tiles.plan(_forward_plan, parts, blending.statistics, *choices)
    x, partials = torch.empty_like(y), normalising.norm.moments.new_empty(room)
    sweep(*normalising.tensors(y), weights, x, partials)
    return x, finished_statistics(finish, partials, weights)


def backward(
    delta: Tensor, y: Tensor, normalising: Normalising, blending: Blending, need_logits: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients w.r.t. y and the residual (None without one), and all others in one flat tensor.

    The flat tensor holds the gradients w.r.t. bias, weight, the weight of a residual norm and the logits;
    `split_results` splits it.
    """
    norm, residual, residual_norm, batch_statistics = normalising
    parts, weights = blend(blending.keys, blending.alive), blending.weights.contiguous()
    tiles, delta = by_channel(y, 1, cut_for(parts)), with_layout_of(y, delta)
    choices = (parts, batch_statistics, need_logits, normalising.flags, *weights.shape, is_fast(y))
    sums, finish, gradients, *sizes = tiles.plan(_backward_plan, *choices)
    partials, results = (norm.moments.new_empty(size) for size in sizes)
    tensors = (*normalising.tensors(y), weights)
    to_h = delta if residual is None else torch.empty_like(y)
    sums(delta, *tensors, to_h, partials)
    finish(partials, results, blending.probabilities.contiguous(), blending.temperature)
    to_y = torch.empty_like(y)
    to_residual = None if residual is None else to_h if residual_norm is None else torch.empty_like(y)
    gradients(to_h, *tensors, results, to_y, to_y if to_residual is None else to_residual)
    return to_y, to_residual, results


def split_results(results: Tensor, channels: int, has_residual_norm: bool) -> tuple[Tensor, ...]:
    """Split the flat result of `backward` into the gradients w.r.t. bias, weight, residual weight (if any), logits."""
    sizes = [channels] * (3 if has_residual_norm else 2)
    return torch.split_with_sizes(results, [*sizes, results.numel() - sum(sizes)])


def _forward_plan(
    tiles: Tiles, parts: Blend, statistics: bool, batch_statistics: bool, flags: tuple[int, bool, bool], rows: int,
    k: int, fast: bool,
) -> tuple[Launch, Launch | None, int]:  # fmt: skip
    """Return the main launch, the launch that reduces its partial sums, and the number of partial sums."""
    constants = (*parts.constants(fast), statistics, *flags, rows > 1, *tiles.constants)
    sweep = Launch(_forward, tiles.grid, (*tiles.sizes, k), constants)
    finish, room = finish_statistics(tiles, parts, statistics, rows, k)
    if finish:
        sweep.prepares(finish, lambda *dtypes: (dtypes[-1], dtypes[-1]))
    if batch_statistics:  # in training
        choices, picks = (flags, rows, k, fast), parts.picks()
        sums, reduced, gradients, *_ = tiles.plan(_backward_plan, parts, True, len(picks) > 1, *choices)
        sweep.prepares(sums, lambda y, *rest: (y, y, *rest))
        sweep.prepares(reduced, lambda *dtypes: (dtypes[-1],) * 4)
        sweep.prepares(gradients, lambda y, *rest: (y, y, *rest[:-2], rest[-1], y, y))
        later = [(parts, False)] if len(picks) > 1 else []  # an evaluation
        later += [(pick, True) for pick in picks] if len(picks) == 2 else []  # the commitment
        for other, trains in later:
            forward, *_ = tiles.plan(_forward_plan, other, False, trains, *choices)
            sweep.prepares(forward, lambda *dtypes: dtypes)
    return sweep, finish, room


def _backward_plan(
    tiles: Tiles, parts: Blend, batch_statistics: bool, need_logits: bool, flags: tuple[int, bool, bool], rows: int,
    k: int, fast: bool,
) -> tuple[Launch, Launch, Launch, int, int]:  # fmt: skip
    """Return the three launches in their order, the number of partial sums, and the number of results.

    Both numbers count first the sums over each channel, then those of the routing.
    """
    channels, walk = tiles.channels, (*flags, rows > 1, *tiles.constants)
    count = 3 if flags[0] == _NORMALISED.value else 2
    by_norm, by_routing = tiles.room(count), tiles.room(len(parts.basis) if need_logits else 0)
    constants = (*parts.constants(fast), need_logits, *walk)
    sums = Launch(_backward_sums, tiles.grid, (by_norm, *tiles.sizes, k), constants)
    grid = (channels + (rows if need_logits else 0),)
    numbers = (by_norm, parts.alive, channels, *tiles.parts(channels), rows, *tiles.parts(rows), k)
    finish = Launch(_finish_backward, grid, numbers, (*parts.constants(fast), count, _FINISH_BLOCK), 1)
    needed = parts if flags[0] == _NO_RESIDUAL.value else _NOTHING  # with a residual, ∂h is stored: one kernel for all
    constants = (*needed.constants(fast), batch_statistics, *walk)
    gradients = Launch(_backward, tiles.grid, (*tiles.sizes, k, tiles.numel // channels), constants)
    return sums, finish, gradients, by_norm + by_routing, count * channels + (rows * k if need_logits else 0)


@triton.jit
def _norm(moments_ptr, weight_ptr, bias_ptr, channel, channels, inside, AFFINE: tl.constexpr):
    """Return mean, rstd, weight·rstd and bias for each column of a tile."""
    mean = tl.load(moments_ptr + channel, inside, other=0.0)[None, :]
    rstd = tl.load(moments_ptr + channels + channel, inside, other=0.0)[None, :]
    if AFFINE:
        weight = tl.load(weight_ptr + channel, inside, other=0.0).to(tl.float32)[None, :]
        bias = tl.load(bias_ptr + channel, inside, other=0.0).to(tl.float32)[None, :]
        return mean, rstd, rstd * weight, bias
    else:
        return mean, rstd, rstd, tl.zeros_like(rstd)


@triton.jit
def _residual(r_ptr, offset, mask, norm, RESIDUAL: tl.constexpr, EVEN: tl.constexpr):
    """Return the term added to norm(y), and the residual as stored, centred if it has a norm."""
    if RESIDUAL == _NO_RESIDUAL:
        return 0.0, 0.0
    else:
        r = load(r_ptr, offset, mask, EVEN)
        if RESIDUAL == _PLAIN:
            return r, r
        else:
            return (r - norm[0]) * norm[2] + norm[3], r - norm[0]


@triton.jit(do_not_specialize=["outer"], do_not_specialize_on_alignment=["weights_ptr"])
def _forward(
    y_ptr, r_ptr, moments_ptr, weight_ptr, bias_ptr, r_moments_ptr, r_weight_ptr, r_bias_ptr,
    weights_ptr, x_ptr, partials_ptr, numel, outer, channels, inner, k,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr, SENSITIVITIES: tl.constexpr,
    RESIDUAL: tl.constexpr, AFFINE: tl.constexpr, R_AFFINE: tl.constexpr,
    BY_CHANNEL: tl.constexpr, LAST: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    channel, column, inside = columns(tl.program_id(0), channels, inner, LAST, BLOCK_J)
    weights = coefficients(weights_ptr, channel, inside, k, BASIS, FORMS, BY_CHANNEL)
    mean, _rstd, scale, bias = _norm(moments_ptr, weight_ptr, bias_ptr, channel, channels, inside, AFFINE)
    r_norm = _norm(r_moments_ptr, r_weight_ptr, r_bias_ptr, channel, channels, inside, R_AFFINE)
    sums = zeros(len(BASIS) if SENSITIVITIES else 0, BLOCK_A, BLOCK_J)
    for row_tile in tl.range(tl.program_id(1), tl.cdiv(outer, BLOCK_A), tl.num_programs(1), num_stages=STAGES):
        offset, mask = places(row_tile, column, inside, numel, outer, channels, inner, BLOCK_A)
        y = load(y_ptr, offset, mask, EVEN)
        added, _ = _residual(r_ptr, offset, mask, r_norm, RESIDUAL, EVEN)
        h = (y - mean) * scale + bias + added
        x, sums = blended(h, weights, sums, mask, BASIS, FAST, SENSITIVITIES, EVEN)
        store(x_ptr, offset, x, mask, EVEN)
    for i in tl.static_range(len(sums)):
        store_sum(partials_ptr, sums[i], i, len(sums), channel, inside, channels, LAST, BY_CHANNEL)


@triton.jit(do_not_specialize=["by_norm", "outer"], do_not_specialize_on_alignment=["weights_ptr"])
def _backward_sums(
    delta_ptr, y_ptr, r_ptr, moments_ptr, weight_ptr, bias_ptr, r_moments_ptr, r_weight_ptr, r_bias_ptr,
    weights_ptr, to_h_ptr, partials_ptr, by_norm, numel, outer, channels, inner, k,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr, NEED_LOGITS: tl.constexpr,
    RESIDUAL: tl.constexpr, AFFINE: tl.constexpr, R_AFFINE: tl.constexpr,
    BY_CHANNEL: tl.constexpr, LAST: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store partial sums of ∂h, ∂h·ŷ and ∂h·r̂ per channel and the inner products, and with a residual also ∂h.

    The partial sums of the inner products start at offset `by_norm`, after the others.
    """
    channel, column, inside = columns(tl.program_id(0), channels, inner, LAST, BLOCK_J)
    weights = coefficients(weights_ptr, channel, inside, k, BASIS, FORMS, BY_CHANNEL)
    mean, rstd, scale, bias = _norm(moments_ptr, weight_ptr, bias_ptr, channel, channels, inside, AFFINE)
    r_norm = _norm(r_moments_ptr, r_weight_ptr, r_bias_ptr, channel, channels, inside, R_AFFINE)
    sums = zeros(len(BASIS) if NEED_LOGITS else 0, BLOCK_A, BLOCK_J)
    total, with_y, with_r = zeros(3, BLOCK_A, BLOCK_J)
    for row_tile in tl.range(tl.program_id(1), tl.cdiv(outer, BLOCK_A), tl.num_programs(1), num_stages=STAGES):
        offset, mask = places(row_tile, column, inside, numel, outer, channels, inner, BLOCK_A)
        y = load(y_ptr, offset, mask, EVEN)
        delta = load(delta_ptr, offset, mask, EVEN)
        added, r = _residual(r_ptr, offset, mask, r_norm, RESIDUAL, EVEN)
        h = (y - mean) * scale + bias + added
        gradient, sums = differentiated(h, delta, weights, sums, BASIS, FAST, NEED_LOGITS)
        if RESIDUAL != _NO_RESIDUAL:
            store(to_h_ptr, offset, gradient, mask, EVEN)
        total += gradient
        with_y += gradient * ((y - mean) * rstd)
        if RESIDUAL == _NORMALISED:
            with_r += gradient * (r * r_norm[1])
    for i in tl.static_range(len(sums)):
        store_sum(partials_ptr + by_norm, sums[i], i, len(sums), channel, inside, channels, LAST, BY_CHANNEL)
    count: tl.constexpr = 3 if RESIDUAL == _NORMALISED else 2
    store_sum(partials_ptr, total, 0, count, channel, inside, channels, LAST, True)
    store_sum(partials_ptr, with_y, 1, count, channel, inside, channels, LAST, True)
    if RESIDUAL == _NORMALISED:
        store_sum(partials_ptr, with_r, 2, count, channel, inside, channels, LAST, True)


@triton.jit(
    do_not_specialize=["by_norm", "alive", "parts", "routing_parts"],
    do_not_specialize_on_alignment=["probabilities_ptr", "temperature_ptr"],
)
def _finish_backward(
    partials_ptr, sums_ptr, probabilities_ptr, temperature_ptr, by_norm, alive,
    channels, parts, per_channel, rows, routing_parts, per_row, k,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Reduce the partial sums: one program per channel, then one per row of the routing.

    The gradient with respect to the logits is stored after the sums over the channels.
    """
    program = tl.program_id(0)
    if program < channels:
        for i in tl.static_range(COUNT):
            total = add_up(partials_ptr, i, COUNT, program, channels, parts, per_channel, BLOCK)
            tl.store(sums_ptr + i * channels + program, total)
    else:
        logit_gradient(
            partials_ptr + by_norm, probabilities_ptr, temperature_ptr, sums_ptr + COUNT * channels, alive,
            program - channels, rows, k, routing_parts, per_row, BASIS, FORMS, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["outer", "elements"], do_not_specialize_on_alignment=["weights_ptr"])
def _backward(
    to_h_ptr, y_ptr, r_ptr, moments_ptr, weight_ptr, bias_ptr, r_moments_ptr, r_weight_ptr, r_bias_ptr,
    weights_ptr, sums_ptr, to_y_ptr, to_r_ptr, numel, outer, channels, inner, k, elements,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr, BATCH: tl.constexpr,
    RESIDUAL: tl.constexpr, AFFINE: tl.constexpr, R_AFFINE: tl.constexpr,
    BY_CHANNEL: tl.constexpr, LAST: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store ∂y = weight·rstd·(∂h − mean(∂h) − ŷ·mean(∂h·ŷ)), and the same for a residual with a norm of its own.

    Without a residual, `to_h_ptr` points to δ and ∂h is recomputed from it.
    """
    channel, column, inside = columns(tl.program_id(0), channels, inner, LAST, BLOCK_J)
    weights = coefficients(weights_ptr, channel, inside, k, BASIS, FORMS, BY_CHANNEL)
    mean, rstd, scale, bias = _norm(moments_ptr, weight_ptr, bias_ptr, channel, channels, inside, AFFINE)
    r_mean, r_rstd, r_scale, _r_bias = _norm(
        r_moments_ptr, r_weight_ptr, r_bias_ptr, channel, channels, inside, R_AFFINE
    )
    if BATCH:
        mean_h = tl.load(sums_ptr + channel, inside, other=0.0)[None, :] / elements
        mean_y = tl.load(sums_ptr + channels + channel, inside, other=0.0)[None, :] / elements
        if RESIDUAL == _NORMALISED:
            mean_r = tl.load(sums_ptr + 2 * channels + channel, inside, other=0.0)[None, :] / elements
    for row_tile in tl.range(tl.program_id(1), tl.cdiv(outer, BLOCK_A), tl.num_programs(1), num_stages=STAGES):
        offset, mask = places(row_tile, column, inside, numel, outer, channels, inner, BLOCK_A)
        y = load(y_ptr, offset, mask, EVEN)
        gradient = load(to_h_ptr, offset, mask, EVEN)
        if RESIDUAL == _NO_RESIDUAL:
            gradient, _ = differentiated((y - mean) * scale + bias, gradient, weights, (), BASIS, FAST, False)
        to_y = gradient
        if BATCH:
            to_y = gradient - mean_h - (y - mean) * rstd * mean_y
        store(to_y_ptr, offset, scale * to_y, mask, EVEN)
        if RESIDUAL == _NORMALISED:
            to_r = gradient
            if BATCH:
                r = load(r_ptr, offset, mask, EVEN)
                to_r = gradient - mean_h - (r - r_mean) * r_rstd * mean_r
            store(to_r_ptr, offset, r_scale * to_r, mask, EVEN)
