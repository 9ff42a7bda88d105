"""Per-channel picks: each channel of a convolution picks independently. Takes about ten seconds on a CPU.

A site then has one row of logits per channel. The extracted network has a `ChannelPicks` where the channels of a site
picked different functions.
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

    # convert runs a forward with example_inputs to count the channels in dimension channel_dim (1 by default).
    config = flexact.FlexConfig(granularity="channel", candidates=("relu", "silu", "tanh", "sigmoid"))
    model = flexact.convert(model, config=config, example_inputs=x[:1].float())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = flexact.Schedule(model, total_steps=EPOCHS * len(loader), optimizer=optimizer)
    for _ in range(EPOCHS):
        for batch, target in loader:
            loss = nn.functional.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(loss)

    rows = flexact.selection(model)
    print(rows)  # one row per channel, named site:channel
    for site in dict.fromkeys(row.site for row in rows):
        print(f"\nsite {site}: {dict(Counter(row.pick for row in rows if row.site == site))}", end="")
    plain = flexact.extract(model).eval()
    accuracy = (plain(test_x.float()).argmax(1) == test_y).float().mean()
    print(f"\n\n{plain}\nAccuracy of the plain network on test digits: {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
