"""Triton kernels of the routed activation, with the memory traffic of a ReLU.

The forward reads h and writes x; the backward reads h and δ and writes ∂h. Statistics and inner products are partial
sums of the same passes. A small kernel reduces them in a fixed order, without atomics, so results are deterministic.
Arithmetic is in float32. The basis functions are compile-time constants; probabilities and τ are read from memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexact.ops import dispatch
from flexact.ops.blending import Blending
from flexact.ops.closed_form import with_layout_of
from flexact.ops.triton.basis import Blend, blend, coefficients, is_fast
from flexact.ops.triton.basis_functions import LINEAR, evaluated, weighted_slope, weighted_value
from flexact.ops.triton.launch import Launch
from flexact.ops.triton.tiles import (
    FEW_SUMS,
    FLAT,
    MANY_SUMS,
    STAGES,
    Cut,
    Tiles,
    add_up,
    by_channel,
    columns,
    dense,
    flat,
    load,
    places,
    store,
    store_sum,
    zeros,
)

_FINISH_BLOCK = 1024
_FEW_BASIS_FUNCTIONS = 6

MOST_CANDIDATES = tl.constexpr(dispatch.MOST_CANDIDATES)
"""Width of a row in a kernel, a power of 2."""


def forward(h: Tensor, blending: Blending) -> tuple[Tensor, Tensor]:
    """Return x = Σ_k w_k σ_k(h) and its sensitivities, (rows, K). See `closed_form.forward`."""
    weights, _, _, keys, alive, channel_dim, statistics = blending
    h, weights, parts = dense(h), weights.contiguous(), blend(keys, alive)
    rows, k = weights.shape
    x = torch.empty_like(h)
    if h.numel() == 0:
        return x, weights.new_zeros((rows, k) if statistics else 0)
    tiles = _tiles(h, rows, channel_dim, parts)
    sweep, finish, room = tiles.plan(_forward_plan, parts, statistics, rows, k, is_fast(h))
    partials = h.new_empty(room, dtype=torch.float32)
    sweep(h, weights, x, partials)
    return x, finished_statistics(finish, partials, weights)


def backward(delta: Tensor, h: Tensor, blending: Blending, need_logits: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients w.r.t. h and w.r.t. the logits, (rows·K,), empty if not needed."""
    weights, probabilities, temperature, keys, alive, channel_dim, _ = blending
    h, weights, parts = dense(h), weights.contiguous(), blend(keys, alive)
    rows, k = weights.shape
    delta, gradient = with_layout_of(h, delta), torch.empty_like(h)
    if h.numel() == 0:
        return gradient, weights.new_zeros(rows * k if need_logits else 0)
    tiles = _tiles(h, rows, channel_dim, parts)
    sweep, finish, room = tiles.plan(_backward_plan, parts, need_logits, rows, k, is_fast(h))
    partials = h.new_empty(room, dtype=torch.float32)
    sweep(h, delta, weights, gradient, partials)
    to_logits = weights.new_empty(rows * k if need_logits else 0)
    if need_logits:
        finish(partials, probabilities.contiguous(), temperature, to_logits)
    return gradient, to_logits


def _forward_plan(
    tiles: Tiles, parts: Blend, statistics: bool, rows: int, k: int, fast: bool
) -> tuple[Launch, Launch | None, int]:
    """Return the main launch, the launch that reduces its partial sums, and the number of partial sums."""
    constants = (*parts.constants(fast), statistics, rows > 1, *tiles.constants)
    sweep = Launch(_forward, tiles.grid, (*tiles.sizes, k), constants)
    finish, room = finish_statistics(tiles, parts, statistics, rows, k)
    if finish:  # in training, followed by a backward and later an evaluation
        backward, to_logits, _ = tiles.plan(_backward_plan, parts, True, rows, k, fast)
        evaluation, *_ = tiles.plan(_forward_plan, parts, False, rows, k, fast)
        sweep.prepares(finish, lambda h, weights, x, partials: (partials, weights))
        sweep.prepares(backward, lambda h, weights, x, partials: (h, h, weights, x, partials))
        sweep.prepares(to_logits, lambda h, weights, x, partials: (partials, weights, weights, weights))
        sweep.prepares(evaluation, lambda *dtypes: dtypes)
    return sweep, finish, room


