"""The step of paced logits, which is the same for every optimizer, loss scale and length of run.

A site's logit gradient is averaged over recent steps and divided by its running root-mean-square, so that its
consistency counts and its magnitude does not. The step size follows from the length of a round: in one elimination
round a logit can move by `Policy.pace`, once the weights have settled.
"""

from __future__ import annotations

import torch
from torch import Tensor

MEAN_DECAY = 0.9
SQUARE_DECAY = 0.99
_TINY = torch.finfo(torch.float32).tiny


class RunningGradient:
    """The running mean and root-mean-square of the logit gradients of all sites, (rows, K), reset each round."""

    def __init__(self, rows: int, k: int, device: torch.device) -> None:
        self.mean = torch.zeros(rows, k, device=device)
        # In double precision, so that the squares of small gradients do not underflow.
        self.square = torch.zeros(rows, 1, dtype=torch.float64, device=device)
        # Bias-correction weights of the running averages; they approach 1. Each row has its own pair, so that the
        # programs of a kernel, which process different rows, do not share them.
        self.weights = torch.zeros(rows, 2, device=device)
        self._rates = 1 - torch.tensor([MEAN_DECAY, SQUARE_DECAY], device=device)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The mean, the square and the weights."""
        return self.mean, self.square, self.weights

    def to(self, device: torch.device) -> None:
        """Move to the model's device."""
        if self.mean.device != device:
            self.mean, self.square, self.weights = (tensor.to(device) for tensor in self.tensors)
            self._rates = self._rates.to(device)

    def update(self, gradient: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
        """Add a gradient; return the mean (rows, K) and the root-mean-square of each row (rows, 1), bias-corrected."""
        square = gradient.double().square().sum(-1, keepdim=True) / alive.sum(-1, keepdim=True).clamp(min=1)
        self.mean.lerp_(gradient, 1 - MEAN_DECAY)
        self.square.lerp_(square, 1 - SQUARE_DECAY)
        self.weights.lerp_(torch.ones_like(self.weights), self._rates)
        mean_weight, square_weight = self.weights.split(1, dim=1)
        return self.mean / mean_weight, (self.square / square_weight).sqrt().float().clamp(min=_TINY)

    def reset(self) -> None:
        for tensor in self.tensors:
            tensor.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        return {"mean": self.mean, "square": self.square, "weights": self.weights}
