"""A physics-informed network for Burgers' equation, whose loss contains second derivatives of the network.

    python examples/physics_informed.py --picture physics.png

Trains the network with its Tanhs and with Flex-Act, from the same weights and on the same points. A few minutes on one
core of a CPU; `--seeds 1` is a quick look. Only smooth functions are candidates: the second derivative of relu,
leaky_relu and their like is zero, and with it the viscous term of the equation.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn

import flexact

VISCOSITY, WIDTH, POINTS, EDGE, RATE = 0.02, 32, 256, 64, 2e-3
CANDIDATES = ("original", "gelu", "silu", "sine")


def solution(x: Tensor, t: Tensor) -> Tensor:
    """The solution of u_t + u·u_x = ν·u_xx with u(x, 0) = −sin(πx), by the Cole-Hopf transformation."""
    points, weights = (torch.from_numpy(one) for one in numpy.polynomial.hermite.hermgauss(80))
    z = x.double().unsqueeze(-1) - torch.sqrt(4 * VISCOSITY * t.double().unsqueeze(-1)) * points
    factor = weights * torch.exp(-torch.cos(math.pi * z) / (2 * math.pi * VISCOSITY))
    return (-(torch.sin(math.pi * z) * factor).sum(-1) / factor.sum(-1)).float()


def network() -> nn.Sequential:
    hidden = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), *hidden, nn.Linear(WIDTH, 1))


def edges() -> tuple[Tensor, Tensor]:
    """Places (x, t) at the start and at both ends, and the values that u has there."""
    line, zero = torch.linspace(-1, 1, EDGE), torch.zeros(EDGE)
    places = [torch.stack([line, zero], 1), *(torch.stack([zero + end, line.abs()], 1) for end in (-1.0, 1.0))]
    return torch.cat(places), torch.cat([-torch.sin(math.pi * line), zero, zero])


def loss_at(model: nn.Module, places: Tensor) -> Tensor:
    """The squared residual of the equation at these places, and the squared error at the edges."""
    places = places.clone().requires_grad_()
    u = model(places)
    (first,) = torch.autograd.grad(u.sum(), places, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), places, create_graph=True)
    residual = first[:, 1] + u.squeeze(1) * first[:, 0] - VISCOSITY * second[:, 0]
    at, values = edges()
    return residual.square().mean() + (model(at).squeeze(1) - values).square().mean()


def train(seed: int, steps: int, picks: bool) -> nn.Module:
    """The trained plain network."""
    torch.manual_seed(seed)
    model = network()
    generator = torch.Generator().manual_seed(seed)
    batches = torch.rand(steps, POINTS, 2, generator=generator) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])
    if picks:
        model = flexact.convert(model, config=flexact.FlexConfig(candidates=CANDIDATES))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    schedule = flexact.Schedule(model, network_steps=steps, optimizer=optimizer, rewinds=[rate]) if picks else None
    for step in range(schedule.total_steps if schedule else steps):
        loss = loss_at(model, batches[(schedule.trained_steps if schedule else step) % steps])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        if schedule:
            schedule.step(loss.item())
    if picks:
        print(flexact.selection(model))
        model = flexact.extract(model)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3000, help="steps for which each network is trained")
    parser.add_argument("--picture", type=Path, help="where the picture goes")
    given = parser.parse_args()
    x, t = torch.meshgrid(torch.linspace(-1, 1, 101), torch.linspace(0.01, 1, 51), indexing="ij")
    truth = solution(x, t)
    errors: dict[str, Tensor] = {}
    for seed in range(given.seeds):
        decibels = {}
        for name in ("Tanh", "Flex-Act"):
            model = train(seed, given.steps, picks=name == "Flex-Act")
            with torch.no_grad():
                error = model(torch.stack([x, t], -1)).squeeze(-1) - truth
            decibels[name] = -10 * torch.log10(error.square().mean() / truth.square().mean()).item()
            errors.setdefault(name, error.abs())
        told = ", ".join(f"{name} {value:.1f}" for name, value in decibels.items())
        print(f"seed {seed}: {told} dB of signal to error\n", flush=True)
    if given.picture:
        from matplotlib import pyplot

        figure, panels = pyplot.subplots(1, 3, figsize=(10, 3.2), sharey=True, layout="constrained")
        drawn = [("the solution u(x, t)", truth, "RdBu_r", 1.0)]
        drawn += [(f"error with {name}", error, "magma", float(errors["Tanh"].max())) for name, error in errors.items()]
        for axes, (title, values, colours, most) in zip(panels, drawn, strict=True):
            least = -1.0 if values is truth else 0.0
            shown = axes.imshow(values, cmap=colours, vmin=least, vmax=most, extent=(0, 1, 1, -1), aspect="auto")
            axes.set(title=title, xlabel="t")
            figure.colorbar(shown, ax=axes)
        panels[0].set_ylabel("x")
        figure.savefig(given.picture, dpi=90)


if __name__ == "__main__":
    main()
