"""The routed activation in closed form, in plain torch: saves only the input, with one pass per direction.

The tensor is processed in blocks that stay in the CPU's cache while every candidate is evaluated on them, so memory is
read and written once regardless of the number of candidates. Half precision is computed in float32. Sums are taken
block by block in a fixed order, so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flexact.candidates import Candidate, lookup

BLOCK = 1 << 17
"""Elements per block and CPU thread (512 KiB): the fastest of 2^14 to 2^20 in benchmarks/op_cpu.py."""


def forward(
    h: Tensor, weights: Tensor, keys: Sequence[str], alive: Sequence[int], channel_dim: int, statistics: bool
) -> tuple[Tensor, Tensor]:
    """Return x = Σ_k w_k σ_k(h) and the sensitivities mean |σ_k′(h)|, (rows, K), which are empty without
    `statistics`."""
    h = dense(h)
    x = torch.empty_like(h)
    sweep = _Sweep(h, weights, keys, alive, channel_dim)
    sums = sweep.zeros()
    for block_h, block_x in sweep.blocks(h, x):
        source, mixed = block_h.to(sweep.dtype), block_x.to(sweep.dtype).zero_()  # copies in half precision only
        for k, candidate, weight in sweep.candidates:
            if _is_zero(weight) and not statistics:
                continue
            value = candidate.function(source)
            sweep.add(mixed, value, weight)
            if statistics:
                sums[:, k] += sweep.total(candidate.derivative(source, value).abs())
        block_x.copy_(mixed)
    if not statistics:
        return x, weights.new_empty(0)
    return x, (sums / max(h.numel() // weights.shape[0], 1)).to(weights.dtype)


def backward(
    delta: Tensor,
    h: Tensor,
    weights: Tensor,
    probabilities: Tensor,
    temperature: Tensor,
    keys: Sequence[str],
    alive: Sequence[int],
    channel_dim: int,
    need_logits: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients to h, δ·Σ_k w_k σ_k′(h), and to the logits, (rows·K,), empty if not needed."""
    h = dense(h)
    delta = delta if delta.stride() == h.stride() else torch.empty_like(h).copy_(delta)
    gradient = torch.empty_like(h)
    sweep = _Sweep(h, weights, keys, alive, channel_dim)
    inner = sweep.zeros()
    for block_h, block_delta, block_gradient in sweep.blocks(h, delta, gradient):
        source, upstream = block_h.to(sweep.dtype), block_delta.to(sweep.dtype)
        slope = block_gradient.to(sweep.dtype).zero_()
        for k, candidate, weight in sweep.candidates:
            if _is_zero(weight) and not need_logits:
                continue
            value = candidate.function(source)
            if need_logits:
                inner[:, k] += sweep.inner(upstream, value)
            if not _is_zero(weight):
                sweep.add(slope, candidate.derivative(source, value), weight)
        block_gradient.copy_(slope.mul_(upstream))
    if not need_logits:
        return gradient, weights.new_empty(0)
    return gradient, logit_gradient(inner.to(weights.dtype), probabilities, temperature)


def logit_gradient(inner: Tensor, probabilities: Tensor, temperature: Tensor) -> Tensor:
    """Return the gradient of Proposition 1 from the inner products ⟨δ, a_k⟩, (rows, K).

    It is computed as Σ_j p_j (⟨δ, a_k⟩ − ⟨δ, a_j⟩), which avoids the cancellation of ⟨δ, a_k⟩ − Σ_j p_j ⟨δ, a_j⟩ if p_k
    is close to 1.
    """
    inner = inner.masked_fill(probabilities == 0, 0)  # 0·∞ would be NaN
    differences = inner.unsqueeze(-1) - inner.unsqueeze(-2)
    centred = (probabilities.unsqueeze(-2) * differences).sum(-1)
    return (probabilities * centred / temperature).flatten()


class _Sweep:
    """Splits tensors into blocks, and takes sums over a block per layer or per channel."""

    def __init__(self, h: Tensor, weights: Tensor, keys: Sequence[str], alive: Sequence[int], channel_dim: int) -> None:
        self.rows, self.k = weights.shape
        self.device = h.device
        self.dtype = torch.float64 if h.dtype == torch.float64 else torch.float32
        self.by_layer = self.rows == 1
        self.channel_dim = channel_dim % h.dim() if h.dim() else 0
        self.other_dims = [dim for dim in range(h.dim()) if dim != self.channel_dim]
        self.candidates = self._with_weights(h, weights, {k: lookup(keys[k]) for k in alive})

    def _with_weights(
        self, h: Tensor, weights: Tensor, candidates: dict[int, Candidate]
    ) -> list[tuple[int, Candidate, Tensor | float]]:
        if self.by_layer and h.device.type == "cpu":  # Python numbers are fastest there, and need no synchronization
            numbers = weights[0].tolist()
            return [(k, candidate, numbers[k]) for k, candidate in candidates.items()]
        shape = [] if self.by_layer else [1] * h.dim()
        if shape:
            shape[self.channel_dim] = self.rows
        self.some_zero = h.device.type != "cpu" or bool((weights[:, list(candidates)] == 0).any())
        return [(k, candidate, weights[:, k].to(self.dtype).reshape(shape)) for k, candidate in candidates.items()]

    def blocks(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield matching blocks of tensors that share one dense layout."""
        size = tensors[0].numel()
        if size == 0:
            return
        block = BLOCK * torch.get_num_threads() if self.device.type == "cpu" else size
        if self.by_layer:
            flat = [tensor.as_strided((size,), (1,)) for tensor in tensors]
            yield from zip(*(torch.split(tensor, block) for tensor in flat), strict=True)
        else:
            split_dim = self.other_dims[0] if self.other_dims else 0
            count = tensors[0].shape[split_dim]
            length = max(1, block * count // size) if self.other_dims else count
            yield from zip(*(torch.split(tensor, length, split_dim) for tensor in tensors), strict=True)

    def zeros(self) -> Tensor:
        return torch.zeros(self.rows, self.k, dtype=torch.float64, device=self.device)

    def add(self, total: Tensor, values: Tensor, weight: Tensor | float) -> None:
        """Add weight·values to total in place; a zero weight masks infinite values."""
        if isinstance(weight, Tensor):
            total.addcmul_(values.masked_fill(weight == 0, 0) if self.some_zero else values, weight)
        elif weight != 0:
            total.add_(values, alpha=weight)

    def total(self, values: Tensor) -> Tensor:
        return values.sum() if self.by_layer else values.sum(self.other_dims) if self.other_dims else values

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.dot(left, right) if self.by_layer else self.total(left * right)


def _is_zero(weight: Tensor | float) -> bool:
    """Return whether a weight is known to be 0; reading a tensor would synchronize with its device."""
    return isinstance(weight, float) and weight == 0


def dense(h: Tensor) -> Tensor:
    """Return h if it is dense, that is its elements fill their memory without gaps in any order; otherwise a copy."""
    return h if torch.ops.aten.is_non_overlapping_and_dense(h) else h.clone()
