"""Triton kernels of the higher derivatives of the routed activation; see `flexact.ops.higher_order`.

B_n is the blend of the candidates' n-th derivatives. Sums are partial sums, as in `kernels`, and reduced by
`kernels.finish_backward`.
"""

import triton
import triton.language as tl

from flexact.ops.triton.basis import coefficients
from flexact.ops.triton.basis_functions import evaluated, weighted_slope
from flexact.ops.triton.higher_functions import second_and_third
from flexact.ops.triton.tiles import STAGES, columns, load, places, store, store_sum, zeros


@triton.jit(do_not_specialize=["outer"], do_not_specialize_on_alignment=["weights_ptr"])
def blend(
    h_ptr, weights_ptr, out_ptr, numel, outer, channels, inner, k,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr, MANY: tl.constexpr, N: tl.constexpr,
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
def gradients(
    h_ptr, weights_ptr, delta_0_ptr, delta_1_ptr, delta_2_ptr, to_h_ptr, partials_ptr,
    numel, outer, channels, inner, k,
    BASIS: tl.constexpr, FORMS: tl.constexpr, FAST: tl.constexpr, MANY: tl.constexpr,
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
