"""How the kernels split a tensor into tiles.

In memory, every dense tensor is (outer, channels, inner): a channels-last one has inner = 1, a contiguous one
inner = height·width. Where channels do not matter, it is split into rows of a tile's width. A program processes
every n-th tile of one column of tiles, where n is the number of programs per column. It stores partial sums, which a
second kernel reduces in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import triton
import triton.language as tl
from torch import Tensor

MOST_PLANS = 256
"""Maximum number of cached plans per tensor size."""

Plan = TypeVar("Plan")


@dataclass(frozen=True, eq=False)
class Cut:
    """Launch parameters of a kind of kernel. The instances below are compared by identity."""

    tile: int
    """Elements per tile."""
    programs: int
    """Approximate number of programs: enough to fill a GPU, and few enough to keep the number of partial sums small."""


STAGES = tl.constexpr(4)
"""Pipeline stages: the next tiles are loaded while one is computed. Tuned on an H200, as are the cuts."""
FLAT = Cut(1024, 132 * 4)
FEW_SUMS = Cut(1024, 132 * 3)
MANY_SUMS = Cut(1024, 132 * 2)
MOMENTS = Cut(2048, 132 * 2)


class Tiles:
    """How one tensor is split into tiles, with sums over the whole tensor or per channel.

    last: whether the channels are the contiguous dimension.
    programs: approximate number of programs.
    """

    def __init__(
        self, numel: int, outer: int, channels: int, inner: int, last: bool, block_a: int, block_j: int, programs: int
    ) -> None:
        self.sizes = self.numel, self.outer, self.channels, self.inner = numel, outer, channels, inner
        self.last, self.block_a, self.block_j = last, block_a, block_j
        width = channels if last else inner
        self.columns = triton.cdiv(width, block_j) * (1 if last else channels)  # of tiles
        self.splits = max(1, min(triton.cdiv(outer, block_a), programs // self.columns))  # programs per column
        self.grid = self.columns, self.splits
        # Whether the tiles cover the tensor exactly, so that no mask is needed.
        self.even = outer * channels * inner == numel and outer % block_a == 0 and width % block_j == 0
        # Compile-time constants in the order in which every kernel takes them.
        self.constants = last, block_a, block_j, self.even
        # A momentum that changes every step adds a plan each time.
        self._plan = functools.lru_cache(MOST_PLANS)(lambda make, *choices: make(self, *choices))

    def plan(self, make: Callable[..., Plan], *choices: Any) -> Plan:
        """Return `make(self, *choices)`, cached."""
        try:
            plan: Plan = self._plan(make, *choices)
        except TypeError:  # a symbolic number of torch.compile is not hashable
            return make(self, *choices)
        return plan

    def room(self, count: int) -> int:
        """Return the buffer size for `count` partial sums per program and channel."""
        return self.splits * (self.channels if self.last else self.columns) * count

    def parts(self, rows: int) -> tuple[int, int]:
        """Return (parts, per_row), the numbers of partial sums per row that `add_up` takes."""
        if rows == 1:
            return self.splits * self.columns, 1
        return self.splits, 1 if self.last else self.columns // self.channels


def flat(h: Tensor, cut: Cut) -> Tiles:
    """Return the tiles of a dense tensor whose channels do not matter."""
    numel = h.numel()
    return (_flat if isinstance(numel, int) else _flat.__wrapped__)(numel, cut)  # a symbolic number is not hashable


def by_channel(h: Tensor, channel_dim: int, cut: Cut) -> Tiles:
    """Return the tiles of a dense tensor with sums per channel; its dimensions may have any order in memory."""
    numel, channels = h.numel(), h.shape[channel_dim]
    make = _by_channel if isinstance(numel, int) else _by_channel.__wrapped__
    return make(numel, channels, h.stride(channel_dim) if channels > 1 else numel, cut)


@functools.lru_cache(maxsize=1024)
def _flat(numel: int, cut: Cut) -> Tiles:
    width = min(cut.tile, 1024)
    return Tiles(numel, triton.cdiv(numel, width), 1, width, False, cut.tile // width, width, cut.programs)


@functools.lru_cache(maxsize=1024)
def _by_channel(numel: int, channels: int, inner: int, cut: Cut) -> Tiles:
    outer = numel // (channels * inner)
    last = inner == 1
    width = channels if last else inner
    block_j = _power_of_2(width, 64 if last else min(cut.tile, 1024))
    block_a = _power_of_2(outer, max(1, cut.tile // block_j))
    return Tiles(numel, outer, channels, inner, last, block_a, block_j, cut.programs)


def _power_of_2(size: int, most: int) -> int:
    """Return a size rounded up to a power of 2, or `most`. A symbolic size stays symbolic if it is at least `most`."""
    return most if size >= most else triton.next_power_of_2(int(size))


@triton.jit
def columns(tile, channels, inner, LAST: tl.constexpr, BLOCK_J: tl.constexpr):
    """Return the channel of each element in a row of a tile, its offset, and a mask of those inside the tensor."""
    j = tl.arange(0, BLOCK_J)
    if LAST:
        channel = tile * BLOCK_J + j
        return channel, channel, channel < channels
    else:
        per_channel = tl.cdiv(inner, BLOCK_J)
        channel = tile // per_channel + tl.zeros_like(j)
        place = (tile % per_channel) * BLOCK_J + j
        return channel, channel.to(tl.int64) * inner + place, place < inner


@triton.jit
def places(row_tile, column, inside, numel, outer, channels, inner, BLOCK_A: tl.constexpr):
    """Return the offsets of a tile's elements, and a mask of those inside the tensor."""
    a = tl.cast(row_tile, tl.int64) * BLOCK_A + tl.arange(0, BLOCK_A)
    offset = a[:, None] * channels * inner + column[None, :]
    return offset, (a < outer)[:, None] & inside[None, :] & (offset < numel)


