"""Parts that the regression tasks share: an MLP, and a squared error on three parts of the data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from flexact.studies.picks.task import Problem


def mlp(widths: Sequence[int], activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers between these widths, with an activation after every layer but the last."""
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), activation()]
    return nn.Sequential(*layers[:-1])


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
