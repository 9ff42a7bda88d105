"""Picks by channel: each channel of a convolution picks for itself. About ten seconds on a CPU.

A site then has one row of logits a channel, and the extracted network has a `ChannelPicks` where channels differ.
"""

from __future__ import annotations

from collections import Counter

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
    images = images.reshape(-1, 1, 8, 8) / 16
    x, test_x, y, test_y = map(torch.tensor, train_test_split(images, labels, test_size=0.25, random_state=0))
    loader = DataLoader(TensorDataset(x.float(), y), batch_size=64, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )

    # A forward with example_inputs tells how many channels there are; channel_dim says where they are (1 by default).
    config = flexact.FlexConfig(granularity="channel", candidates=("relu", "silu", "tanh", "sigmoid"))
    model = flexact.convert(model, config=config, example_inputs=x[:1].float())
    optimizer = torch.optim.AdamW(flexact.param_groups(model, weight_decay=0.01), lr=3e-3)
    schedule = flexact.Schedule(model, total_steps=EPOCHS * len(loader), optimizer=optimizer)
    for _ in range(EPOCHS):
        for batch, target in loader:
            loss = nn.functional.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(loss)

    rows = flexact.selection(model)
    print(rows)  # a row a channel: site:channel
    for site in dict.fromkeys(row.site for row in rows):
        print(f"\nsite {site}: {dict(Counter(row.pick for row in rows if row.site == site))}", end="")
    plain = flexact.extract(model).eval()
    accuracy = (plain(test_x.float()).argmax(1) == test_y).float().mean()
    print(f"\n\n{plain}\nAccuracy of the plain network on test digits: {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
