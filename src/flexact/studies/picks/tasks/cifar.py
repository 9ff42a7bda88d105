"""CIFAR-100 for the image tasks: 49,000 training images, 1,000 held-out images, 10,000 test images."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexact.errors import FlexActError
from flexact.studies.cifar_data.augment import DRAWS, augmented, normalised
from flexact.studies.cifar_data.data import Images, load
from flexact.studies.picks.task import Problem

HELD_OUT = 0.02
"""The share of the training images that is held out: the last ones."""


@lru_cache(maxsize=1)
def images_on(device: torch.device, data: Path | None) -> Images:
    """Return the data set on a device. It is read once per process."""
    if data is None:
        raise FlexActError("the image tasks need CIFAR-100: give its folder with --data.")
    return load("cifar100", data, complete=False).to(device)


def epochs(count: int, steps: int, batch: int, generator: torch.Generator) -> Tensor:
    """Return (steps, batch) indices of `count` items in a new order per epoch. Partial batches are dropped."""
    batch = min(batch, count)
    per_epoch = count // batch
    orders = [torch.randperm(count, generator=generator)[: per_epoch * batch] for _ in range(-(-steps // per_epoch))]
    return torch.cat(orders).view(-1, batch)[:steps]


def channels_last(network: nn.Module) -> nn.Module:
    """Return the network in channels-last layout, which a GPU's tensor cores need."""
    untyped: Any = network  # torch's stubs lack this argument
    converted: nn.Module = untyped.to(memory_format=torch.channels_last)
    return converted


class Classification(Problem):
    """Image classification with random crops and flips."""

    batch = 128

    def __init__(self, seed: int, device: torch.device, data: Path | None) -> None:
        self.images = images_on(device, data)
        self.count = round(len(self.images.train_y) * (1 - HELD_OUT))
        self._mean, self._std = (torch.tensor(values, device=device) for values in (self.images.mean, self.images.std))

    def order(self, steps: int, generator: torch.Generator) -> Tensor:
        chosen = epochs(self.count, steps, self.batch, generator)
        return torch.stack([chosen, torch.randint(DRAWS, chosen.shape, generator=generator)], dim=1)

    def loss(self, network: nn.Module, rows: Tensor) -> Tensor:
        images, draws = self.images.train_x.index_select(0, rows[0]), rows[1]
        answers = network(self.prepared(augmented(images, self._mean, self._std, draws)))
        return F.cross_entropy(answers, self.images.train_y.index_select(0, rows[0]))

    def held_out_loss(self, network: nn.Module) -> Tensor:
        answers = network(self._inputs(self.images.train_x[self.count :]))
        return F.cross_entropy(answers, self.images.train_y[self.count :])

    def score(self, network: nn.Module) -> float:
        """Return the accuracy in percent."""
        parts = [network(self._inputs(part)).argmax(1) for part in self.images.test_x.split(1000)]
        return 100 * float((torch.cat(parts) == self.images.test_y).float().mean())

    def _inputs(self, images: Tensor) -> Tensor:
        return self.prepared(normalised(images, self._mean, self._std))

    def prepared(self, x: Tensor) -> Tensor:
        """Return the network's inputs, from normalised images."""
        return x
