"""A tabular regression, Friedman 1, scored on rows that were not trained on."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexact.studies.picks.task import Problem, Task
from flexact.studies.picks.tasks.cifar import epochs

ROWS, FEATURES, NOISE, BATCH, WIDTH = {"train": 20_000, "held_out": 500, "test": 10_000}, 10, 1.0, 64, 64


class Friedman(Problem):
    """10·sin(π·x₁·x₂) + 20·(x₃ − ½)² + 10·x₄ + 5·x₅, and five columns that mean nothing."""

    def __init__(self, seed: int, device: torch.device, data: Path | None) -> None:
        generator = torch.Generator().manual_seed(1_000 + seed)
        self.x, self.y = {}, {}
        for part, count in ROWS.items():
            x = torch.rand(count, FEATURES, generator=generator)
            y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
            noise = NOISE * torch.randn(count, generator=generator) * (part != "test")
            self.x[part], self.y[part] = (2 * x - 1).to(device), ((y + noise - 14.4) / 4.9).unsqueeze(1).to(device)

    def network(self) -> nn.Module:
        layers: list[nn.Module] = []
        for inside in (FEATURES, WIDTH, WIDTH):
            layers += [nn.Linear(inside, WIDTH), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    def order(self, steps: int, generator: torch.Generator) -> Tensor:
        return epochs(ROWS["train"], steps, BATCH, generator)

    def loss(self, network: nn.Module, rows: Tensor) -> Tensor:
        return F.mse_loss(network(self.x["train"][rows]), self.y["train"][rows])

    def held_out_loss(self, network: nn.Module) -> Tensor:
        return self._error(network, "held_out")

    def score(self, network: nn.Module) -> float:
        """Signal to error in dB."""
        return -10 * float(torch.log10(self._error(network, "test")))

    def _error(self, network: nn.Module, part: str) -> Tensor:
        return F.mse_loss(network(self.x[part]), self.y[part])


TASK = Task(
    name="tabular",
    title="tabular regression, Friedman 1",
    unit="dB",
    candidates=("relu", "gelu", "silu", "elu", "tanh", "sigmoid", "identity"),
    steps=8_000,
    lr=3e-3,
    problem=Friedman,
)
