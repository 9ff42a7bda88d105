"""Many small networks trained at once.

A replica is one linear unit, or one two-layer network, with its own data, its own start and its own batches. R of them are
one network with R channels: every tensor has a replica dimension, the loss is the sum over replicas, and an optimizer that
works element by element trains each as if it were alone. A per-channel `FlexAct` then picks for each replica on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import flexact
from flexact.candidates import lookup
from flexact.layer import FlexAct


@dataclass(frozen=True)
class Task:
    """y = scale·a(slope·x₁) + noise, with distractors beside x₁; or a two-layer teacher whose hidden function is a."""

    slope: float = 5.0
    label_noise: float = 0.0
    distractors: int = 3
    target_scale: float = 1.0
    hidden: int = 0
    samples: int = 1000


@dataclass(frozen=True)
class Cell:
    """One replica: which truth it is to find, from which seed."""

    truth: str
    seed: int


def dataset(task: Task, cell: Cell) -> tuple[Tensor, Tensor]:
    """Inputs (samples, 1 + distractors) and targets (samples,) of one replica."""
    generator = torch.Generator().manual_seed(cell.seed)
    informative = 2 * torch.rand(task.samples, 1, generator=generator) - 1
    x = torch.cat([informative, torch.randn(task.samples, task.distractors, generator=generator)], dim=1)
    y = target(task, cell, x) + task.label_noise * torch.randn(task.samples, generator=generator)
    return x, y


def target(task: Task, cell: Cell, x: Tensor) -> Tensor:
    """The noise-free truth."""
    truth = lookup(cell.truth).function
    if task.hidden == 0:
        return task.target_scale * truth(task.slope * x[:, 0])
    generator = torch.Generator().manual_seed(cell.seed + 1_000_003)
    inner = task.slope * torch.randn(x.shape[1], task.hidden, generator=generator) / math.sqrt(x.shape[1])
    shift = torch.randn(task.hidden, generator=generator)
    outer = torch.randn(task.hidden, generator=generator) / math.sqrt(task.hidden)
    return task.target_scale * truth(x @ inner + shift) @ outer


class Replicas(nn.Module):
    """R networks side by side: x (B, R, d) to predictions (B, R)."""

    def __init__(self, task: Task, cells: list[Cell], activation: nn.Module) -> None:
        super().__init__()
        d, width = 1 + task.distractors, max(task.hidden, 1)
        starts = [_start(cell.seed, d, task.hidden) for cell in cells]
        self.weight = nn.Parameter(torch.stack([start[0] for start in starts]))
        self.bias = nn.Parameter(torch.stack([start[1] for start in starts]))
        self.activation = activation
        self.has_readout = task.hidden > 0
        if self.has_readout:
            self.outer = nn.Parameter(torch.stack([start[2] for start in starts]))
            self.outer_bias = nn.Parameter(torch.zeros(len(cells)))
        assert self.weight.shape == (len(cells), d, width)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("brd,rdh->brh", x, self.weight) + self.bias
        a = self.activation(h)
        if not self.has_readout:
            return a.squeeze(-1)
        return torch.einsum("brh,rh->br", a, self.outer) + self.outer_bias


def _start(seed: int, d: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """torch's own initialisation of a linear layer (and of a readout), from the replica's seed."""
    generator = torch.Generator().manual_seed(seed + 2_000_003)
    width = max(hidden, 1)
    weight = (2 * torch.rand(d, width, generator=generator) - 1) / math.sqrt(d)
    bias = (2 * torch.rand(width, generator=generator) - 1) / math.sqrt(d)
    outer = (2 * torch.rand(width, generator=generator) - 1) / math.sqrt(width)
    return weight, bias, outer
