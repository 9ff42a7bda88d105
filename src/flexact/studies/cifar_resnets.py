"""ResNets for 32×32 images: torchvision's basic blocks behind a 3×3 stem without max-pooling.

As in torchvision, a block calls one module, `relu`, twice, so that the two calls are one site. The stem has its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

BLOCKS: dict[str, tuple[int, ...]] = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
"""The paper's networks, by their number of blocks per stage."""


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        x = self.relu(out)
        return x


class ResNet(nn.Module):
    """Stages of basic blocks; each stage but the first halves the image and doubles the channels.

    blocks: the number of blocks of each stage, for at most four stages. width: channels of the first stage.
    """

    def __init__(self, blocks: Sequence[int], classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        stages: list[nn.Module] = []
        in_channels = width
        for stage, count in enumerate(blocks):
            out_channels = width * 2**stage
            own = []
            for i in range(count):
                own.append(BasicBlock(in_channels, out_channels, 2 if stage > 0 and i == 0 else 1))
                in_channels = out_channels
            stages.append(nn.Sequential(*own))
        stages += [nn.Identity() for _ in range(4 - len(stages))]
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(in_channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        x = torch.nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)
        out: Tensor = self.fc(x)
        return out
