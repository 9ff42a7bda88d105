"""The baselines that are one formula with a few learned numbers.

- PReLU: He et al., 2015.
- Swish-β: Ramachandran et al., 2017.
- SPLASH, piecewise linear with fixed, symmetric hinges: Tavakoli et al., 2020.
- Combinations of {identity, ReLU, tanh} with learned weights that sum to one: Manessi and Rozza, 2018.
- The general parametric unit on ReLU, the paper's AReLU: Hu et al., 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexact.baselines.learnable import Learnable

HINGES = (0.0, 1.0, 2.0, 2.5)
"""The S = 7 hinges of SPLASH's authors: at 0, and mirrored on both sides of it."""


class PReLU(Learnable):
    """z for z > 0 and s·z otherwise, with s initialised to 0.25."""

    start = (0.25,)

    @staticmethod
    def function(z: Tensor, slope: Tensor) -> Tensor:
        return torch.where(z > 0, z, slope * z)


class SwishBeta(Learnable):
    """z·sigmoid(β·z), with β initialised to 1: between a linear function (β = 0) and a ReLU (β → ∞)."""

    start = (1.0,)

    @staticmethod
    def function(z: Tensor, beta: Tensor) -> Tensor:
        return z * torch.sigmoid(beta * z)


class Splash(Learnable):
    """Σ_s a⁺_s·max(0, z − b_s) + a⁻_s·max(0, −z − b_s) with S + 1 learned slopes a, initialised to a ReLU.

    The parameters are the slopes a⁺ on the right, and then a⁻ on the left.
    """

    start = (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    @staticmethod
    def function(z: Tensor, *slopes: Tensor) -> Tensor:
        total = torch.zeros_like(z)
        for hinge, right, left in zip(HINGES, slopes[: len(HINGES)], slopes[len(HINGES) :], strict=True):
            total = total + right * torch.relu(z - hinge) + left * torch.relu(-z - hinge)
        return total


class AffineCombination(Learnable):
    """w₁·z + w₂·relu(z) + w₃·tanh(z) with Σ w = 1. The weights may be negative and start at 1/3."""

    start = (0.0, 0.0, 0.0)

    def weights(self) -> Tensor:
        """Return the weights, (rows, 3), each row summing to one."""
        return self.learned - self.learned.mean(1, keepdim=True) + 1 / 3

    @staticmethod
    def function(z: Tensor, identity: Tensor, relu: Tensor, tanh: Tensor) -> Tensor:
        return identity * z + relu * torch.relu(z) + tanh * torch.tanh(z)


class ConvexCombination(AffineCombination):
    """w₁·z + w₂·relu(z) + w₃·tanh(z) with Σ w = 1 and w ≥ 0. The weights start at 1/3."""

    def weights(self) -> Tensor:
        """Return the weights, (rows, 3), each row a probability distribution."""
        return torch.softmax(self.learned, dim=1)


class GeneralParametric(Learnable):
    """b·relu(a·z + c) + d, initialised to a = b = 1 and c = d = 0."""

    start = (1.0, 1.0, 0.0, 0.0)

    @staticmethod
    def function(z: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return b * torch.relu(a * z + c) + d
