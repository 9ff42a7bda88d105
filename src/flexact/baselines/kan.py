"""The layer of a Kolmogorov-Arnold network: a learned function on every edge (Liu et al., arXiv 2404.19756)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flexact.baselines.learnable import Learnable

INTERVALS, ORDER = 5, 3
"""The authors' grid and the degree of their splines."""
LOW, HIGH = -1.0, 1.0
"""The ends of the grid. Beyond them the splines fall to 0 within ORDER intervals, and SiLU alone is left."""


class SplineEdge(Learnable):
    """w·silu(z) + Σᵢ cᵢ·Bᵢ(z) with cubic B-splines Bᵢ: the function of one edge, here used as an activation.

    Nine parameters; w starts at 1, and all c at 0. The authors' scale of the sum is absorbed into c.
    """

    start = (1.0, *[0.0] * (INTERVALS + ORDER))

    @staticmethod
    def function(z: Tensor, base: Tensor, *coefficients: Tensor) -> Tensor:
        total = base * nn.functional.silu(z)
        for coefficient, spline in zip(coefficients, splines(z), strict=True):
            total = total + coefficient * spline
        return total


class KolmogorovArnoldLayer(nn.Module):
    """yⱼ = Σᵢ φᵢⱼ(xᵢ) with one `SplineEdge` φᵢⱼ per pair of an input and an output; it needs no linear layer.

    networks: the number of independent layers. x is (batch, networks, inputs), and y is (batch, networks, outputs).
    """

    takes_inputs = True
    """It replaces a linear layer and its activation, so it receives the inputs of the linear layer."""

    def __init__(self, inputs: int, outputs: int, networks: int = 1) -> None:
        super().__init__()
        self.shape = (networks, inputs, outputs)
        self.edges = SplineEdge(math.prod(self.shape))
        nn.init.uniform_(self.edges.learned[:, 0].detach(), -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))

    def forward(self, x: Tensor) -> Tensor:
        networks, inputs, outputs = self.shape
        each = x.unsqueeze(-1).expand(-1, networks, inputs, outputs).flatten(1)
        summed: Tensor = self.edges(each).unflatten(1, self.shape).sum(2)
        return summed


def splines(x: Tensor) -> list[Tensor]:
    """Return the INTERVALS + ORDER B-splines of a uniform grid on [LOW, HIGH] with ORDER more intervals at both ends.

    They are translations of one cardinal spline, whose pieces are explicit cubic polynomials.
    """
    place = (x - LOW) * (INTERVALS / (HIGH - LOW)) + ORDER  # in intervals from the first knot of the extended grid
    return [_cardinal(place - number) for number in range(INTERVALS + ORDER)]


def _cardinal(u: Tensor) -> Tensor:
    """Return the cubic B-spline with the knots 0, 1, 2, 3 and 4."""
    v = (u - 2).abs()  # it is symmetric about 2
    inner, outer = 4 - 6 * v * v + 3 * v * v * v, torch.relu(2 - v) ** 3
    return torch.where(v < 1, inner, outer) / 6
