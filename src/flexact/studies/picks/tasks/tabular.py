"""Tabular regression on Friedman 1, scored on unseen rows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from flexact.studies.picks.task import Task
from flexact.studies.picks.tasks.cifar import epochs
from flexact.studies.picks.tasks.regression import Regression, mlp

ROWS, FEATURES, NOISE, BATCH, WIDTH = {"train": 20_000, "held_out": 500, "test": 10_000}, 10, 1.0, 64, 64


class Friedman(Regression):
    """10·sin(π·x₁·x₂) + 20·(x₃ − ½)² + 10·x₄ + 5·x₅, and five uninformative columns."""

    def __init__(self, seed: int, device: torch.device, data: Path | None) -> None:
        generator = torch.Generator().manual_seed(1_000 + seed)
        self.x, self.y = {}, {}
        for part, count in ROWS.items():
            x = torch.rand(count, FEATURES, generator=generator)
            y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
            noise = NOISE * torch.randn(count, generator=generator) * (part != "test")
            self.x[part], self.y[part] = (2 * x - 1).to(device), ((y + noise - 14.4) / 4.9).unsqueeze(1).to(device)

    def network(self) -> nn.Module:
        return mlp((FEATURES, WIDTH, WIDTH, WIDTH, 1))

    def order(self, steps: int, generator: torch.Generator) -> Tensor:
        return epochs(ROWS["train"], steps, BATCH, generator)

    def score(self, network: nn.Module) -> float:
        """Return the signal-to-error ratio in dB."""
        return -10 * float(torch.log10(self.error(network, "test")))


TASK = Task(
    name="tabular",
    title="tabular regression, Friedman 1",
    unit="dB",
    candidates=("relu", "gelu", "silu", "elu", "tanh", "sigmoid", "identity"),
    lr=3e-3,
    problem=Friedman,
)
