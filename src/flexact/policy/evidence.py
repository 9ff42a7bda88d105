"""The evidence that one candidate is better than another: the margins of a round, with their standard errors.

The advantage of a candidate is the derivative of the loss with respect to its weight in the blend, ⟨δ, a_k − x⟩ of
Proposition 1: it is negative if a larger weight would lower the loss. The advantages of a site are scaled to a norm of
1 at each step, so that a few large gradients do not dominate.
The margin between two candidates is the difference of their advantages, averaged over the steps of a round. Divided by
its standard error, it is a test statistic for which of the two lowers the loss more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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


class RunningTensors:
    """Tensors that each step updates in place, since a captured CUDA graph writes to their memory."""

    names: tuple[str, ...]
    """The attributes that are these tensors."""
    prefix = ""
    """The prefix of their names in a state."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.names)

    def to(self, device: torch.device) -> None:
        """Move to the model's device."""
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if tensor.device != device:
                setattr(self, name, tensor.to(device))

    def reset(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors themselves, by name."""
        return {self.prefix + name: getattr(self, name) for name in self.names}


class Evidence(RunningTensors):
    """Sums of the advantages of all rows, (rows, K), and of their products, over the steps since the last `reset`."""

    names = ("count", "total", "products")
    prefix = "evidence_"

    def __init__(self, rows: int, k: int, device: torch.device) -> None:
        self.count = torch.zeros(rows, 1, device=device)
        self.total = torch.zeros(rows, k, device=device)
        self.products = torch.zeros(rows, k, k, device=device)

    def add(self, advantage: Tensor, moves: Tensor | None = None) -> None:
        """Add one step's advantages.

        moves: (rows, 1), positive in the rows that the step moves; None for all. The advantages of the others are 0.
        """
        self.count += 1 if moves is None else moves > 0
        self.total += advantage
        self.products.baddbmm_(advantage.unsqueeze(2), advantage.unsqueeze(1))

    def leads(self, leader: Tensor) -> tuple[Tensor, Tensor]:
        """Return the margin of each row's leader over each candidate, and its standard error, (rows, K) each.

        leader: (rows,), the index of one candidate per row. The error is infinite before the third step.
        """
        n = self.count.clamp(min=3)
        at = leader.view(-1, 1)
        margin = (self.total - self.total.gather(1, at)) / n
        square = torch.diagonal(self.products, dim1=1, dim2=2)
        crossed = self.products.gather(1, at.unsqueeze(2).expand(-1, 1, self.products.shape[2])).squeeze(1)
        variance = (square + square.gather(1, at) - 2 * crossed) / n - margin.square()
        error = (variance.clamp(min=0) / (n - 1)).sqrt()
        enough = self.count >= 3
        return margin.where(enough, 0.0), error.where(enough, torch.inf)
