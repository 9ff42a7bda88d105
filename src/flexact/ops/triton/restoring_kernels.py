"""Triton kernels with which a site computes its input again from what a batch norm saved."""

import triton
import triton.language as tl

from flexact.ops.triton.tiles import STAGES, columns, load, places, store


@triton.jit(do_not_specialize_on_alignment=["mean_ptr", "rstd_ptr", "weight_ptr", "bias_ptr"])
def copy(mean_ptr, rstd_ptr, weight_ptr, bias_ptr, copied_ptr, channels, BLOCK: tl.constexpr):
    """Store the mean, 1/√(variance + ε), the weight and the bias of a batch norm, one after the other."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    tl.store(copied_ptr + channel, tl.load(mean_ptr + channel, inside), inside)
    tl.store(copied_ptr + channels + channel, tl.load(rstd_ptr + channel, inside), inside)
    tl.store(copied_ptr + 2 * channels + channel, tl.load(weight_ptr + channel, inside).to(tl.float32), inside)
    tl.store(copied_ptr + 3 * channels + channel, tl.load(bias_ptr + channel, inside).to(tl.float32), inside)


@triton.jit(do_not_specialize=["outer"])
def restore(
    y_ptr, copied_ptr, h_ptr, numel, outer, channels, inner,
    LAST: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Store h = (y − mean)·rstd·weight + bias, in the order of arithmetic of torch's own kernels for GPUs."""
    channel, column, inside = columns(tl.program_id(0), channels, inner, LAST, BLOCK_J)
    mean = tl.load(copied_ptr + channel, inside, other=0.0)[None, :]
    rstd = tl.load(copied_ptr + channels + channel, inside, other=0.0)[None, :]
    weight = tl.load(copied_ptr + 2 * channels + channel, inside, other=0.0)[None, :]
    bias = tl.load(copied_ptr + 3 * channels + channel, inside, other=0.0)[None, :]
    for row_tile in tl.range(tl.program_id(1), tl.cdiv(outer, BLOCK_A), tl.num_programs(1), num_stages=STAGES):
        offset, mask = places(row_tile, column, inside, numel, outer, channels, inner, BLOCK_A)
        y = load(y_ptr, offset, mask, EVEN)
        store(h_ptr, offset, weight * (y - mean) * rstd + bias, mask, EVEN)
