"""An MLP of 16 layers without normalisation on small CIFAR-100 images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from flexact.studies.picks.task import Task
from flexact.studies.picks.tasks.cifar import Classification
from flexact.studies.picks.tasks.regression import mlp

WIDTH, LAYERS, SIDE = 128, 16, 8


class Deep(Classification):
    """Images of 8 × 8 pixels as vectors."""

    def network(self) -> nn.Module:
        return mlp((3 * SIDE * SIDE, *[WIDTH] * LAYERS, self.images.classes))

    def prepared(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, x.shape[-1] // SIDE).flatten(1)


TASK = Task(
    name="deep-mlp",
    title="16-layer MLP without normalisation, CIFAR-100",
    unit="%",
    candidates=("relu", "gelu", "silu", "elu", "selu", "tanh", "sigmoid"),
    problem=Deep,
    dataset="cifar100",
)
