"""Combinations of {identity, ReLU, tanh} with learned weights that sum to one (Manessi and Rozza, 2018)."""

from __future__ import annotations

import torch
from torch import Tensor

from flexact.baselines.learnable import Learnable


class AffineCombination(Learnable):
    """w₁·z + w₂·relu(z) + w₃·tanh(z) with Σ w = 1. The weights may be negative and start at 1/3."""

    def __init__(self, channels: int | None = None, channel_dim: int = 1) -> None:
        super().__init__(channels, channel_dim)
        self.free = self._parameter(0.0, 0.0, 0.0)

    def weights(self) -> Tensor:
        """Return the weights, (rows, 3), each row summing to one."""
        return self.free - self.free.mean(1, keepdim=True) + 1 / 3

    def forward(self, z: Tensor) -> Tensor:
        identity, relu, tanh = self._columns(self.weights(), z)
        return identity * z + relu * torch.relu(z) + tanh * torch.tanh(z)


class ConvexCombination(AffineCombination):
    """w₁·z + w₂·relu(z) + w₃·tanh(z) with Σ w = 1 and w ≥ 0. The weights start at 1/3."""

    def weights(self) -> Tensor:
        """Return the weights, (rows, 3), each row a probability distribution."""
        return torch.softmax(self.free, dim=1)
