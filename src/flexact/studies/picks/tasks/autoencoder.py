"""An autoencoder of CIFAR-100 images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexact.studies.picks.task import Task
from flexact.studies.picks.tasks.cifar import Classification
from flexact.studies.picks.tasks.regression import mlp

SIDE, WIDTHS = 16, (768, 256, 128, 32, 128, 256, 768)


class Reconstruction(Classification):
    """Images of 16 × 16 pixels through a bottleneck of 32 units, whose code also has an activation."""

    def network(self) -> nn.Module:
        return mlp(WIDTHS)

    def prepared(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, x.shape[-1] // SIDE).flatten(1)

    def loss(self, network: nn.Module, rows: Tensor) -> Tensor:
        x = self._inputs(self.images.train_x.index_select(0, rows[0]))
        return F.mse_loss(network(x), x)

    def held_out_loss(self, network: nn.Module) -> Tensor:
        return self._error(network, self.images.train_x[self.count :])

    def score(self, network: nn.Module) -> float:
        """Return the signal-to-noise ratio in dB."""
        return -10 * float(torch.log10(self._error(network, self.images.test_x)))

    def _error(self, network: nn.Module, images: Tensor) -> Tensor:
        x = self._inputs(images)
        return F.mse_loss(network(x), x) / x.var()


TASK = Task(
    name="autoencoder",
    title="autoencoder, CIFAR-100",
    unit="dB",
    candidates=("relu", "leaky_relu", "relu6", "gelu", "tanh", "identity", "sigmoid"),
    problem=Reconstruction,
    dataset="cifar100",
)
