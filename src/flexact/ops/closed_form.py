"""The routed activation in closed form: nothing is saved but the input, and one sweep does each direction.

The tensor is swept in blocks that stay in the processor's cache while every candidate is evaluated on them, so memory
is read and written once however many candidates there are. Half precision is computed in float32. All sums are taken
block by block in a fixed order: the same result every run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flexact.candidates import Candidate, lookup

BLOCK = 1 << 17
"""Elements a block on a CPU: measured best of 2^14 to 2^20 (benchmarks/op_cpu.py); 512 KiB a temporary."""

SENSITIVITY, DEVIATION = 1, 2
"""Flags: which statistics the forward sweep gathers."""


def forward(
    h: Tensor, weights: Tensor, keys: Sequence[str], alive: Sequence[int], channel_dim: int, statistics: int
) -> tuple[Tensor, Tensor]:
    """x = Σ_k w_k σ_k(h), and (2, rows, K): mean |σ_k′(h)| and mean (σ_k(h) − x)², zeros where not asked for."""
    h = _dense(h)
    x = torch.empty_like(h)
    sweep = _Sweep(h, weights, keys, alive, channel_dim)
    sums = sweep.zeros(2)
    for block_h, block_x in sweep.blocks(h, x):
        source = block_h.to(sweep.dtype)
        mixed: Tensor | None = None
        values: dict[int, Tensor] = {}
        for k, candidate, weight in sweep.candidates:
            if statistics == 0 and isinstance(weight, float) and weight == 0:
                continue
            values[k] = value = candidate.function(source)
            if statistics & SENSITIVITY:
                sums[0, :, k] += sweep.total(candidate.derivative(source, value).abs_())
            term = value * weight
            mixed = term if mixed is None else mixed.add_(term)
        block_x.copy_(0 * source if mixed is None else mixed)
        if statistics & DEVIATION and mixed is not None:
            for k, value in values.items():
                sums[1, :, k] += sweep.total((value - mixed).square_())
    return x, (sums / max(h.numel() // weights.shape[0], 1)).to(weights.dtype)


def backward(
    delta: Tensor,
    h: Tensor,
    weights: Tensor,
    keys: Sequence[str],
    alive: Sequence[int],
    channel_dim: int,
    need_inner: bool,
) -> tuple[Tensor, Tensor]:
    """δ·Σ_k w_k σ_k′(h), and the inner products ⟨δ, σ_k(h)⟩ as (rows, K), zeros where they are not needed."""
    h = _dense(h)
    delta = delta if delta.stride() == h.stride() else torch.empty_like(h).copy_(delta)
    gradient = torch.empty_like(h)
    sweep = _Sweep(h, weights, keys, alive, channel_dim)
    inner = sweep.zeros(1)[0]
    for block_h, block_delta, block_gradient in sweep.blocks(h, delta, gradient):
        source, upstream = block_h.to(sweep.dtype), block_delta.to(sweep.dtype)
        slope: Tensor | None = None
        for k, candidate, weight in sweep.candidates:
            unused = isinstance(weight, float) and weight == 0
            if unused and not need_inner:
                continue
            value = candidate.function(source)
            if need_inner:
                inner[:, k] += sweep.inner(upstream, value)
            if not unused:
                term = candidate.derivative(source, value) * weight
                slope = term if slope is None else slope.add_(term)
        block_gradient.copy_(0 * upstream if slope is None else slope.mul_(upstream))
    return gradient, inner.to(weights.dtype)


class _Sweep:
    """How a tensor is cut into blocks, and how sums over a block are taken: for the layer, or for each channel."""

    def __init__(self, h: Tensor, weights: Tensor, keys: Sequence[str], alive: Sequence[int], channel_dim: int) -> None:
        self.rows, self.k = weights.shape
        self.device = h.device
        self.dtype = torch.float64 if h.dtype == torch.float64 else torch.float32
        self.by_layer = self.rows == 1
        self.channel_dim = channel_dim % h.dim() if h.dim() else 0
        self.other_dims = [dim for dim in range(h.dim()) if dim != self.channel_dim]
        self.candidates = self._with_weights(h, weights, [(k, lookup(keys[k])) for k in alive])

    def _with_weights(
        self, h: Tensor, weights: Tensor, candidates: list[tuple[int, Candidate]]
    ) -> list[tuple[int, Candidate, Tensor | float]]:
        if self.by_layer and h.device.type == "cpu":  # numbers are the fastest there, and reading them costs nothing
            numbers = weights[0].tolist()
            return [(k, candidate, numbers[k]) for k, candidate in candidates]
        shape = [1] * h.dim()
        if not self.by_layer:
            shape[self.channel_dim] = self.rows
        return [(k, candidate, weights[:, k].to(self.dtype).reshape(shape)) for k, candidate in candidates]

    def blocks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Matching pieces of tensors that share one dense layout."""
        size = tensors[0].numel()
        if size == 0:
            return
        if self.by_layer:
            flat = [tensor.as_strided((size,), (1,)) for tensor in tensors]
            length = BLOCK if self.device.type == "cpu" else size
            yield from zip(*(torch.split(tensor, length) for tensor in flat), strict=True)
        else:
            split_dim = self.other_dims[0] if self.other_dims else 0
            count = tensors[0].shape[split_dim]
            length = max(1, BLOCK * count // size) if self.other_dims and self.device.type == "cpu" else count
            yield from zip(*(torch.split(tensor, length, split_dim) for tensor in tensors), strict=True)

    def zeros(self, count: int) -> Tensor:
        return torch.zeros(count, self.rows, self.k, dtype=torch.float64, device=self.device)

    def total(self, values: Tensor) -> Tensor:
        return values.sum() if self.by_layer else values.sum(self.other_dims) if self.other_dims else values

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.dot(left, right) if self.by_layer else self.total(left * right)


def _dense(h: Tensor) -> Tensor:
    """h itself where its elements fill its memory without gaps, in any order; otherwise a copy."""
    expected = 1
    for stride, size in sorted(zip(h.stride(), h.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return h.contiguous()
        expected *= size
    return h
