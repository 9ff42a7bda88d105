"""The derivatives of the routed activation at one input in Triton, for `higher_order`: kernels and their launches."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexact.ops.blending import Blending
from flexact.ops.closed_form import dense, with_layout_of
from flexact.ops.closed_form_blends import ClosedFormBlends
from flexact.ops.fallback import run
from flexact.ops.triton import kernels
from flexact.ops.triton.basis import Blend, blend, coefficients, is_fast
from flexact.ops.triton.basis_functions import evaluated, weighted_slope
from flexact.ops.triton.higher_functions import second_and_third
from flexact.ops.triton.launch import Launch, Launches, one
from flexact.ops.triton.tiles import (
    FLAT,
    MANY_SUMS,
    STAGES,
    Tiles,
    by_channel,
    columns,
    flat,
    load,
    places,
    store,
    store_sum,
    zeros,
)

Orders = tuple[bool, bool, bool]
"""Whether δ_0, δ_1 and δ_2 are given."""


class TritonBlends:
    """See `higher_order.Blends`. Every candidate must be built in, and h not empty."""

    def __init__(self, h: Tensor, blending: Blending) -> None:
        self._h, self._blending = dense(h), blending
        self._weights = blending.weights.contiguous()
        rows, k = self._weights.shape
        self._tiles = flat(h, FLAT) if rows == 1 else by_channel(h, blending.channel_dim, MANY_SUMS)
        self._choices = blend(blending.keys, blending.alive), rows, k, is_fast(h)

    def blend(self, n: int) -> Tensor:
        """Return B_n."""
        return run(self._blend, lambda _, n: self._fallback.blend(n), self._h, n)

    def gradients(self, deltas: Mapping[int, Tensor], need_logits: bool) -> tuple[Tensor, Tensor]:
        """Return the gradients of Σ_n ⟨δ_n, B_n⟩ with respect to h and the logits."""
        return run(self._gradients, lambda _, *rest: self._fallback.gradients(*rest), self._h, deltas, need_logits)

    @functools.cached_property
    def _fallback(self) -> ClosedFormBlends:
        return ClosedFormBlends(self._h, self._blending)

    def _blend(self, h: Tensor, n: int) -> Tensor:
        found = torch.empty_like(h, dtype=torch.float32)
        self._tiles.plan(_blend_plan, *self._choices, n)(h, self._weights, found)
        return found

    def _gradients(self, h: Tensor, deltas: Mapping[int, Tensor], need_logits: bool) -> tuple[Tensor, Tensor]:
        given = [with_layout_of(h, deltas[n]) if n in deltas else h for n in range(3)]  # h is not read
        orders = (0 in deltas, 1 in deltas, 2 in deltas)
        launches, room = self._tiles.plan(_gradients_plan, *self._choices, orders, need_logits)
        to_h, partials = torch.empty_like(h), h.new_empty(room, dtype=torch.float32)
        to_logits = partials.new_empty(self._weights.numel() if need_logits else 0)
        _, probabilities, temperature, *_ = self._blending
        launches(h, self._weights, *given, to_h, partials, to_logits, probabilities.contiguous(), temperature)
        return to_h, to_logits


def _blend_plan(tiles: Tiles, parts: Blend, rows: int, k: int, fast: bool, n: int) -> Launches:
    launch = _blend_launch(tiles, parts, rows, k, fast, n)
    if n == 1:  # what a loss with a second derivative needs
        launch.prepares(_blend_launch(tiles, parts, rows, k, fast, 2), lambda *dtypes: dtypes)
        sweep, finish = _gradients_launches(tiles, parts, rows, k, fast, (True, True, True), True)
        launch.prepares(sweep, lambda h, floats, _: (h, floats, h, floats, floats, h, floats))
        launch.prepares(finish, lambda h, floats, _: (floats,) * 4)
    return one(launch, 3)


def _blend_launch(tiles: Tiles, parts: Blend, rows: int, k: int, fast: bool, n: int) -> Launch:
    return Launch(_store_blend, tiles.grid, (*tiles.sizes, k), (*parts.constants(fast), n, rows > 1, *tiles.constants))


def _gradients_plan(
    tiles: Tiles, parts: Blend, rows: int, k: int, fast: bool, orders: Orders, need_logits: bool
) -> tuple[Launches, int]:
    """Return the launches, and the number of partial sums."""
    sweep, finish = _gradients_launches(tiles, parts, rows, k, fast, orders, need_logits)
    steps = [(sweep, range(7)), (finish, range(6, 10))]
    return Launches(10, *steps[: 1 + need_logits]), tiles.room(len(parts.basis) if need_logits else 0)


def _gradients_launches(
    tiles: Tiles, parts: Blend, rows: int, k: int, fast: bool, orders: Orders, need_logits: bool
) -> tuple[Launch, Launch]:
    constants = (*parts.constants(fast), *orders, need_logits, rows > 1, *tiles.constants)
    sweep = Launch(_store_gradients, tiles.grid, (*tiles.sizes, k), constants)
    numbers = (0, parts.alive, 0, *tiles.parts(tiles.channels), rows, *tiles.parts(rows), k)
    return sweep, Launch(kernels.finish_backward, (rows,), numbers, (*parts.constants(fast), 0, 1024))


@triton.jit(do_not_specialize=["outer"], do_not_specialize_on_alignment=["weights_ptr"])
def _store_blend(
    h_ptr, weights_ptr, out_ptr, numel, outer, channels, inner, k,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr, N: tl.constexpr,
    BY_CHANNEL: tl.constexpr, LAST: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store B_N, the blend of the slopes or of the second derivatives."""
    channel, column, inside = columns(tl.program_id(0), channels, inner, LAST, BLOCK_J)
    weights = coefficients(weights_ptr, channel, inside, k, BASIS, FORMS, BY_CHANNEL)
    for row_tile in tl.range(tl.program_id(1), tl.cdiv(outer, BLOCK_A), tl.num_programs(1), num_stages=STAGES):
        offset, mask = places(row_tile, column, inside, numel, outer, channels, inner, BLOCK_A)
        h = load(h_ptr, offset, mask, EVEN)
        total = tl.zeros_like(h)
        for b in tl.static_range(len(BASIS)):
            if N == 1:
                _value, slope = evaluated(h, BASIS[b], FAST)
                total += weighted_slope(weights[b], slope, BASIS[b])
            else:
                second, _third = second_and_third(h, BASIS[b])
                total += weights[b] * second
        store(out_ptr, offset, total, mask, EVEN)


