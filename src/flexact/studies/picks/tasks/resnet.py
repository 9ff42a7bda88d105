"""ResNet-18 on CIFAR-100 for 30 epochs, as two tasks: with four rectifiers, and with bad candidates as well."""

from __future__ import annotations

import dataclasses

from torch import nn

from flexact.studies.cifar_resnets import BLOCKS, ResNet
from flexact.studies.picks.task import Task
from flexact.studies.picks.tasks.cifar import Classification, channels_last

EPOCHS = 30


class ResNet18(Classification):
    """The usual recipe: SGD at 0.1, a cosine, weight decay 5e-4, batches of 128."""

    def network(self) -> nn.Module:
        return channels_last(ResNet(BLOCKS["resnet18"], self.images.classes))


RECTIFIERS = Task(
    name="resnet-rectifiers",
    title="ResNet-18, CIFAR-100, rectifiers",
    unit="%",
    candidates=("relu", "leaky_relu", "gelu", "silu"),
    steps=EPOCHS * (49_000 // ResNet18.batch),
    lr=0.1,
    problem=ResNet18,
    dataset="cifar100",
    optimizer="sgd",
    weight_decay=5e-4,
    precision="bf16",
    network="resnet18",
)
SEVEN = dataclasses.replace(
    RECTIFIERS,
    name="resnet-seven",
    title="ResNet-18, CIFAR-100, seven candidates",
    candidates=("relu", "leaky_relu", "gelu", "silu", "tanh", "identity", "sigmoid"),
)
