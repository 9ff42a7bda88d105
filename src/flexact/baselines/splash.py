"""SPLASH: piecewise linear with fixed, symmetric hinges (Tavakoli et al., 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from flexact.baselines.learnable import Learnable

HINGES = (0.0, 1.0, 2.0, 2.5)
"""The authors' S = 7 hinges: at 0, and mirrored on both sides of it."""


class Splash(Learnable):
    """Σ_s a⁺_s·max(0, z − b_s) + a⁻_s·max(0, −z − b_s) with S + 1 learned slopes a, initialised to a ReLU."""

    def __init__(self, channels: int | None = None, channel_dim: int = 1) -> None:
        super().__init__(channels, channel_dim)
        self.right = self._parameter(1.0, 0.0, 0.0, 0.0)
        self.left = self._parameter(0.0, 0.0, 0.0, 0.0)

    def forward(self, z: Tensor) -> Tensor:
        total = torch.zeros_like(z)
        for hinge, right, left in zip(HINGES, self._columns(self.right, z), self._columns(self.left, z), strict=True):
            total = total + right * torch.relu(z - hinge) + left * torch.relu(-z - hinge)
        return total