@triton.jit(do_not_specialize=["outer"], do_not_specialize_on_alignment=["weights_ptr"])
def _store_gradients(
    h_ptr, weights_ptr, delta_0_ptr, delta_1_ptr, delta_2_ptr, to_h_ptr, partials_ptr,
    numel, outer, channels, inner, k,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr,
    HAS_0: tl.constexpr, HAS_1: tl.constexpr, HAS_2: tl.constexpr, NEED_LOGITS: tl.constexpr,
    BY_CHANNEL: tl.constexpr, LAST: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store Σ_n δ_n·B_{n+1}, and partial sums of the inner products Σ_n ⟨δ_n, σ⁽ⁿ⁾(h)⟩."""
    channel, column, inside = columns(tl.program_id(0), channels, inner, LAST, BLOCK_J)
    weights = coefficients(weights_ptr, channel, inside, k, BASIS, FORMS, BY_CHANNEL)
    sums = zeros(len(BASIS) if NEED_LOGITS else 0, BLOCK_A, BLOCK_J)
    for row_tile in tl.range(tl.program_id(1), tl.cdiv(outer, BLOCK_A), tl.num_programs(1), num_stages=STAGES):
        offset, mask = places(row_tile, column, inside, numel, outer, channels, inner, BLOCK_A)
        h = load(h_ptr, offset, mask, EVEN)
        delta_0 = load(delta_0_ptr, offset, mask, EVEN) if HAS_0 else tl.zeros_like(h)
        delta_1 = load(delta_1_ptr, offset, mask, EVEN) if HAS_1 else tl.zeros_like(h)
        delta_2 = load(delta_2_ptr, offset, mask, EVEN) if HAS_2 else tl.zeros_like(h)
        gradient = tl.zeros_like(h)
        updated = ()
        for b in tl.static_range(len(BASIS)):
            inner_product = tl.zeros_like(h)
            value, slope = evaluated(h, BASIS[b], FAST)
            second, third = second_and_third(h, BASIS[b])
            if HAS_0:
                gradient += delta_0 * weighted_slope(weights[b], slope, BASIS[b])
                inner_product += delta_0 * value
            if HAS_1:
                gradient += delta_1 * (weights[b] * second)
                inner_product += delta_1 * slope
            if HAS_2:
                gradient += delta_2 * (weights[b] * third)
                inner_product += delta_2 * second
            if NEED_LOGITS:
                updated = updated + (sums[b] + inner_product,)
        if NEED_LOGITS:
            sums = updated
        store(to_h_ptr, offset, gradient, mask, EVEN)
    for i in tl.static_range(len(sums)):
        store_sum(partials_ptr, sums[i], i, len(sums), channel, inside, channels, LAST, BY_CHANNEL)