@triton.jit
def load(pointer, offset, mask, EVEN: tl.constexpr):
    """Return a tile in float32, with 0 outside the mask."""
    if EVEN:
        return tl.load(pointer + offset).to(tl.float32)
    else:
        return tl.load(pointer + offset, mask, other=0.0).to(tl.float32)


@triton.jit
def store(pointer, offset, values, mask, EVEN: tl.constexpr):
    """Store a tile."""
    if EVEN:
        tl.store(pointer + offset, values)
    else:
        tl.store(pointer + offset, values, mask)


@triton.jit
def zeros(count: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr):
    """Return `count` accumulators, each a tile of zeros."""
    accumulators = ()
    for _ in tl.static_range(count):
        accumulators = accumulators + (tl.zeros([BLOCK_A, BLOCK_J], tl.float32),)
    return accumulators


@triton.jit
def narrow_zeros(count: tl.constexpr, pointer, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr):
    """Return `count` accumulators for the sums of those elements in a row of a tile that a thread loads at once."""
    loaded: tl.constexpr = 128 // pointer.dtype.element_ty.primitive_bitwidth
    width: tl.constexpr = BLOCK_J // loaded if loaded < BLOCK_J else 1
    return zeros(count, BLOCK_A, width)


@triton.jit
def plus(total, values):
    """Add a tile to an accumulator."""
    if total.shape[1] < values.shape[1]:
        shape: tl.constexpr = (total.shape[0], total.shape[1], values.shape[1] // total.shape[1])
        return total + tl.sum(tl.reshape(values, shape), axis=2)
    else:
        return total + values


@triton.jit
def store_sum(partials_ptr, total, i, count, channel, inside, channels, LAST: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Store partial sum i of `count`, for this program or for each of its channels."""
    tile, split = tl.program_id(0), tl.program_id(1)
    if LAST and BY_CHANNEL:
        tl.store(partials_ptr + (split * channels + channel) * count + i, tl.sum(total, axis=0), inside)
    else:
        program = split * tl.num_programs(0) + tile
        tl.store(partials_ptr + program * count + i, tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit
def store_sums(partials_ptr, sums, channel, inside, channels, LAST: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Store all partial sums as `store_sum` does, with one reduction for all instead of one for each."""
    count: tl.constexpr = len(sums)
    levels: tl.constexpr = 4 if count <= 16 else 5
    joined = sums
    for _ in tl.static_range(2**levels - count):
        joined = joined + (tl.zeros_like(sums[0]),)
    for _ in tl.static_range(levels):
        pairs = ()
        for i in tl.static_range(len(joined) // 2):
            pairs = pairs + (tl.join(joined[i], joined[len(joined) // 2 + i]),)
        joined = pairs
    i = tl.arange(0, 2**levels)
    tile, split = tl.program_id(0), tl.program_id(1)
    if LAST and BY_CHANNEL:
        total = tl.reshape(tl.sum(joined[0], axis=0), [sums[0].shape[1], 2**levels])
        place = (split * channels + channel)[:, None] * count + i[None, :]
        tl.store(partials_ptr + place, total, inside[:, None] & (i < count)[None, :])
    else:
        total = tl.reshape(tl.sum(tl.sum(joined[0], axis=1), axis=0), [2**levels])
        tl.store(partials_ptr + (split * tl.num_programs(0) + tile) * count + i, total, i < count)


@triton.jit
def add_up(partials_ptr, i, count, row, rows, parts, per_row, BLOCK: tl.constexpr):
    """Return sum i of a row: the total of its partial sums, which are stored as (parts, rows, per_row)."""
    total = tl.zeros([BLOCK], tl.float32)
    start = 0
    while start < parts * per_row:
        part, mask = part_of(start, row, rows, parts, per_row, BLOCK)
        total += tl.load(partials_ptr + part * count + i, mask, other=0.0)
        start += BLOCK
    return tl.sum(total)


@triton.jit
def add_up_all(partials_ptr, COUNT: tl.constexpr, row, rows, parts, per_row, BLOCK: tl.constexpr):
    """Return all sums of a row, padded with zeros to 16 or 32 of them: `add_up` with one reduction for all."""
    width: tl.constexpr = 16 if COUNT <= 16 else 32
    i = tl.arange(0, width)
    total = tl.zeros([BLOCK, width], tl.float32)
    start = 0
    while start < parts * per_row:
        part, mask = part_of(start, row, rows, parts, per_row, BLOCK)
        total += tl.load(partials_ptr + part[:, None] * COUNT + i[None, :], mask[:, None] & (i < COUNT), other=0.0)
        start += BLOCK
    return tl.sum(total, axis=0)


@triton.jit
def part_of(start, row, rows, parts, per_row, BLOCK: tl.constexpr):
    """Return the indexes of BLOCK partial sums of a row, from number `start` on, and a mask of those that exist."""
    n = start + tl.arange(0, BLOCK)
    return ((n // per_row) * rows + row) * per_row + n % per_row, n < parts * per_row
