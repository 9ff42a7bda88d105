"""How the kernels walk over a tensor.

Every dense tensor is, in its memory, (outer, channels, inner): a channels-last one has inner = 1, a contiguous one
inner = height·width; where channels do not matter it is rows of a tile's length. A program takes one tile of columns
and every so-manieth tile of rows, and leaves partial sums behind, which are added up in a fixed order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4
MOST_PLANS = 256
"""That are kept for tensors of one size."""

Plan = TypeVar("Plan")


@dataclass(frozen=True, eq=False)
class Cut:
    """How a tensor is cut up; there are the few below, known by identity."""

    tile: int
    """Elements a tile."""
    programs: int
    """About how many programs a launch has: so many that a card is filled, and so few that the partial sums are."""


STAGES = tl.constexpr(4)
"""Tiles that a program has under way at once: loads of the next ones go on while one is computed. Measured on an H200,
as are the cuts."""
FLAT = Cut(1024, 132 * 4)
FEW_SUMS = Cut(1024, 132 * 3)
MANY_SUMS = Cut(1024, 132 * 2)
MOMENTS = Cut(2048, 132 * 2)


@dataclass(frozen=True, eq=False)
class Tiles:
    """How one tensor is walked over. By channel, sums are kept apart for each channel."""

    numel: int
    outer: int
    channels: int
    inner: int
    last: bool
    """Whether the channels are the contiguous dimension."""
    block_a: int
    block_j: int
    programs: int
    _plans: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)

    def plan(self, make: Callable[..., Plan], *choices: Any) -> Plan:
        """What is prepared for walks like this one: `make` of these tiles and choices, made once."""
        try:
            found: Plan | None = self._plans.get((make, choices))
        except TypeError:  # a compiler's symbol has no hash
            return make(self, *choices)
        if found is None:
            if len(self._plans) >= MOST_PLANS:  # a momentum that changes from step to step makes one each
                self._plans.clear()
            found = self._plans[make, choices] = make(self, *choices)
        return found

    @cached_property
    def columns(self) -> int:
        """Tiles side by side."""
        if self.last:
            return triton.cdiv(self.channels, self.block_j)
        return self.channels * triton.cdiv(self.inner, self.block_j)

    @cached_property
    def splits(self) -> int:
        """Programs that share a column of tiles."""
        return max(1, min(triton.cdiv(self.outer, self.block_a), self.programs // self.columns))

    @cached_property
    def grid(self) -> tuple[int, int]:
        return self.columns, self.splits

    @cached_property
    def even(self) -> bool:
        """Whether no tile hangs over the edge."""
        width = self.channels if self.last else self.inner
        whole = self.outer * self.channels * self.inner == self.numel
        return whole and self.outer % self.block_a == 0 and width % self.block_j == 0

    def room(self, count: int) -> int:
        """Numbers in `count` partial sums of every program, and of every channel of it."""
        return self.splits * (self.channels if self.last else self.columns) * count

    def parts(self, rows: int) -> tuple[int, int]:
        """Of how many parts a row's sum consists: (parts, per_row), as `add_up` takes them."""
        if rows == 1:
            return self.splits * self.columns, 1
        return self.splits, 1 if self.last else self.columns // self.channels

    @cached_property
    def constants(self) -> tuple[bool, int, int, bool]:
        """In the order in which every kernel takes them."""
        return self.last, self.block_a, self.block_j, self.even

    @cached_property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.numel, self.outer, self.channels, self.inner


def flat(h: Tensor, cut: Cut) -> Tiles:
    """A dense tensor whose channels do not matter."""
    numel = h.numel()
    return (_flat if isinstance(numel, int) else _flat.__wrapped__)(numel, cut)  # a compiler's symbol has no hash


def by_channel(h: Tensor, channel_dim: int, cut: Cut) -> Tiles:
    """A dense tensor in any order of its dimensions."""
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
    """The smallest power of 2 that is not under a size, up to `most`; a compiler's symbol is only compared with it."""
    return most if size >= most else triton.next_power_of_2(int(size))


def dense(h: Tensor) -> Tensor:
    """h itself where its elements fill its memory without gaps, in any order; otherwise a copy."""
    return h if torch.ops.aten.is_non_overlapping_and_dense(h) else h.clone(memory_format=torch.contiguous_format)


@triton.jit
def columns(tile, channels, inner, LAST: tl.constexpr, BLOCK_J: tl.constexpr):
    """The channel of each column of a tile, its place in a row, and whether there is one."""
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
    """Where the elements of a tile are, and whether they are there."""
    a = tl.cast(row_tile, tl.int64) * BLOCK_A + tl.arange(0, BLOCK_A)
    offset = a[:, None] * channels * inner + column[None, :]
    return offset, (a < outer)[:, None] & inside[None, :] & (offset < numel)


@triton.jit
def load(pointer, offset, mask, EVEN: tl.constexpr):
    """A tile in float32, 0 where there is nothing."""
    if EVEN:
        return tl.load(pointer + offset).to(tl.float32)
    else:
        return tl.load(pointer + offset, mask, other=0.0).to(tl.float32)


@triton.jit
def store(pointer, offset, values, mask, EVEN: tl.constexpr):
    """Leave a tile behind."""
    if EVEN:
        tl.store(pointer + offset, values)
    else:
        tl.store(pointer + offset, values, mask)


@triton.jit
def zeros(count: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr):
    """Accumulators, one a sum."""
    found = ()
    for _ in tl.static_range(count):
        found = found + (tl.zeros([BLOCK_A, BLOCK_J], tl.float32),)
    return found


@triton.jit
def store_sum(partials_ptr, total, i, count, channel, inside, channels, LAST: tl.constexpr, BY_CHANNEL: tl.constexpr):
    """Leave sum number i of `count` behind, of this program or of each of its channels."""
    tile, split = tl.program_id(0), tl.program_id(1)
    if LAST and BY_CHANNEL:
        tl.store(partials_ptr + (split * channels + channel) * count + i, tl.sum(total, axis=0), inside)
    else:
        place = split * tl.num_programs(0) + tile
        tl.store(partials_ptr + place * count + i, tl.sum(tl.sum(total, axis=1), axis=0))


@triton.jit
def add_up(partials_ptr, i, count, row, rows, parts, per_row, BLOCK: tl.constexpr):
    """Sum number i of a row, over the (parts, rows, per_row) programs that left a part of it."""
    total = tl.zeros([BLOCK], tl.float32)
    start = 0
    while start < parts * per_row:
        part, is_there = part_of(start, row, rows, parts, per_row, BLOCK)
        total += tl.load(partials_ptr + part * count + i, is_there, other=0.0)
        start += BLOCK
    return tl.sum(total)


@triton.jit
def part_of(start, row, rows, parts, per_row, BLOCK: tl.constexpr):
    """Which of the (parts, rows, per_row) programs left the parts of a row from number `start` on, and whether there
    are so many."""
    n = start + tl.arange(0, BLOCK)
    return ((n // per_row) * rows + row) * per_row + n % per_row, n < parts * per_row
