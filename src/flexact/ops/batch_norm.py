"""A batch norm that is fused with the site after it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

Running = tuple[Tensor, Tensor, Tensor]
"""The running mean and variance of a batch norm, and its number of batches."""


class BatchNorm(NamedTuple):
    """A batch norm that uses the statistics of the batch."""

    weight: Tensor | None
    bias: Tensor | None
    running: Running | None
    """The running statistics, if it tracks them."""
    momentum: float | None
    eps: float

    @property
    def key(self) -> Hashable:
        """What distinguishes the kernels of batch norms."""
        return None if self.weight is None else self.weight.dtype, self.running is None, self.momentum, self.eps


def inputs_of(
    norm: BatchNorm, residual: Tensor | None, other: BatchNorm | None
) -> tuple[Hashable, list[Tensor], list[Tensor]]:
    """Return what distinguishes the kernels of a fused site, its tensors with gradients besides y and the logits, and
    the running statistics.

    other: the batch norm of the residual, if it has one.
    """
    with_gradients = [] if norm.weight is None or norm.bias is None else [norm.weight, norm.bias]
    running = list(norm.running or ())
    if residual is not None:
        with_gradients.append(residual)
    if other is not None:
        with_gradients += [] if other.weight is None or other.bias is None else [other.weight, other.bias]
        running += other.running or ()
    return (norm.key, residual is None, other and other.key), with_gradients, running
