"""Swish-β: interpolates between a linear function (β = 0) and a ReLU (β → ∞) (Ramachandran et al., 2017)."""

from __future__ import annotations

import torch
from torch import Tensor

from flexact.baselines.learnable import Learnable


class SwishBeta(Learnable):
    """z·sigmoid(β·z), with β initialised to 1."""

    def __init__(self, channels: int | None = None, channel_dim: int = 1) -> None:
        super().__init__(channels, channel_dim)
        self.beta = self._parameter(1.0)

    def forward(self, z: Tensor) -> Tensor:
        (beta,) = self._columns(self.beta, z)
        return z * torch.sigmoid(beta * z)
