"""A timm model whose blocks pick their activations, on scikit-learn's digits. Takes about ten seconds on a CPU.

ResNet-10-T starts from random weights, so the example runs offline. To fine-tune, set `pretrained=True` and use your
own data. `init="original"` starts every site at its original activation, which pretrained weights need. Picking needs
more steps than this example has, so the Schedule warns.
"""

from __future__ import annotations

import timm
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flexact

EPOCHS = 3


def main() -> None:
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    images = nn.functional.interpolate(images, size=16, mode="bilinear")
    x, test_x, y, test_y = train_test_split(images, torch.tensor(labels), test_size=0.25, random_state=0)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, drop_last=True)
    model = timm.create_model("resnet10t", pretrained=False, in_chans=1, num_classes=10)

    config = flexact.FlexConfig(candidates=("relu", "gelu", "silu", "tanh"), init="original")
    model = flexact.convert(model, where="layer*", config=config, example_inputs=x[:2])  # the blocks, not the stem
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = flexact.Schedule(model, total_steps=EPOCHS * len(loader), optimizer=optimizer)
    for epoch in range(EPOCHS):
        for batch, target in loader:
            loss = nn.functional.cross_entropy(model(batch), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(loss)
        print(f"epoch {epoch + 1}: loss {loss:.3f}, {'committed' if schedule.committed else 'still picking'}")

    print(flexact.selection(model))
    plain = flexact.extract(model).eval()  # an ordinary timm model, to save or export
    with torch.no_grad():
        accuracy = (plain(test_x).argmax(1) == test_y).float().mean()
    print(f"\nAccuracy of the plain {type(plain).__name__} on test digits: {100 * accuracy:.1f} %")


if __name__ == "__main__":
    main()
