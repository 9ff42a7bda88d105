"""Tests of how the kernels tile a tensor: every element is visited once, also where offsets need 64 bits."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from flexact.ops.triton.tiles import Cut, Tiles, by_channel, columns, flat, places


@triton.jit(do_not_specialize=["tile", "row_tile"])  # a 1 would become a constant, which a program's number is not
def _visit(
    found_ptr, tile, row_tile, numel, outer, channels, inner,
    LAST: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Writes the offset of each element of a tile, −1 where there is none, and then the channels of its columns."""
    channel, column, inside = columns(tile, channels, inner, LAST, BLOCK_J)
    offset, mask = places(row_tile, column, inside, numel, outer, channels, inner, BLOCK_A)
    j = tl.arange(0, BLOCK_J)
    tl.store(found_ptr + tl.arange(0, BLOCK_A)[:, None] * BLOCK_J + j[None, :], tl.where(mask, offset, -1))
    tl.store(found_ptr + BLOCK_A * BLOCK_J + j, channel.to(tl.int64))


def visited(walk: Tiles, tile: int, row_tile: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the offsets (rows, columns) and the channels (columns,) of a tile."""
    found = torch.empty(walk.block_a + 1, walk.block_j, dtype=torch.int64, device=device)
    _visit[(1,)](found, tile, row_tile, *walk.sizes, walk.last, walk.block_a, walk.block_j)
    return found[:-1].cpu(), found[-1].cpu()


def expected(walk: Tiles, tile: int, row_tile: int) -> tuple[Tensor, Tensor]:
    """Computes the same with Python integers."""
    per_channel = 1 if walk.last else -(-walk.inner // walk.block_j)
    j = torch.arange(walk.block_j)
    channel = tile * walk.block_j + j if walk.last else torch.full_like(j, tile // per_channel)
    place = torch.zeros_like(j) if walk.last else tile % per_channel * walk.block_j + j
    a = row_tile * walk.block_a + torch.arange(walk.block_a)
    offset = (a[:, None] * walk.channels + channel) * walk.inner + place
    inside = (a < walk.outer)[:, None] & (channel < walk.channels) & (place < walk.inner) & (offset < walk.numel)
    return offset.where(inside, -1), channel


CUT = Cut(1024, 528)

TENSORS = {
    "contiguous": lambda: torch.empty(3, 4, 5, 7),
    "channels last": lambda: torch.empty(3, 4, 5, 7).to(memory_format=torch.channels_last),
    "features": lambda: torch.empty(33, 70),
    "transposed": lambda: torch.empty(4, 3, 5).transpose(0, 1),
    "wide": lambda: torch.empty(2, 2, 1030),
    "one channel": lambda: torch.empty(3, 1, 5),
    "one sample": lambda: torch.empty(1, 6),
}


@pytest.mark.parametrize("by_layer", [True, False], ids=["layer", "channel"])
@pytest.mark.parametrize("layout", TENSORS)
def test_every_element_is_visited_once_and_knows_its_channel(layout: str, by_layer: bool, device: torch.device) -> None:
    h = TENSORS[layout]()
    walk = flat(h, CUT) if by_layer else by_channel(h, 1, CUT)
    channel_of = torch.arange(h.shape[1]).view(1, -1, *(1,) * (h.dim() - 2)).expand(h.shape)
    channel_at = torch.empty_like(h, dtype=torch.int64).copy_(channel_of).as_strided((h.numel(),), (1,))
    seen = []
    for tile in range(walk.columns):
        for row_tile in range(triton.cdiv(walk.outer, walk.block_a)):
            offset, channel = visited(walk, tile, row_tile, device)
            there = offset >= 0
            seen.append(offset[there])
            if not by_layer:
                assert torch.equal(channel_at[offset[there]], channel.expand_as(offset)[there])
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(h.numel()))


@pytest.mark.parametrize("layout", TENSORS)
def test_tiles_are_even_if_none_exceeds_the_tensor(layout: str, device: torch.device) -> None:
    h = TENSORS[layout]()
    for walk in (flat(h, CUT), by_channel(h, 1, CUT)):
        last = walk.columns - 1, triton.cdiv(walk.outer, walk.block_a) - 1
        assert walk.even == bool((visited(walk, *last, device)[0] >= 0).all())


LARGE = {
    "rows of a flat one": Tiles(5 * 2**31 + 3, 5 * 2**21 + 1, 1, 1024, False, 2, 1024, 528),
    "samples": Tiles(3 * 2**30, 3, 4, 2**28, False, 1, 1024, 528),
    "a channel": Tiles(2**33, 1, 1, 2**33, False, 1, 1024, 528),
}
TOO_LARGE = {
    "the channels of a sample": Tiles(2**32, 1, 4, 2**30, False, 1, 1024, 528),
    "a sample": Tiles(2**33, 2, 8, 2**29, False, 2, 1024, 528),
    "rows, channels last": Tiles(2**33, 2**32, 2, 1, True, 16, 2, 528),
}
"""Products of two numbers under 2³¹ are taken in 32 bits there."""


@pytest.mark.parametrize(
    "walk",
    [
        *(pytest.param(walk, id=name) for name, walk in LARGE.items()),
        *(pytest.param(walk, id=name) for name, walk in TOO_LARGE.items()),
    ],
)
def test_offsets_beyond_32_bits(walk: Tiles, device: torch.device) -> None:
    last = walk.columns - 1, triton.cdiv(walk.outer, walk.block_a) - 1
    assert torch.equal(visited(walk, *last, device)[0], expected(walk, *last)[0])
    assert int(expected(walk, *last)[0].max()) == walk.numel - 1
