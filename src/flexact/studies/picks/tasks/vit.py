"""A small vision transformer on CIFAR-100."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flexact.studies.picks.task import Task
from flexact.studies.picks.tasks.cifar import Classification
from flexact.studies.picks.tasks.transformer import Block

DIM, DEPTH, HEADS, PATCH = 128, 4, 4, 4


class ViT(nn.Module):
    """64 patches of 4 × 4 pixels, learned positions, mean pooling."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((32 // PATCH) ** 2, DIM))
        self.blocks = nn.Sequential(*(Block(DIM, HEADS, causal=False) for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        out: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return out


class Patches(Classification):
    """The task's problem."""

    def network(self) -> nn.Module:
        return ViT(self.images.classes)


TASK = Task(
    name="vit",
    title="small ViT, CIFAR-100",
    unit="%",
    candidates=("relu", "gelu", "silu", "elu", "tanh", "identity", "sigmoid"),
    problem=Patches,
    dataset="cifar100",
    weight_decay=0.05,
    precision="tf32",
    clip=1.0,
)
