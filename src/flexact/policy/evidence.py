"""The running means of the logit gradients, and the evidence of a round: margins with their standard errors.

The advantage of a candidate is the derivative of the loss with respect to its weight in the blend, ⟨δ, a_k − x⟩ of
Proposition 1: it is negative if a larger weight would lower the loss. The advantages of a site are scaled to a norm of
1 at each step, so that a few large gradients do not dominate.

The margin between two candidates is the difference of their advantages, averaged over the steps of a round. Divided by
its standard error, it is a test statistic for which of the two lowers the loss more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

MEAN_DECAY = 0.9
SQUARE_DECAY = 0.99
"""Decay per step of the running mean of the logit gradients, and of that of their squares."""
_SMALLEST_SIZE = torch.finfo(torch.float32).tiny
SIGNIFICANT = 2.0
"""A margin of at least this many standard errors is significant."""


@dataclass(frozen=True)
class Contest:
    """The margin by which a candidate was behind the leader when it was dropped.

    >>> contest = Contest(margin=0.3, standard_error=0.1, steps=100)
    >>> round(contest.z, 6), contest.is_significant, str(contest)
    (3.0, True, '0.30 ± 0.10')
    """

    margin: float
    """A difference of normalised advantages in a blend, and of losses in a trial. It is infinite if the candidate
    diverged, and negative if the candidate was ahead of the original, which was kept for lack of significance."""
    standard_error: float
    steps: int
    """The number of steps that the margin is averaged over."""

    @property
    def z(self) -> float:
        """The margin in standard errors."""
        if self.standard_error == 0:
            return math.copysign(math.inf, self.margin) if self.margin else 0.0
        return self.margin / self.standard_error

    @property
    def is_significant(self) -> bool:
        return self.z >= SIGNIFICANT

    def __str__(self) -> str:
        if not math.isfinite(self.margin):
            return "diverged"
        if not 1e-5 <= self.standard_error < 1e4:
            return f"{self.margin:.3g} ± {self.standard_error:.2g}"
        decimals = max(0, 1 - math.floor(math.log10(self.standard_error)))  # two digits of the error
        return f"{self.margin:.{decimals}f} ± {self.standard_error:.{decimals}f}"


class RoundStatistics:
    """The statistics of all rows in the current round. Each step updates the tensors in place, since a captured CUDA
    graph writes to their memory.

    mean (rows, K), square (rows, 1), weights (rows, 2): the running mean of the logit gradients, that of their squares,
    and the bias-correction weights of both, which approach 1.
    count (rows, 1), total (rows, K), products (rows, K, K): the number of steps, and the sums of the advantages and of
    their products.
    """

    def __init__(self, rows: int, k: int, device: torch.device) -> None:
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)  # the user may have set another default dtype
        self.mean = zeros(rows, k)
        # In double precision, so that the squares of small gradients do not underflow.
        self.square = zeros(rows, 1, dtype=torch.float64)
        # Each row has its own pair, so that the programs of a kernel, which process different rows, do not share them.
        self.weights = zeros(rows, 2)
        self.count = zeros(rows, 1)
        self.total = zeros(rows, k)
        self.products = zeros(rows, k, k)
        self._rates = 1 - torch.tensor([MEAN_DECAY, SQUARE_DECAY], dtype=torch.float32, device=device)
        self._ones = torch.ones_like(self.weights)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order that kernels expect."""
        return self.mean, self.square, self.weights, self.count, self.total, self.products

    def to(self, device: torch.device) -> None:
        """Move to the model's device."""
        if self.mean.device != device:
            vars(self).update({name: tensor.to(device) for name, tensor in vars(self).items()})

    def reset(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors themselves."""
        return {name: tensor for name, tensor in vars(self).items() if not name.startswith("_")}

    def average(self, gradient: Tensor, alive: Tensor, moves: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Add a gradient; return the mean (rows, K) and the root-mean-square of each row (rows, 1), bias-corrected.

        moves: (rows, 1), a mask of the rows to update; None for all.
        """
        square = gradient.double().square().sum(-1, keepdim=True) / alive.sum(-1, keepdim=True)
        averaged = self.mean, self.square, self.weights
        before = [tensor.clone() for tensor in averaged] if moves is not None else []
        self.mean.lerp_(gradient, 1 - MEAN_DECAY)
        self.square.lerp_(square, 1 - SQUARE_DECAY)
        self.weights.lerp_(self._ones, self._rates)
        if moves is not None:
            for now, old in zip(averaged, before, strict=True):
                now.copy_(torch.where(moves, now, old))
        mean_weight, square_weight = self.weights.split_with_sizes([1, 1], dim=1)
        return self.mean / mean_weight, (self.square / square_weight).sqrt().float().clamp_min(_SMALLEST_SIZE)

    def add(self, advantage: Tensor, moves: Tensor | None = None) -> None:
        """Add one step's advantages.

        moves: (rows, 1), positive in the rows that the step moves; None for all. The advantages of the others are 0.
        """
        self.count += 1 if moves is None else moves > 0
        self.total += advantage
        self.products.baddbmm_(advantage.unsqueeze(2), advantage.unsqueeze(1))

    def leads(self, leader: Tensor) -> tuple[Tensor, Tensor]:
        """Return the margin of each row's leader over each candidate, and its standard error, (rows, K) each, on the
        CPU.

        leader: (rows,), the index of one candidate per row, on the CPU. The error is infinite before the third step.
        """
        count, total, products = self.count.cpu(), self.total.cpu(), self.products.cpu()
        n = count.clamp(min=3)
        at = leader.view(-1, 1)
        margin = (total - total.gather(1, at)) / n
        square = torch.diagonal(products, dim1=1, dim2=2)
        crossed = products.gather(1, at.unsqueeze(2).expand(-1, 1, products.shape[2])).squeeze(1)
        variance = (square + square.gather(1, at) - 2 * crossed) / n - margin.square()
        error = (variance.clamp(min=0) / (n - 1)).sqrt()
        enough = count >= 3
        return margin.where(enough, 0.0), error.where(enough, torch.inf)
