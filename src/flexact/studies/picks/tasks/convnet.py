"""A convolutional network without normalisation on CIFAR-100."""

from __future__ import annotations

from torch import nn

from flexact.studies.picks.task import Task
from flexact.studies.picks.tasks.cifar import Classification, channels_last

CHANNELS = (64, 64, 128, 128, 256, 256)


class Plain(Classification):
    """Six 3 × 3 convolutions, two of them with stride 2, and mean pooling."""

    def network(self) -> nn.Module:
        layers: list[nn.Module] = []
        inside = 3
        for i, outside in enumerate(CHANNELS):
            layers += [nn.Conv2d(inside, outside, 3, 1 + (i in (1, 3)), padding=1), nn.ReLU()]
            inside = outside
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, self.images.classes)]
        return channels_last(nn.Sequential(*layers))


TASK = Task(
    name="convnet",
    title="conv net without normalisation, CIFAR-100",
    unit="%",
    candidates=("relu", "gelu", "silu", "elu", "tanh", "identity", "sigmoid"),
    problem=Plain,
    dataset="cifar100",
    precision="bf16",
)
