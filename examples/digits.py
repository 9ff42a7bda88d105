"""The four lines in a plain training loop, on scikit-learn's digits. About two seconds on a CPU.

Every hidden layer of a small network picks its activation while it trains; then the plain network is tested.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flexact

EPOCHS = 20


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = map(torch.tensor, train_test_split(images / 16, labels, test_size=0.25, random_state=0))
    loader = DataLoader(TensorDataset(x.float(), y), batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    # By default identity is a candidate, too. Digits are so nearly linear that it would win, and leave a linear model.
    config = flexact.FlexConfig(candidates=("relu", "gelu", "silu", "tanh"))
    model = flexact.convert(model, config=config)  # 1
    optimizer = torch.optim.AdamW(flexact.param_groups(model, weight_decay=0.01), lr=3e-3)  # 2
    schedule = flexact.Schedule(model, total_steps=EPOCHS * len(loader))  # 3
    for _ in range(EPOCHS):
        for batch, target in loader:
            loss = nn.functional.cross_entropy(model(batch), target) + flexact.penalty(model)  # 4
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    print(flexact.selection(model))
    plain = flexact.extract(model).eval()
    accuracy = (plain(test_x.float()).argmax(1) == test_y).float().mean()
    print(f"\n{plain}\nAccuracy of the plain network on test digits: {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
