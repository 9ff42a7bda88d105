"""A physics-informed network for Burgers' equation, whose loss contains derivatives of the network."""

from __future__ import annotations

import math

import numpy
import torch
from torch import Tensor, nn

from flexact.studies.picks.task import Problem, Task
from flexact.studies.picks.tasks.parts import mlp

VISCOSITY = 0.02
POOL, HELD_OUT, BATCH, EDGE, WIDTH, QUADRATURE = 20_000, 1_000, 512, 64, 64, 80


def solution(x: Tensor, t: Tensor) -> Tensor:
    """Return the solution of u_t + u·u_x = ν·u_xx on [−1, 1] with u(x, 0) = −sin(πx), by the Cole-Hopf transformation.

    x and t have the same shape; the result is in float64.
    """
    points, weights = (torch.from_numpy(one) for one in numpy.polynomial.hermite.hermgauss(QUADRATURE))
    z = x.double().unsqueeze(-1) - torch.sqrt(4 * VISCOSITY * t.double().unsqueeze(-1)) * points
    factor = weights * torch.exp(-torch.cos(math.pi * z) / (2 * math.pi * VISCOSITY))
    return -(torch.sin(math.pi * z) * factor).sum(-1) / factor.sum(-1)


class Burgers(Problem):
    """Points in the interior, at the start and at the edges. The score compares with the exact solution."""

    def __init__(self, seed: int, device: torch.device, data: None) -> None:
        generator = torch.Generator().manual_seed(3_000 + seed)
        points = torch.rand(POOL, 2, generator=generator) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])
        self.inside, self.held_out = points[:-HELD_OUT].to(device), points[-HELD_OUT:].to(device)
        x, t = torch.meshgrid(torch.linspace(-1, 1, 101), torch.linspace(0.01, 1, 51), indexing="ij")
        self.test = torch.stack([x.flatten(), t.flatten()], dim=1).to(device)
        self.truth = solution(self.test[:, 0].cpu(), self.test[:, 1].cpu()).float().to(device)
        line, zero = torch.linspace(-1, 1, EDGE), torch.zeros(EDGE)
        edges = [torch.stack([line, zero], 1)] + [torch.stack([zero + end, line.abs()], 1) for end in (-1.0, 1.0)]
        self.edges = torch.cat(edges).to(device)
        self.values = torch.cat([-torch.sin(math.pi * line), zero, zero]).to(device)

    def network(self) -> nn.Module:
        return mlp((2, *[WIDTH] * 4, 1), nn.Tanh)

    def order(self, steps: int, generator: torch.Generator) -> Tensor:
        return torch.randint(len(self.inside), (steps, BATCH), generator=generator)

    def loss(self, network: nn.Module, rows: Tensor) -> Tensor:
        return self._loss(network, self.inside[rows])

    def held_out_loss(self, network: nn.Module) -> Tensor:
        with torch.enable_grad():
            return self._loss(network, self.held_out).detach()

    def score(self, network: nn.Module) -> float:
        """Return the signal-to-error ratio of the solution in dB."""
        error = network(self.test).squeeze(1) - self.truth
        return -10 * float(torch.log10(error.square().mean() / self.truth.square().mean()))

    def _loss(self, network: nn.Module, points: Tensor) -> Tensor:
        points = points.detach().requires_grad_()
        u = network(points)
        (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        # With ReLU the network is linear almost everywhere: its second derivative has no graph and is 0.
        (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True, materialize_grads=True)
        residual = first[:, 1] + u.squeeze(1) * first[:, 0] - VISCOSITY * second[:, 0]
        edge = network(self.edges).squeeze(1) - self.values
        loss: Tensor = residual.square().mean() + edge.square().mean()
        return loss


TASK = Task(
    name="physics",
    title="physics-informed network, Burgers' equation",
    unit="dB",
    candidates=("tanh", "sine", "silu", "gelu", "sigmoid", "relu", "identity"),
    problem=Burgers,
)
