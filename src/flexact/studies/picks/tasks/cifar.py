"""The tasks on CIFAR-100: 49,000 training images, 1,000 held-out images, 10,000 test images."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexact.studies.cifar_data.augment import DRAWS, augmented, normalised
from flexact.studies.cifar_data.data import Images
from flexact.studies.cifar_resnets import BLOCKS, ResNet
from flexact.studies.picks.task import Problem, Task
from flexact.studies.picks.tasks.parts import Block, epochs, mlp

HELD_OUT = 0.02
"""The share of the training images that is held out: the last ones."""


@lru_cache(maxsize=1)
def images_on(device: torch.device, images: Images) -> Images:
    """Return the data set on a device. It is copied once per process."""
    return images.to(device)


def channels_last(network: nn.Module) -> nn.Module:
    """Return the network in channels-last layout, which a GPU's tensor cores need."""
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


class Classification(Problem):
    """Image classification with random crops and flips."""

    batch = 128

    def __init__(self, seed: int, device: torch.device, data: Images) -> None:
        self.images = images_on(device, data)
        self.count = round(len(self.images.train_y) * (1 - HELD_OUT))

    def order(self, steps: int, generator: torch.Generator) -> Tensor:
        chosen = epochs(self.count, steps, self.batch, generator)
        return torch.stack([chosen, torch.randint(DRAWS, chosen.shape, generator=generator)], dim=1)

    def loss(self, network: nn.Module, rows: Tensor) -> Tensor:
        images, draws = self.images.train_x.index_select(0, rows[0]), rows[1]
        answers = network(self.prepared(augmented(images, self.images.mean, self.images.std, draws)))
        return F.cross_entropy(answers, self.images.train_y.index_select(0, rows[0]))

    def held_out_loss(self, network: nn.Module) -> Tensor:
        answers = network(self._inputs(self.images.train_x[self.count :]))
        return F.cross_entropy(answers, self.images.train_y[self.count :])

    def score(self, network: nn.Module) -> float:
        """Return the accuracy in percent."""
        parts = [network(self._inputs(part)).argmax(1) for part in self.images.test_x.split(1000)]
        return 100 * float((torch.cat(parts) == self.images.test_y).float().mean())

    def _inputs(self, images: Tensor) -> Tensor:
        return self.prepared(normalised(images, self.images.mean, self.images.std))

    def prepared(self, x: Tensor) -> Tensor:
        """Return the network's inputs, from normalised images."""
        return x


class ResNet18(Classification):
    """The usual recipe for 30 epochs: SGD at 0.1, a cosine, weight decay 5e-4, batches of 128."""

    def network(self) -> nn.Module:
        return channels_last(ResNet(BLOCKS["resnet18"], self.images.classes))


RESNET_RECTIFIERS = Task(
    name="resnet-rectifiers",
    title="ResNet-18, CIFAR-100, rectifiers",
    unit="%",
    candidates=("relu", "leaky_relu", "gelu", "silu"),
    steps=30 * (49_000 // ResNet18.batch),
    lr=0.1,
    problem=ResNet18,
    dataset="cifar100",
    optimizer="sgd",
    weight_decay=5e-4,
    precision="bf16",
    network="resnet18",
)
RESNET_SEVEN = dataclasses.replace(
    RESNET_RECTIFIERS,
    name="resnet-seven",
    title="ResNet-18, CIFAR-100, seven candidates",
    candidates=("relu", "leaky_relu", "gelu", "silu", "tanh", "identity", "sigmoid"),
)


class ViTNetwork(nn.Module):
    """64 patches of 4 × 4 pixels, learned positions, mean pooling."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        dim, depth, heads, patch = 128, 4, 4, 4
        self.patches = nn.Conv2d(3, dim, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((32 // patch) ** 2, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, causal=False) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        out: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return out


class ViT(Classification):
    """A small vision transformer."""

    def network(self) -> nn.Module:
        return ViTNetwork(self.images.classes)


VIT = Task(
    name="vit",
    title="small ViT, CIFAR-100",
    unit="%",
    candidates=("relu", "gelu", "silu", "elu", "tanh", "identity", "sigmoid"),
    problem=ViT,
    dataset="cifar100",
    weight_decay=0.05,
    precision="tf32",
    clip=1.0,
)


class ConvNet(Classification):
    """No normalisation: six 3 × 3 convolutions, two of them with stride 2, and mean pooling."""

    def network(self) -> nn.Module:
        layers: list[nn.Module] = []
        inside = 3
        for i, outside in enumerate((64, 64, 128, 128, 256, 256)):
            layers += [nn.Conv2d(inside, outside, 3, 1 + (i in (1, 3)), padding=1), nn.ReLU()]
            inside = outside
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, self.images.classes)]
        return channels_last(nn.Sequential(*layers))


CONVNET = Task(
    name="convnet",
    title="conv net without normalisation, CIFAR-100",
    unit="%",
    candidates=("relu", "gelu", "silu", "elu", "tanh", "identity", "sigmoid"),
    problem=ConvNet,
    dataset="cifar100",
    precision="bf16",
)


class Pooled(Classification):
    """Images that are averaged to `side` × `side` pixels, as vectors."""

    side: int

    def prepared(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, x.shape[-1] // self.side).flatten(1)


class DeepMLP(Pooled):
    """An MLP of 16 layers without normalisation."""

    side = 8

    def network(self) -> nn.Module:
        return mlp((3 * self.side**2, *[128] * 16, self.images.classes))


DEEP_MLP = Task(
    name="deep-mlp",
    title="16-layer MLP without normalisation, CIFAR-100",
    unit="%",
    candidates=("relu", "gelu", "silu", "elu", "selu", "tanh", "sigmoid"),
    problem=DeepMLP,
    dataset="cifar100",
)


class Reconstruction(Pooled):
    """An autoencoder with a bottleneck of 32 units, whose code also has an activation."""

    side = 16

    def network(self) -> nn.Module:
        return mlp((768, 256, 128, 32, 128, 256, 768))

    def loss(self, network: nn.Module, rows: Tensor) -> Tensor:
        x = self._inputs(self.images.train_x.index_select(0, rows[0]))
        return F.mse_loss(network(x), x)

    def held_out_loss(self, network: nn.Module) -> Tensor:
        return self._error(network, self.images.train_x[self.count :])

    def score(self, network: nn.Module) -> float:
        """Return the signal-to-error ratio in dB."""
        return -10 * float(torch.log10(self._error(network, self.images.test_x)))

    def _error(self, network: nn.Module, images: Tensor) -> Tensor:
        x = self._inputs(images)
        return F.mse_loss(network(x), x) / x.var()


AUTOENCODER = Task(
    name="autoencoder",
    title="autoencoder, CIFAR-100",
    unit="dB",
    candidates=("relu", "leaky_relu", "relu6", "gelu", "tanh", "identity", "sigmoid"),
    problem=Reconstruction,
    dataset="cifar100",
)
