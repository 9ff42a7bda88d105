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

from flexact.candidates.registry import lookup
from flexact.policy.logit_updates import penalty
from flexact.policy.optimizers import param_groups
from flexact.policy.schedule import Schedule
from flexact.routing.layer import FlexAct
from flexact.studies.synthetic.options import Cell, Options

BATCH = 32
LEARNING_RATE = 0.01
FALLING_FROM = 5.0
"""Initial learning rate of models that do not pick, relative to models that do."""
SAMPLES = 1000
GRID = 10_001
"""Number of points on x₁ in [−1, 1], ends included. With it, the minimum errors match the paper's digits."""


def dataset(options: Options, cell: Cell) -> tuple[Tensor, Tensor]:
    """Return the inputs (samples, 1 + distractors) and targets (samples,) of one replica."""
    generator = torch.Generator().manual_seed(cell.seed)
    informative = 2 * torch.rand(SAMPLES, 1, generator=generator) - 1
    x = torch.cat([informative, torch.randn(SAMPLES, options.distractors, generator=generator)], dim=1)
    y = target(options, cell, x) + options.label_noise * torch.randn(SAMPLES, generator=generator)
    return x, y


def target(options: Options, cell: Cell, x: Tensor) -> Tensor:
    """Return the noise-free targets."""
    truth = lookup(cell.truth).function
    if options.hidden == 0:
        return options.target_scale * truth(options.slope * x[:, 0])
    inner, shift, outer = teacher(options, cell.seed)
    return truth(x @ inner + shift) @ outer


def teacher(options: Options, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights (inner, shift, outer) of a two-layer teacher. The student starts from them and must find the
    hidden activation. From random weights, similar functions would fit the data equally well."""
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    d = 1 + options.distractors
    inner = options.slope * torch.randn(d, options.hidden, generator=generator) / math.sqrt(d)
    shift = torch.randn(options.hidden, generator=generator)
    outer = options.target_scale * torch.randn(options.hidden, generator=generator) / math.sqrt(options.hidden)
    return inner, shift, outer


class Replicas(nn.Module):
    """R independent networks, which map x (B, R, d) to predictions (B, R)."""

    def __init__(self, options: Options, activation: nn.Module) -> None:
        super().__init__()
        d = 1 + options.distractors
        initial = [
            teacher(options, cell.seed) if options.hidden else _initial_weights(cell.seed, d) for cell in options.cells
        ]
        weights, biases, readouts = (torch.stack(part) for part in zip(*initial, strict=True))
        self.weight, self.bias = nn.Parameter(weights), nn.Parameter(biases)
        self.activation = activation
        self.has_readout = options.hidden > 0
        if self.has_readout:
            self.outer = nn.Parameter(readouts)
            self.outer_bias = nn.Parameter(torch.zeros(len(options.cells)))

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
    """The results of R trained replicas, in the order of their cells.

    They are measured on a grid over x₁ with the distractors at 0 (one unit), or on the inputs (two layers).
    """

    mse: list[float]
    """Error against the noise-free truth."""
    spread: list[float]
    """The standard deviation of the squared error over the points, which the paper prints after ±."""
    predictions: Tensor
    """(points, R)"""
    targets: Tensor
    """(points, R)"""


def train(options: Options, activation: nn.Module, after_epoch: Callable[[int], None] = lambda epoch: None) -> Trained:
    """Train one replica per cell with Adam. A `FlexAct` follows the schedule of its policy.

    activation: maps (B, R, width) to the same shape; a per-channel `FlexAct`, or any module.
    after_epoch: called with the number of epochs done, 1 to epochs.
    """
    data = [dataset(options, cell) for cell in options.cells]
    x, y = torch.stack([inputs for inputs, _ in data], 1), torch.stack([targets for _, targets in data], 1)
    network = Replicas(options, activation)
    optimizer = torch.optim.Adam(param_groups(network, lr=LEARNING_RATE))
    picks = isinstance(activation, FlexAct)
    # Flex-Act trains at a constant rate, as in the paper. The row of a fixed activation or a baseline shows the minimum
    # error that it can reach, so its rate falls to 0. At a constant rate of 0.01, Sigmoid is 2.8 % above its minimum
    # error on Tanh after 100 epochs, because its best weights are infinite.
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda epoch: 1.0 if picks else FALLING_FROM * (1 - epoch / options.epochs)
    )
    schedule = Schedule(network, options.epochs * math.ceil(SAMPLES / BATCH)) if picks else None
    shuffles = {cell.seed: torch.Generator().manual_seed(cell.seed + 3_000_003) for cell in options.cells}
    for epoch in range(1, options.epochs + 1):
        orders = {seed: torch.randperm(SAMPLES, generator=shuffle) for seed, shuffle in shuffles.items()}
        order = torch.stack([orders[cell.seed] for cell in options.cells], 1)
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
    return _measured(options, network.eval(), x)


def _measured(options: Options, network: Replicas, x: Tensor) -> Trained:
    inputs = x
    if options.hidden == 0:
        inputs = torch.zeros(GRID, len(options.cells), x.shape[2])
        inputs[:, :, 0] = torch.linspace(-1, 1, GRID).unsqueeze(1)
    with torch.no_grad():
        predictions = network(inputs)
        targets = torch.stack([target(options, cell, inputs[:, i]) for i, cell in enumerate(options.cells)], 1)
        error = (predictions - targets).square()
    return Trained(error.mean(0).tolist(), error.std(0).tolist(), predictions, targets)
