"""A training on scikit-learn's digits, compared with fixed activations and with Flex-Act. About a minute on a CPU.

`train` is a training loop as a function. It gets a plain network and None, or a network that picks and a function that
makes its Schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice, repeat
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flexact

EPOCHS = 40


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train(model: nn.Module, seed: int, make_schedule: Callable[..., flexact.Schedule] | None) -> Iterator[float]:
    images, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = map(torch.tensor, train_test_split(images / 16, labels, test_size=0.25, random_state=seed))
    loader = DataLoader(TensorDataset(x.float(), y), batch_size=64, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    steps = EPOCHS * len(loader)
    schedule = None
    if make_schedule is not None:  # this network picks, which takes further steps
        schedule = make_schedule(network_steps=steps, optimizer=optimizer)
        steps = schedule.total_steps
    batches = chain.from_iterable(repeat(loader))
    for step, (batch, target) in enumerate(islice(batches, steps), start=1):
        loss = nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step(loss)
        if step % (10 * len(loader)) == 0 or step == steps:
            yield accuracy(model, test_x.float(), test_y)


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    predicted = model.eval()(x).argmax(1)
    model.train()
    return 100 * float((predicted == y).float().mean())


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        found = flexact.compare(build, train, candidates=("relu", "gelu", "tanh"), seeds=5, out=Path(folder, "out"))
        print(found)
