"""Many small networks trained at once.

A replica is one linear unit, or one two-layer network, with its own data, initial weights and batches. R replicas form
one network with R channels: every tensor has a replica dimension, and the loss is the sum over replicas. An elementwise
optimizer trains each replica as if it were alone, and a per-channel `FlexAct` picks for each one independently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flexact.candidates import lookup
from flexact.policy.logit_updates import penalty
from flexact.policy.optimizers import param_groups
from flexact.policy.schedule import Schedule
from flexact.routing.layer import FlexAct

BATCH = 32
LEARNING_RATE = 0.01
GRID = 10_001
"""Number of points on x₁ in [−1, 1], ends included. It makes the least errors match the paper's digits."""


@dataclass(frozen=True)
class Task:
    """y = scale·a(slope·x₁) + noise, with distractors as further inputs; or a two-layer teacher with activation a."""

    slope: float = 5.0
    label_noise: float = 0.0
    distractors: int = 3
    target_scale: float = 1.0
    hidden: int = 0
    samples: int = 1000


@dataclass(frozen=True)
class Cell:
    """One replica: the true function to find, and the seed."""

    truth: str
    seed: int


def dataset(task: Task, cell: Cell) -> tuple[Tensor, Tensor]:
    """Return the inputs (samples, 1 + distractors) and targets (samples,) of one replica."""
    generator = torch.Generator().manual_seed(cell.seed)
    informative = 2 * torch.rand(task.samples, 1, generator=generator) - 1
    x = torch.cat([informative, torch.randn(task.samples, task.distractors, generator=generator)], dim=1)
    y = target(task, cell, x) + task.label_noise * torch.randn(task.samples, generator=generator)
    return x, y


def target(task: Task, cell: Cell, x: Tensor) -> Tensor:
    """Return the noise-free targets."""
    truth = lookup(cell.truth).function
    if task.hidden == 0:
        return task.target_scale * truth(task.slope * x[:, 0])
    inner, shift, outer = teacher(task, cell.seed)
    return truth(x @ inner + shift) @ outer


def teacher(task: Task, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights (inner, shift, outer) of a two-layer teacher. The student starts from them and must find the
    hidden activation. From random weights, similar functions would fit the data equally well."""
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    d = 1 + task.distractors
    inner = task.slope * torch.randn(d, task.hidden, generator=generator) / math.sqrt(d)
    shift = torch.randn(task.hidden, generator=generator)
    outer = task.target_scale * torch.randn(task.hidden, generator=generator) / math.sqrt(task.hidden)
    return inner, shift, outer


class Replicas(nn.Module):
    """R independent networks, which map x (B, R, d) to predictions (B, R)."""

    def __init__(self, task: Task, cells: list[Cell], activation: nn.Module) -> None:
        super().__init__()
        d, width = 1 + task.distractors, max(task.hidden, 1)
        initial = [teacher(task, cell.seed) if task.hidden else _initial_weights(cell.seed, d) for cell in cells]
        weights, biases, readouts = (torch.stack(part) for part in zip(*initial, strict=True))
        self.weight, self.bias = nn.Parameter(weights), nn.Parameter(biases)
        self.activation = activation
        self.has_readout = task.hidden > 0
        if self.has_readout:
            self.outer = nn.Parameter(readouts)
            self.outer_bias = nn.Parameter(torch.zeros(len(cells)))
        assert self.weight.shape == (len(cells), d, width)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self.activation, "takes_inputs", False):  # a Kolmogorov-Arnold layer
            h = x
        else:
            h = torch.einsum("brd,rdh->brh", x, self.weight) + self.bias
        a: Tensor = self.activation(h)
        if not self.has_readout:
            return a.squeeze(-1)
        y: Tensor = torch.einsum("brh,rh->br", a, self.outer) + self.outer_bias
        return y


def _initial_weights(seed: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return torch's default initial weights of a linear layer with one unit, and a readout of 1."""
    generator = torch.Generator().manual_seed(seed + 2_000_003)
    weight = (2 * torch.rand(d, 1, generator=generator) - 1) / math.sqrt(d)
    bias = (2 * torch.rand(1, generator=generator) - 1) / math.sqrt(d)
    return weight, bias, torch.ones(1)


@dataclass(frozen=True)
class Trained:
    """The results of R trained replicas, in the order of their cells."""

    mse: list[float]
    """Error against the noise-free truth, on the grid over x₁ (one unit) or on the inputs (two layers)."""
    spread: list[float]
    """The standard deviation of the squared error over that grid, which the paper prints after ±."""
    grid: Tensor
    """x₁, (GRID,)."""
    predictions: Tensor
    """Predictions on the grid with the distractors at 0, (GRID, R)."""


def train(
    task: Task,
    cells: list[Cell],
    activation: nn.Module,
    epochs: int,
    after_epoch: Callable[[int], None] = lambda epoch: None,
    rate: Callable[[float], float] = lambda progress: 1.0,
) -> Trained:
    """Train one replica per cell with Adam. A `FlexAct` follows the schedule of its policy.

    activation: maps (B, R, width) to the same shape; a per-channel `FlexAct`, or any module.
    after_epoch: called with the number of epochs done, 1 to epochs.
    rate: the factor on the learning rate of an epoch, as a function of the completed fraction of the run.
    """
    data = [dataset(task, cell) for cell in cells]
    x, y = torch.stack([inputs for inputs, _ in data], 1), torch.stack([targets for _, targets in data], 1)
    network = Replicas(task, cells, activation)
    optimizer = torch.optim.Adam(param_groups(network, lr=LEARNING_RATE))
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: rate(epoch / epochs))
    batches = math.ceil(task.samples / BATCH)
    schedule = Schedule(network, epochs * batches) if isinstance(activation, FlexAct) else None
    shuffles = {cell.seed: torch.Generator().manual_seed(cell.seed + 3_000_003) for cell in cells}
    for epoch in range(1, epochs + 1):
        orders = {seed: torch.randperm(task.samples, generator=shuffle) for seed, shuffle in shuffles.items()}
        order = torch.stack([orders[cell.seed] for cell in cells], 1)
        epoch_x, epoch_y = x.gather(0, order.unsqueeze(-1).expand_as(x)), y.gather(0, order)
        for batch_x, batch_y in zip(epoch_x.split(BATCH), epoch_y.split(BATCH), strict=True):
            loss = (network(batch_x) - batch_y).square().mean(0).sum() + penalty(network)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
        rates.step()
        after_epoch(epoch)
    return _measured(task, cells, network.eval(), x)


def _measured(task: Task, cells: list[Cell], network: Replicas, x: Tensor) -> Trained:
    grid = torch.linspace(-1, 1, GRID)
    on_grid = torch.zeros(GRID, len(cells), x.shape[2])
    on_grid[:, :, 0] = grid.unsqueeze(1)
    inputs = x if task.hidden else on_grid
    with torch.no_grad():
        truth = torch.stack([target(task, cell, inputs[:, i]) for i, cell in enumerate(cells)], 1)
        error = (network(inputs) - truth).square()
        return Trained(error.mean(0).tolist(), error.std(0).tolist(), grid, network(on_grid))
