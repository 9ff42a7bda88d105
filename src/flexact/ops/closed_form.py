"""The routed activation in closed form, in plain torch.

Tensors are processed in blocks that stay in the CPU's cache while every candidate is evaluated on them. Half precision
is computed in float32. Sums are taken block by block in a fixed order, so results are deterministic.

The gradients need the values of the candidates and their blended slope. A forward can keep both, in up to K + 1 tensors
of the size of the input, and the backward then only multiplies. Otherwise the backward recomputes them; the results
are bit-identical.

`stacked_form` computes the same where every operation is a kernel launch, as on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

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


class Term(NamedTuple):
    """One alive candidate for one block."""

    function: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor, Tensor], Tensor]
    weight: Tensor | float


def forward(h: Tensor, blending: Blending, kept: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return x = Σ_k w_k σ_k(h) and the sensitivities mean |σ_k′(h)|, (rows, K), empty without statistics.

    kept: a list to which the blended slope and the values of each block are appended, for `backward`. It stays empty
    if h is larger than MOST_KEPT.
    """
    h, weights, statistics = dense(h), blending.weights, blending.statistics
    if h.numel() > MOST_KEPT:
        kept = None
    needs_slopes = statistics or kept is not None
    x, sweep, sums = torch.empty_like(h), BlockSweep(h, blending), []
    for block_h, block_x in sweep.blocks(h, x):
        source = block_h.to(sweep.dtype)
        terms = sweep.terms(source, every=needs_slopes)
        values = [term.function(source) for term in terms]
        block_weights = [term.weight for term in terms]
        sweep.blend(values, block_weights, block_x)
        if not needs_slopes:
            continue
        slopes: Iterable[Tensor] = (term.derivative(source, value) for term, value in zip(terms, values, strict=True))
        if statistics:
            slopes = [*slopes]
            sums.append(sweep.sizes(slopes))
        if kept is not None:
            kept += [sweep.blend(slopes, block_weights, torch.empty_like(source)), *sweep.without_cheap(values)]
    return x, sweep.table(*sums, divisor=h.numel() // weights.shape[0]) if statistics else weights.new_empty(0)


def backward(
    delta: Tensor, h: Tensor, blending: Blending, need_logits: bool, kept: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """Return the gradients w.r.t. h, δ·Σ_k w_k σ_k′(h), and w.r.t. the logits, (rows·K,), empty if not needed.

    kept: the tensors that `forward` saved; empty to recompute them.
    """
    h = dense(h)
    delta, gradient = with_layout_of(h, delta), torch.empty_like(h)
    sweep, remaining, inner = BlockSweep(h, blending), iter(kept), []
    for block_h, block_delta, block_gradient in sweep.blocks(h, delta, gradient):
        source, upstream = block_h.to(sweep.dtype), block_delta.to(sweep.dtype)
        if kept:
            slope, *others = itertools.islice(remaining, sweep.kept_per_block)
            values = sweep.with_cheap(others, source) if need_logits else []
        else:
            terms = sweep.terms(source, every=need_logits)
            values = [term.function(source) for term in terms]
            slopes = (term.derivative(source, value) for term, value in zip(terms, values, strict=True))
            slope = sweep.blend(slopes, [term.weight for term in terms], torch.empty_like(source))
        if need_logits:
            inner.append(sweep.inner(upstream, values))
        if gradient.dtype == sweep.dtype:
            torch.mul(slope, upstream, out=block_gradient)
        else:
            block_gradient.copy_(slope * upstream)
    to_logits = logit_gradient(sweep.table(*inner), blending) if need_logits else blending.weights.new_empty(0)
    return gradient, to_logits


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
    is_dense = h.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(h)  # the second one takes longer
    return h if is_dense else h.clone()


def with_layout_of(h: Tensor, delta: Tensor) -> Tensor:
    """Return delta, copied if its strides differ from those of the dense tensor h."""
    return delta if delta.stride() == h.stride() else torch.empty_like(h).copy_(delta)


def by_candidate(sums: Tensor, blending: Blending) -> Tensor:
    """Return sums of the alive candidates, (rows, alive), as (rows, K), with 0 for the others."""
    sums, count = sums.to(blending.weights.dtype), blending.weights.shape[1]
    if len(blending.alive) == count:
        return sums
    # Not by an index of the alive candidates, whose copy to a GPU would synchronize and break a CUDA-graph capture.
    columns = dict(zip(blending.alive, sums.unbind(1), strict=True))
    nothing = torch.zeros_like(sums[:, 0])
    return torch.stack([columns.get(k, nothing) for k in range(count)], 1)


class Sweep:
    """The alive candidates of a site, and the layout of its input h as flat views."""

    def __init__(self, h: Tensor, blending: Blending) -> None:
        self.blending = blending
        self.dtype = torch.float64 if h.dtype == torch.float64 else torch.float32
        self.rows = blending.weights.shape[0]
        self.by_layer = self.rows == 1
        self.candidates = [lookup(blending.keys[k]) for k in blending.alive]

    def without_cheap(self, values: list[Tensor]) -> list[Tensor]:
        """Return the values of the candidates that are not `CHEAP`."""
        return [value for one, value in zip(self.candidates, values, strict=True) if one.name not in CHEAP]

    def with_cheap(self, values: list[Tensor], source: Tensor) -> list[Tensor]:
        """Return the values of all candidates from those `without_cheap`."""
        others = iter(values)
        return [one.function(source) if one.name in CHEAP else next(others) for one in self.candidates]

    def flat(self, tensor: Tensor) -> Tensor:
        """Return a contiguous view of a dense tensor: flat, or (outer, channels, inner)."""
        flat = tensor.as_strided((tensor.numel(),), (1,))
        if self.by_layer:
            return flat
        return flat.view((-1, self.rows, tensor.stride(self.blending.channel_dim)) if len(flat) else (0, self.rows, 1))


class BlockSweep(Sweep):
    """Splits tensors into blocks, and takes sums over a block per layer or per channel."""

    def __init__(self, h: Tensor, blending: Blending) -> None:
        super().__init__(h, blending)
        if self.by_layer:  # Python numbers are fastest there
            weights: list[Any] = blending.weights[0].tolist()
        else:
            weights = [column.to(self.dtype).reshape(-1, 1) for column in blending.weights.unbind(1)]
            self.some_zero = bool((blending.weights[:, list(blending.alive)] == 0).any())
        self.weights = [weights[k] for k in blending.alive]
        self._shares = (
            self.dtype == torch.float32
            and h.numel() >= SHARED_FROM
            and not shared_sigmoid.SLOW.isdisjoint([candidate.name for candidate in self.candidates])
        )

    def terms(self, source: Tensor, every: bool = True) -> list[Term]:
        """Return the alive candidates for a block in `dtype`; unless `every`, without those whose weight is 0."""
        shared = shared_sigmoid.pairs(source) if self._shares else {}
        pairs = [shared.get(one.name, (one.function, one.derivative)) for one in self.candidates]
        terms = [Term(*pair, weight) for pair, weight in zip(pairs, self.weights, strict=True)]
        return [term for term in terms if every or isinstance(term.weight, Tensor) or term.weight != 0]

    def evaluated(self, source: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the values and the slopes of the alive candidates."""
        terms = self.terms(source)
        values = [term.function(source) for term in terms]
        return values, [term.derivative(source, value) for term, value in zip(terms, values, strict=True)]

    @property
    def kept_per_block(self) -> int:
        """The number of tensors that `forward` keeps for each block: the slope and values."""
        return 1 + sum(one.name not in CHEAP for one in self.candidates)

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

    def blended(self, values: list[Tensor]) -> Tensor:
        """Return Σ_k w_k values_k, the values of all alive candidates."""
        return self.blend(values, self.weights, torch.empty_like(values[0]))

    def blend(self, values: Iterable[Tensor], weights: Sequence[Tensor | float], out: Tensor) -> Tensor:
        """Write Σ_k w_k values_k into `out`; a zero weight masks infinite values."""
        total = out.to(self.dtype).zero_()  # a copy in half precision only
        for value, weight in zip(values, weights, strict=True):
            if isinstance(weight, Tensor):
                total.addcmul_(value.masked_fill(weight == 0, 0) if self.some_zero else value, weight)
            elif weight != 0:
                total.add_(value, alpha=weight)
        return total if total is out else out.copy_(total)

    def sizes(self, values: list[Tensor]) -> Tensor:
        """Return Σ|values_k|, (number of values,) for the layer or (channels, number of values)."""
        return torch.stack([self._sum(value.abs()) for value in values], -1)

    def inner(self, upstream: Tensor, values: list[Tensor]) -> Tensor:
        """Return ⟨upstream, values_k⟩, shaped as `sizes`."""
        if self.by_layer:
            return torch.stack([torch.dot(upstream, value) for value in values])
        return torch.stack([self._sum(upstream * value) for value in values], -1)

    def _sum(self, values: Tensor) -> Tensor:
        return values.sum() if self.by_layer else values.sum((0, 2))

    def table(self, *blocks: Tensor, divisor: int = 1) -> Tensor:
        """Return the sums of all blocks, divided by a number, as (rows, K). Blocks are added in double precision."""
        total = blocks[0].double() if len(blocks) > 1 or divisor > 1 else blocks[0]
        for block in blocks[1:]:
            total += block
        total = total.reshape(self.rows, -1)
        return by_candidate(total / divisor if divisor > 1 else total, self.blending)
