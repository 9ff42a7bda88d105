"""Regression with a squared error: tabular data, and an image as a function of its coordinates."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexact.errors import FlexActError
from flexact.studies.picks.task import Problem, Task
from flexact.studies.picks.tasks.parts import epochs, mlp


class Regression(Problem):
    """Inputs x and targets y of the parts "train", "held_out" and "test"."""

    x: dict[str, Tensor]
    y: dict[str, Tensor]

    def loss(self, network: nn.Module, rows: Tensor) -> Tensor:
        return F.mse_loss(network(self.x["train"][rows]), self.y["train"][rows])

    def held_out_loss(self, network: nn.Module) -> Tensor:
        return self.error(network, "held_out")

    def error(self, network: nn.Module, part: str) -> Tensor:
        """Return the mean squared error on one part of the data."""
        return F.mse_loss(network(self.x[part]), self.y[part])


class Friedman(Regression):
    """10·sin(π·x₁·x₂) + 20·(x₃ − ½)² + 10·x₄ + 5·x₅, and five uninformative columns."""

    ROWS: ClassVar = {"train": 20_000, "held_out": 500, "test": 10_000}

    def __init__(self, seed: int, device: torch.device, data: None) -> None:
        generator = torch.Generator().manual_seed(1_000 + seed)
        self.x, self.y = {}, {}
        for part, count in self.ROWS.items():
            x = torch.rand(count, 10, generator=generator)
            y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
            noise = torch.randn(count, generator=generator) * (part != "test")
            self.x[part], self.y[part] = (2 * x - 1).to(device), ((y + noise - 14.4) / 4.9).unsqueeze(1).to(device)

    def network(self) -> nn.Module:
        return mlp((10, 64, 64, 64, 1))

    def order(self, steps: int, generator: torch.Generator) -> Tensor:
        return epochs(self.ROWS["train"], steps, 64, generator)

    def score(self, network: nn.Module) -> float:
        """Return the signal-to-error ratio in dB."""
        return -10 * float(torch.log10(self.error(network, "test")))


TABULAR = Task(
    name="tabular",
    title="tabular regression, Friedman 1",
    unit="dB",
    candidates=("relu", "gelu", "silu", "elu", "tanh", "sigmoid", "identity"),
    lr=3e-3,
    problem=Friedman,
)


SIDE, OCTAVES, BATCH, WIDTH = 192, 3, 1024, 128
PARTS = {"train": 0.5, "held_out": 0.05, "test": 0.45}


@lru_cache(maxsize=1)
def photograph() -> Tensor:
    """Return scikit-learn's photograph of a temple at half its size, (3, height, width) from 0 to 1."""
    try:
        from sklearn.datasets import load_sample_image
    except ImportError:
        raise FlexActError("the task coordinates needs scikit-learn: pip install 'flexact[studies]'.") from None
    pixels = torch.tensor(load_sample_image("china.jpg")).permute(2, 0, 1).float() / 255
    return F.avg_pool2d(pixels, 2)


class Pixels(Regression):
    """A crop of 192 × 192 pixels, which depends on the seed. Half of the pixels are training data."""

    def __init__(self, seed: int, device: torch.device, data: None) -> None:
        generator = torch.Generator().manual_seed(2_000 + seed)
        image = photograph()
        top, left = (int(torch.randint(size - SIDE, (), generator=generator)) for size in image.shape[1:])
        colours = image[:, top : top + SIDE, left : left + SIDE].flatten(1).T
        line = torch.linspace(-1, 1, SIDE)
        places = torch.stack(torch.meshgrid(line, line, indexing="ij"), dim=-1).view(-1, 2)
        angles = (places.unsqueeze(-1) * torch.pi * 2.0 ** torch.arange(OCTAVES)).flatten(1)
        inputs = torch.cat([places, angles.sin(), angles.cos()], dim=1)
        sizes = [round(share * len(places)) for share in PARTS.values()]
        chosen = torch.randperm(len(places), generator=generator)[: sum(sizes)].split(sizes)
        self.x = {part: inputs[rows].to(device) for part, rows in zip(PARTS, chosen, strict=True)}
        self.y = {part: (2 * colours[rows] - 1).to(device) for part, rows in zip(PARTS, chosen, strict=True)}

    def network(self) -> nn.Module:
        return mlp((2 + 4 * OCTAVES, *[WIDTH] * 4, 3))

    def order(self, steps: int, generator: torch.Generator) -> Tensor:
        return torch.randint(len(self.x["train"]), (steps, BATCH), generator=generator)

    def score(self, network: nn.Module) -> float:
        """Return the peak signal-to-noise ratio in dB."""
        return -10 * float(torch.log10(self.error(network, "test") / 4))


COORDINATES = Task(
    name="coordinates",
    title="image as a function of coordinates",
    unit="dB",
    candidates=("relu", "gelu", "silu", "sine", "tanh", "sigmoid", "identity"),
    problem=Pixels,
)
