"""The three lines in a plain training loop, on scikit-learn's digits. About five seconds on a CPU.

A small network picks its activation while it trains. The extracted network is then tested.
"""

from __future__ import annotations

from itertools import chain, islice, repeat

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flexact

EPOCHS = 30


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = map(torch.tensor, train_test_split(images / 16, labels, test_size=0.25, random_state=0))
    loader = DataLoader(TensorDataset(x.float(), y), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    model = flexact.convert(model)  # 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = flexact.Schedule(model, network_steps=EPOCHS * len(loader), optimizer=optimizer)  # 2
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch
    for batch, target in islice(batches, schedule.total_steps):
        loss = nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step(loss)  # 3

    print(flexact.selection(model))
    plain = flexact.extract(model).eval()
    accuracy = (plain(test_x.float()).argmax(1) == test_y).float().mean()
    print(f"\n{plain}\nAccuracy of the plain network on test digits: {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
