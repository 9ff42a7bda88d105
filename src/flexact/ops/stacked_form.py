"""The routed activation in closed form where every operation is a kernel launch, as on a GPU.

The candidates' values and slopes are stacked in one tensor, so that the blend, its slope and the sums of all candidates
take a few launches together. A step of a small network is bound by the launches. Nothing is read on the host, which
would synchronize with the device and which a CUDA graph cannot capture.

The gradients need the values of the candidates and their blended slope. A forward can keep both, in up to K + 1 tensors
of the size of the input. Otherwise the backward recomputes them; the results are bit-identical.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from flexact.candidates.registry import Backward, ones
from flexact.ops.blending import Blending
from flexact.ops.closed_form import Sweep, by_candidate, dense, logit_gradient, with_layout_of


def stacks(h: Tensor) -> bool:
    """Return whether this form runs rather than the one that adds candidate by candidate."""
    return h.device.type != "cpu"


def forward(h: Tensor, blending: Blending, kept: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return the result of `closed_form.forward`. kept: a list to which the blended slope and values are appended."""
    h, statistics = dense(h), blending.statistics
    stack, x = Stack(h, blending), torch.empty_like(h)
    source, count = stack.source(h), len(blending.alive)
    values = stack.values(source)
    slopes = stack.slopes(source, values) if statistics or kept is not None else []
    stacked = torch.stack([*values, *slopes])
    sizes = stack.sizes(stacked[count:]) if statistics else None
    weighted = stack.weighted(stacked if kept is not None else stacked[:count])
    if x.dtype == stack.dtype:
        torch.sum(weighted[:count], 0, out=stack.flat(x))
    else:
        stack.flat(x).copy_(weighted[:count].sum(0))
    if kept is not None:
        kept += [weighted[count:].sum(0), *stack.without_cheap(values)]
    return x, blending.weights.new_empty(0) if sizes is None else stack.table(sizes, h.numel() // stack.rows)


def backward(
    delta: Tensor, h: Tensor, blending: Blending, need_logits: bool, kept: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """Return the result of `closed_form.backward`. kept: the tensors that `forward` saved; empty to recompute them."""
    h = dense(h)
    stack, gradient = Stack(h, blending), torch.empty_like(h)
    upstream = stack.flat(with_layout_of(h, delta))
    if kept:
        slope, *others = kept
        values = stack.with_cheap(others, stack.source(h)) if need_logits else []
    else:
        values, slopes = stack.evaluated(stack.source(h))
        slope = stack.blended(slopes)
    torch.mul(slope, upstream, out=stack.flat(gradient))
    if not need_logits:
        return gradient, blending.weights.new_empty(0)
    return gradient, logit_gradient(stack.table(stack.inner(upstream, values)), blending)


class Stack(Sweep):
    """See `closed_form.Sweep`."""

    @functools.cached_property
    def weights(self) -> Tensor:
        """The weights of the alive candidates, which broadcast with a stack of their values."""
        weights, alive = self.blending.weights.to(self.dtype).T, self.blending.alive
        if len(alive) < len(weights):
            columns = weights.unbind()
            weights = torch.stack([columns[k] for k in alive])
        return weights if self.by_layer else weights[:, None, :, None]

    @property
    def _summed(self) -> tuple[int, ...]:
        """The dimensions of a stack that `sizes` and `inner` sum."""
        return (1,) if self.by_layer else (1, 3)

    def source(self, h: Tensor) -> Tensor:
        """Return a dense tensor as a `flat` view in `dtype`."""
        return self.flat(h).to(self.dtype)

    def values(self, source: Tensor) -> list[Tensor]:
        """Return the values of the alive candidates."""
        return [one.function(source) for one in self.candidates]

    def slopes(self, source: Tensor, values: list[Tensor]) -> list[Tensor]:
        """Return the derivatives of the alive candidates. torch's backward operators share one tensor of ones."""
        one, derivatives = ones(source), [candidate.derivative for candidate in self.candidates]
        return [
            slope.operator(one, source, value) if isinstance(slope, Backward) else slope(source, value)
            for slope, value in zip(derivatives, values, strict=True)
        ]

    def evaluated(self, source: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the values and the slopes of the alive candidates."""
        values = self.values(source)
        return values, self.slopes(source, values)

    def weighted(self, stacked: Tensor) -> Tensor:
        """Multiply one or two stacks of all alive candidates, in their memory, by the weights; a zero weight masks
        infinite values."""
        count = len(self.candidates)
        stacks = stacked.view(len(stacked) // count, count, *stacked.shape[1:])
        stacks.masked_fill_(self.weights == 0, 0).mul_(self.weights)
        return stacked

    def blended(self, values: list[Tensor]) -> Tensor:
        """Return Σ_k w_k values_k, the values of all alive candidates."""
        return self.weighted(torch.stack(values)).sum(0)

    def sizes(self, stacked: Tensor) -> Tensor:
        """Return Σ|t_k| of a stack, shaped as `inner`."""
        # A CPU would add the numbers one after the other, and lose digits in float32.
        dtype = torch.float64 if stacked.device.type == "cpu" else None
        sizes: Tensor = torch.linalg.vector_norm(stacked, 1, self._summed, dtype=dtype)
        return sizes

    def inner(self, upstream: Tensor, values: list[Tensor]) -> Tensor:
        """Return ⟨upstream, values_k⟩, (alive,) for the layer or (alive, channels)."""
        return torch.stack(values).mul_(upstream).sum(self._summed)

    def table(self, sums: Tensor, divisor: int = 1) -> Tensor:
        """Return sums shaped as `inner`, divided by a number, as (rows, K)."""
        rows = sums.view(1, -1) if self.by_layer else sums.T.contiguous()
        return by_candidate(rows / divisor if divisor > 1 else rows, self.blending)
