"""PReLU: a ReLU with a learned slope for negative inputs (He et al., 2015)."""

from __future__ import annotations

import torch
from torch import Tensor

from flexact.baselines.learnable import Learnable


class PReLU(Learnable):
    """z for z > 0 and s·z otherwise, with s initialised to 0.25."""

    def __init__(self, channels: int | None = None, channel_dim: int = 1) -> None:
        super().__init__(channels, channel_dim)
        self.slope = self._parameter(0.25)

    def forward(self, z: Tensor) -> Tensor:
        (slope,) = self._columns(self.slope, z)
        return torch.where(z > 0, z, slope * z)
