"""The routed activation in closed form, in plain torch.

Tensors are processed in blocks that stay in the CPU's cache while every candidate is evaluated on them. Half precision
is computed in float32. Sums are taken block by block in a fixed order, so results are deterministic.

The gradients need the values of the candidates and their blended slope. A forward can keep both, in up to K + 1 tensors
of the size of the input, and the backward then only multiplies. Otherwise the backward recomputes them; the results
are bit-identical.

On a GPU, where every operation is a kernel launch, the candidates are stacked instead, so that the blend, its slope and
the sums take a few launches together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexact.candidates.registry import lookup
from flexact.ops import shared_sigmoid
from flexact.ops.blending import Blending

BLOCK = 1 << 17
"""Elements per block and CPU thread (512 KiB): the fastest of 2^14 to 2^20 in benchmarks/op_cpu.py."""
MOST_KEPT = 1 << 19
"""Maximum number of elements of a CPU tensor for which the values are kept (2 MiB per candidate in float32). For larger
tensors, storing and loading the values takes longer than recomputing them."""
SHARED_FROM = 1 << 14
"""Minimum number of elements of a CPU tensor for which candidates share a sigmoid; smaller ones have more overhead."""

CHEAP = frozenset({"relu", "leaky_relu", "identity", "relu6", "hardtanh", "hardswish"})
"""The candidates whose values are never kept, because recomputing them takes no longer than loading them."""

Function = Callable[[Tensor], Tensor]
Derivative = Callable[[Tensor, Tensor], Tensor]


def stacks(h: Tensor) -> bool:
    """Return whether candidates are stacked rather than added one by one, so that no weight is read on the host."""
    return h.device.type != "cpu"


def forward(h: Tensor, blending: Blending, kept: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return x = Σ_k w_k σ_k(h) and the sensitivities mean |σ_k′(h)|, (rows, K), empty without statistics.

    kept: a list to which the blended slope and the values of each block are appended, for `backward`. On a CPU it
    stays empty if h is larger than MOST_KEPT.
    """
    h, weights, statistics = dense(h), blending.weights, blending.statistics
    if h.device.type == "cpu" and h.numel() > MOST_KEPT:
        kept = None
    x = torch.empty_like(h)
    sweep = Sweep(h, blending)
    if sweep.stacks:
        return x, _forward_stacked(h, x, sweep, kept)
    sums: list[list[Tensor]] = []
    for block_h, block_x in sweep.blocks(h, x):
        source, mixed = block_h.to(sweep.dtype), block_x.to(sweep.dtype).zero_()  # copies in half precision only
        slope = None if kept is None else torch.zeros_like(source)
        values, totals = [], []
        for function, derivative, weight in sweep.functions(source):
            if slope is None and not statistics and _is_zero(weight):
                continue
            value = function(source)
            sweep.add(mixed, value, weight)
            if slope is None and not statistics:
                continue
            own_slope = derivative(source, value)
            if slope is not None:
                sweep.add(slope, own_slope, weight)
                values.append(value)
            if statistics:
                totals.append(sweep.total(own_slope.abs()))
        if mixed is not block_x:
            block_x.copy_(mixed)
        if kept is not None and slope is not None:
            kept += [slope, *sweep.without_cheap(values)]
        sums.append(totals)
    if not statistics:
        return x, weights.new_empty(0)
    return x, sweep.table(sums, h.numel() // weights.shape[0])


def backward(
    delta: Tensor, h: Tensor, blending: Blending, need_logits: bool, kept: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """Return the gradients w.r.t. h, δ·Σ_k w_k σ_k′(h), and w.r.t. the logits, (rows·K,), empty if not needed.

    kept: the tensors that `forward` saved; empty to recompute them.
    """
    h, weights = dense(h), blending.weights
    delta, gradient = with_layout_of(h, delta), torch.empty_like(h)
    sweep, remaining = Sweep(h, blending), iter(kept)
    if sweep.stacks:
        inner_products = _backward_stacked(delta, h, gradient, sweep, need_logits, kept)
        return gradient, logit_gradient(inner_products, blending) if need_logits else inner_products
    inner: list[list[Tensor]] = []
    for block_h, block_delta, block_gradient in sweep.blocks(h, delta, gradient):
        source, upstream = block_h.to(sweep.dtype), block_delta.to(sweep.dtype)
        products = []
        if kept:
            slope, *values = itertools.islice(remaining, sweep.kept_per_block)
            if need_logits:
                products = [sweep.inner(upstream, value) for value in sweep.with_cheap(values, source)]
        else:
            slope = torch.zeros_like(upstream)
            for function, derivative, weight in sweep.functions(source):
                if _is_zero(weight) and not need_logits:
                    continue
                value = function(source)
                if need_logits:
                    products.append(sweep.inner(upstream, value))
                if not _is_zero(weight):
                    sweep.add(slope, derivative(source, value), weight)
        inner.append(products)
        if gradient.dtype == sweep.dtype:
            torch.mul(slope, upstream, out=block_gradient)
        else:
            block_gradient.copy_(slope * upstream)
    if not need_logits:
        return gradient, weights.new_empty(0)
    return gradient, logit_gradient(sweep.table(inner), blending)


def _forward_stacked(h: Tensor, x: Tensor, sweep: Sweep, kept: list[Tensor] | None) -> Tensor:
    """Write the blend into x, and return the sensitivities. The arguments are those of `forward`."""
    statistics = sweep.blending.statistics
    source = sweep.flat(h).to(sweep.dtype)
    functions = sweep.functions(source)
    values = [function(source) for function, _, _ in functions]
    sweep.flat(x).copy_(sweep.blended(torch.stack(values)))
    if kept is None and not statistics:
        return sweep.blending.weights.new_empty(0)
    slopes = torch.stack([slope(source, value) for (_, slope, _), value in zip(functions, values, strict=True)])
    sums = sweep.sums(slopes.abs(), h.numel() // sweep.rows) if statistics else sweep.blending.weights.new_empty(0)
    if kept is not None:
        kept += [sweep.blended(slopes), *sweep.without_cheap(values)]
    return sums


def _backward_stacked(
    delta: Tensor, h: Tensor, gradient: Tensor, sweep: Sweep, need_logits: bool, kept: Sequence[Tensor]
) -> Tensor:
    """Write the gradient w.r.t. h, and return the inner products ⟨δ, a_k⟩, (rows, K), empty if not needed."""
    source, upstream = (sweep.flat(tensor).to(sweep.dtype) for tensor in (h, delta))
    if kept:
        slope, values = kept[0], sweep.with_cheap(list(kept[1:]), source)
    else:
        functions = sweep.functions(source)
        values = [function(source) for function, _, _ in functions]
        slopes = [own(source, value) for (_, own, _), value in zip(functions, values, strict=True)]
        slope = sweep.blended(torch.stack(slopes))
    sweep.flat(gradient).copy_(slope * upstream)
    if not need_logits:
        return sweep.blending.weights.new_empty(0)
    return sweep.sums(torch.stack(values).mul_(upstream))


def logit_gradient(inner: Tensor, blending: Blending) -> Tensor:
    """Return the gradient of Proposition 1 from the inner products ⟨δ, a_k⟩, (rows, K).

    It is computed as Σ_j p_j (⟨δ, a_k⟩ − ⟨δ, a_j⟩), which avoids the cancellation of ⟨δ, a_k⟩ − Σ_j p_j ⟨δ, a_j⟩ if p_k
    is close to 1.
    """
    probabilities = blending.probabilities
    inner = inner.masked_fill(probabilities == 0, 0)  # 0·∞ would be NaN
    differences = inner.unsqueeze(-1) - inner.unsqueeze(-2)
    centred = (probabilities.unsqueeze(-2) * differences).sum(-1)
    return (probabilities * centred / blending.temperature).flatten()


def dense(h: Tensor) -> Tensor:
    """Return h if it is dense (its elements fill their memory without gaps, in any order); otherwise a copy."""
    return h if torch.ops.aten.is_non_overlapping_and_dense(h) else h.clone()


def with_layout_of(h: Tensor, delta: Tensor) -> Tensor:
    """Return delta, copied if its strides differ from those of the dense tensor h."""
    return delta if delta.stride() == h.stride() else torch.empty_like(h).copy_(delta)


def by_candidate(sums: Tensor, blending: Blending) -> Tensor:
    """Return sums of the alive candidates, (rows, alive), as (rows, K), with 0 for the others."""
    if len(blending.alive) == blending.weights.shape[1]:
        return sums.to(blending.weights.dtype)
    found = torch.zeros_like(blending.weights)
    found[:, list(blending.alive)] = sums.to(found.dtype)
    return found


class Sweep:
    """Splits tensors into blocks, and takes sums over a block per layer or per channel."""

    def __init__(self, h: Tensor, blending: Blending) -> None:
        self.blending, self.stacks = blending, stacks(h)
        self.dtype = torch.float64 if h.dtype == torch.float64 else torch.float32
        self.rows = blending.weights.shape[0]
        self.by_layer = self.rows == 1
        if self.by_layer and not self.stacks:  # Python numbers are fastest there, and need no synchronization
            weights: list[Any] = blending.weights[0].tolist()
        else:
            shape = (1,) if self.by_layer else (-1, 1)
            weights = [column.to(self.dtype).reshape(shape) for column in blending.weights.unbind(1)]
            self.some_zero = self.stacks or bool((blending.weights[:, list(blending.alive)] == 0).any())
        self.weights = [weights[k] for k in blending.alive]
        self._candidates = [lookup(blending.keys[k]) for k in blending.alive]
        self._shares = (
            not self.stacks
            and self.dtype == torch.float32
            and h.numel() >= SHARED_FROM
            and not shared_sigmoid.SLOW.isdisjoint([candidate.name for candidate in self._candidates])
        )

    def functions(self, source: Tensor) -> list[tuple[Function, Derivative, Tensor | float]]:
        """Return function, derivative and weight of each alive candidate, for a block in `dtype`."""
        shared = shared_sigmoid.pairs(source) if self._shares else {}
        pairs = [shared.get(one.name, (one.function, one.derivative)) for one in self._candidates]
        return [(*pair, weight) for pair, weight in zip(pairs, self.weights, strict=True)]

    def without_cheap(self, values: list[Tensor]) -> list[Tensor]:
        """Return the values of the candidates that are not `CHEAP`."""
        return [value for one, value in zip(self._candidates, values, strict=True) if one.name not in CHEAP]

    def with_cheap(self, values: list[Tensor], source: Tensor) -> list[Tensor]:
        """Return the values of all candidates from those `without_cheap`."""
        others = iter(values)
        return [one.function(source) if one.name in CHEAP else next(others) for one in self._candidates]

    @property
    def kept_per_block(self) -> int:
        """The number of tensors that `forward` keeps for each block: the slope and values."""
        return 1 + sum(one.name not in CHEAP for one in self._candidates)

    def flat(self, tensor: Tensor) -> Tensor:
        """Return a contiguous view of a dense tensor: flat, or (outer, channels, inner)."""
        flat = tensor.as_strided((tensor.numel(),), (1,))
        if self.by_layer:
            return flat
        return flat.view((-1, self.rows, tensor.stride(self.blending.channel_dim)) if len(flat) else (0, self.rows, 1))

    def blocks(self, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Return matching blocks of tensors that share one dense layout, as `flat` views."""
        flat = [self.flat(tensor) for tensor in tensors]
        size = flat[0].numel()
        block = BLOCK * torch.get_num_threads()
        if size <= block:
            return [tuple(flat)]
        dim = 0 if self.by_layer or flat[0].shape[0] > 1 else 2
        length = max(1, block * flat[0].shape[dim] // size)
        return zip(*(torch.split(tensor, length, dim) for tensor in flat), strict=True)

    def add(self, total: Tensor, values: Tensor, weight: Tensor | float) -> None:
        """Add weight·values to total in place; a zero weight masks infinite values."""
        if isinstance(weight, Tensor):
            total.addcmul_(values.masked_fill(weight == 0, 0) if self.some_zero else values, weight)
        elif weight != 0:
            total.add_(values, alpha=weight)

    def blended(self, stacked: Tensor) -> Tensor:
        """Return Σ_k w_k values_k for stacked values, (alive, …), which are overwritten; a zero weight masks infinite
        values."""
        weights = torch.stack(self.weights)
        if not self.by_layer:
            weights = weights.unsqueeze(1)  # (alive, 1, channels, 1)
        return stacked.masked_fill_(weights == 0, 0).mul_(weights).sum(0)

    def sums(self, stacked: Tensor, divisor: int = 1) -> Tensor:
        """Return the sums of stacked values per layer or per channel, divided by a number, as (rows, K)."""
        sums = stacked.sum(1 if self.by_layer else (1, 3)).view(-1, self.rows).T.contiguous()
        return by_candidate(sums / max(divisor, 1), self.blending)

    def table(self, blocks: list[list[Tensor]], divisor: int = 1) -> Tensor:
        """Return the sums over all blocks, divided by a number, as (rows, K).

        blocks: for each block the sums of the alive candidates. They are added in double precision.
        """
        total = torch.stack(blocks[0], -1)
        if len(blocks) > 1 or divisor > 1:
            total = total.double()
        for block in blocks[1:]:
            total += torch.stack(block, -1)
        total = total.view(self.blending.weights.shape[0], -1)
        return by_candidate(total / divisor if divisor > 1 else total, self.blending)

    def total(self, values: Tensor) -> Tensor:
        return values.sum() if self.by_layer else values.sum((0, 2))

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.dot(left, right) if self.by_layer else self.total(left * right)


def _is_zero(weight: Tensor | float) -> bool:
    """Return whether a weight is known to be 0; reading a tensor would synchronize with its device."""
    return isinstance(weight, float) and weight == 0
