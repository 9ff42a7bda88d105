"""Classify two spirals with two hidden layers, which pick their activation.

Takes a few seconds on a CPU. The progress bar needs `pip install 'flexact[cli]'`.
"""

from __future__ import annotations

import math

import torch
from rich.progress import track
from torch import nn

import flexact

STEPS = 1500


def spirals(points: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points (n, 2) on two interleaved spirals, and the label of the spiral of each point."""
    turn = 3 * math.pi * torch.rand(points, generator=generator).sqrt()
    label = torch.randint(0, 2, (points,), generator=generator)
    angle = turn + math.pi * label
    x = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 5
    return x + 0.03 * torch.randn(points, 2, generator=generator), label


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x, y = spirals(1000, generator)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    model = flexact.convert(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = flexact.Schedule(model, network_steps=STEPS, optimizer=optimizer)
    for _ in track(range(schedule.total_steps), description="training"):
        batch = torch.randint(0, len(x), (128,), generator=generator)
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(loss)

    print(flexact.selection(model))
    plain = flexact.extract(model).eval()
    test_x, test_y = spirals(1000, generator)
    accuracy = (plain(test_x).argmax(1) == test_y).float().mean()
    print(f"\nThe plain network: {plain}\nAccuracy on new points: {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