def _backward_plan(
    tiles: Tiles, parts: Blend, need_logits: bool, rows: int, k: int, fast: bool
) -> tuple[Launch, Launch, int]:
    """Return the main launch, the launch that reduces its partial sums, and the number of partial sums."""
    constants = (*parts.constants(fast), need_logits, rows > 1, *tiles.constants)
    sweep = Launch(_backward, tiles.grid, (*tiles.sizes, k), constants)
    numbers = (parts.alive, rows, k, *tiles.parts(rows))
    finish = Launch(_finish_gradient, (rows,), numbers, (*parts.constants(fast), _FINISH_BLOCK))
    return sweep, finish, tiles.room(len(parts.basis) if need_logits else 0)


def finish_statistics(tiles: Tiles, parts: Blend, statistics: bool, rows: int, k: int) -> tuple[Launch | None, int]:
    """Return the launch that reduces the partial sums of a forward to its statistics, if any, and their number."""
    if not statistics:
        return None, 0
    numbers = (parts.alive, rows, k, *tiles.parts(rows), tiles.numel // rows)
    constants = (*parts.constants(False), _FINISH_BLOCK)
    return Launch(_finish_statistics, (rows,), numbers, constants), tiles.room(len(parts.basis))


def finished_statistics(finish: Launch | None, partials: Tensor, weights: Tensor) -> Tensor:
    """Return the sensitivities of a forward, (rows, K), empty if they were not requested."""
    gathered = partials.new_empty(weights.shape if finish else 0)
    if finish:
        finish(partials, gathered)
    return gathered


def _tiles(h: Tensor, rows: int, channel_dim: int, parts: Blend) -> Tiles:
    return flat(h, FLAT) if rows == 1 else by_channel(h, channel_dim, cut_for(parts))


def cut_for(parts: Blend) -> Cut:
    """Return the cut for sums per channel. With many sums, fewer programs keep the final reduction short."""
    return FEW_SUMS if len(parts.basis) <= _FEW_BASIS_FUNCTIONS else MANY_SUMS


@triton.jit(do_not_specialize=["outer"], do_not_specialize_on_alignment=["weights_ptr"])
def _forward(
    h_ptr, weights_ptr, x_ptr, partials_ptr, numel, outer, channels, inner, k,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr, SENSITIVITIES: tl.constexpr,
    BY_CHANNEL: tl.constexpr, LAST: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    channel, column, inside = columns(tl.program_id(0), channels, inner, LAST, BLOCK_J)
    weights = coefficients(weights_ptr, channel, inside, k, BASIS, FORMS, BY_CHANNEL)
    sums = zeros(len(BASIS) if SENSITIVITIES else 0, BLOCK_A, BLOCK_J)
    for row_tile in tl.range(tl.program_id(1), tl.cdiv(outer, BLOCK_A), tl.num_programs(1), num_stages=STAGES):
        offset, mask = places(row_tile, column, inside, numel, outer, channels, inner, BLOCK_A)
        h = load(h_ptr, offset, mask, EVEN)
        x, sums = blended(h, weights, sums, mask, BASIS, FAST, SENSITIVITIES, EVEN)
        store(x_ptr, offset, x, mask, EVEN)
    for i in tl.static_range(len(sums)):
        store_sum(partials_ptr, sums[i], i, len(sums), channel, inside, channels, LAST, BY_CHANNEL)


@triton.jit(do_not_specialize=["outer"], do_not_specialize_on_alignment=["weights_ptr"])
def _backward(
    h_ptr, delta_ptr, weights_ptr, gradient_ptr, partials_ptr, numel, outer, channels, inner, k,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr, NEED_LOGITS: tl.constexpr,
    BY_CHANNEL: tl.constexpr, LAST: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    channel, column, inside = columns(tl.program_id(0), channels, inner, LAST, BLOCK_J)
    weights = coefficients(weights_ptr, channel, inside, k, BASIS, FORMS, BY_CHANNEL)
    sums = zeros(len(BASIS) if NEED_LOGITS else 0, BLOCK_A, BLOCK_J)
    for row_tile in tl.range(tl.program_id(1), tl.cdiv(outer, BLOCK_A), tl.num_programs(1), num_stages=STAGES):
        offset, mask = places(row_tile, column, inside, numel, outer, channels, inner, BLOCK_A)
        h = load(h_ptr, offset, mask, EVEN)
        delta = load(delta_ptr, offset, mask, EVEN)
        gradient, sums = differentiated(h, delta, weights, sums, BASIS, FAST, NEED_LOGITS)
        store(gradient_ptr, offset, gradient, mask, EVEN)
    for i in tl.static_range(len(sums)):
        store_sum(partials_ptr, sums[i], i, len(sums), channel, inside, channels, LAST, BY_CHANNEL)


@triton.jit
def blended(
    h, weights, sums, mask,
    BASIS: tl.constexpr, FAST: tl.constexpr, SENSITIVITIES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return x, and the sums with this tile's |slopes| added."""
    x = tl.zeros_like(h)
    updated = ()
    for b in tl.static_range(len(BASIS)):
        value, slope = evaluated(h, BASIS[b], FAST)
        x += weighted_value(weights[b], value, BASIS[b])
        if SENSITIVITIES:
            if (BASIS[b] if isinstance(BASIS[b], int) else -1) == LINEAR:
                updated = updated + (sums[b],)  # its slope is 1 everywhere and needs no sum
            else:
                size = tl.abs(slope)
                updated = updated + (sums[b] + (size if EVEN else tl.where(mask, size, 0.0)),)
    return x, updated


@triton.jit
def differentiated(
    h, delta, weights, sums, BASIS: tl.constexpr, FAST: tl.constexpr, NEED_LOGITS: tl.constexpr
):  # fmt: skip
    """Return δ·Σ w σ′(h), and the sums with this tile's inner products ⟨δ, σ(h)⟩ added."""
    total = tl.zeros_like(h)
    updated = ()
    for b in tl.static_range(len(BASIS)):
        value, slope = evaluated(h, BASIS[b], FAST)
        total += weighted_slope(weights[b], slope, BASIS[b])
        if NEED_LOGITS:
            updated = updated + (sums[b] + delta * value,)
    return delta * total, updated


@triton.jit(do_not_specialize=["alive", "parts", "elements"], do_not_specialize_on_alignment=["gathered_ptr"])
def _finish_statistics(
    partials_ptr, gathered_ptr, alive, rows, k, parts, per_row, elements,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, MOST_CANDIDATES)
    found = ()
    for b in tl.static_range(len(BASIS)):
        if (BASIS[b] if isinstance(BASIS[b], int) else -1) == LINEAR:
            found = found + (elements * 1.0,)
        else:
            found = found + (add_up(partials_ptr, b, len(BASIS), row, rows, parts, per_row, BLOCK),)
    sensitivities = combined(found, BASIS, FORMS) / elements
    is_in = ((alive >> column) & 1) == 1
    tl.store(gathered_ptr + row * k + column, tl.where(is_in, sensitivities, 0.0), column < k)


@triton.jit(
    do_not_specialize=["alive", "parts"],
    do_not_specialize_on_alignment=["probabilities_ptr", "temperature_ptr", "to_logits_ptr"],
)
def _finish_gradient(
    partials_ptr, probabilities_ptr, temperature_ptr, to_logits_ptr, alive, rows, k, parts, per_row,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    logit_gradient(
        partials_ptr, probabilities_ptr, temperature_ptr, to_logits_ptr, alive, tl.program_id(0), rows, k,
        parts, per_row, BASIS, FORMS, BLOCK,
    )  # fmt: skip


@triton.jit
def logit_gradient(
    partials_ptr, probabilities_ptr, temperature_ptr, to_logits_ptr, alive, row, rows, k, parts, per_row,
    BASIS: tl.constexpr, FORMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store (p_k/τ)·Σ_j p_j (⟨δ, a_k⟩ − ⟨δ, a_j⟩), from partial inner products with the basis; 0 if eliminated."""
    found = ()
    for b in tl.static_range(len(BASIS)):
        found = found + (add_up(partials_ptr, b, len(BASIS), row, rows, parts, per_row, BLOCK),)
    column = tl.arange(0, MOST_CANDIDATES)
    p = tl.load(probabilities_ptr + row * k + column, column < k, other=0.0)
    # Mask the inner products where p = 0, because 0·∞ would be NaN.
    inner = tl.where((((alive >> column) & 1) == 1) & (p != 0), combined(found, BASIS, FORMS), 0.0)
    differences = tl.expand_dims(inner, 1) - tl.expand_dims(inner, 0)
    gradient = p / tl.load(temperature_ptr) * tl.sum(tl.expand_dims(p, 0) * differences, axis=1)
    tl.store(to_logits_ptr + row * k + column, gradient, column < k)


@triton.jit
def combined(found, BASIS: tl.constexpr, FORMS: tl.constexpr):
    """Return the sums of the candidates from those of the basis; entries of eliminated candidates are arbitrary."""
    column = tl.arange(0, MOST_CANDIDATES)
    total = tl.zeros([MOST_CANDIDATES], tl.float32)
    for b in tl.static_range(len(BASIS)):
        for i in tl.static_range(len(FORMS[b])):
            if FORMS[b][i] != 0:
                total += tl.where(column == i, FORMS[b][i] * found[b], 0.0)
    return total
