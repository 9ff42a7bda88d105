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
