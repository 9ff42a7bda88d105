"""The general parametric unit on ReLU (Hu et al., 2021): the paper's AReLU."""

from __future__ import annotations

import torch
from torch import Tensor

from flexact.baselines.learnable import Learnable


class GeneralParametric(Learnable):
    """b·relu(a·z + c) + d, initialised to a = b = 1 and c = d = 0."""

    def __init__(self, channels: int | None = None, channel_dim: int = 1) -> None:
        super().__init__(channels, channel_dim)
        self.inner_and_outer = self._parameter(1.0, 1.0, 0.0, 0.0)

    def forward(self, z: Tensor) -> Tensor:
        a, b, c, d = self._columns(self.inner_and_outer, z)
        return b * torch.relu(a * z + c) + d
