"""A LightningModule on scikit-learn's digits. Takes about fifteen seconds on a CPU, plus the import of Lightning.

What flexact adds: `convert` and the callback.
"""

from __future__ import annotations

import lightning
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flexact
from flexact.integrations.lightning import FlexActCallback


class Digits(lightning.LightningModule):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 10),
        )
        self.net = flexact.convert(net)  # 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss  # the callback adds flexact.penalty

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.01)


def main() -> None:
    lightning.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    x, test_x, y, test_y = train_test_split(images, torch.tensor(labels), test_size=0.25, random_state=0)
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)

    callback = FlexActCallback()  # 2
    trainer = lightning.Trainer(
        max_epochs=30, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False
    )
    trainer.fit(Digits(), loader)

    print(callback.selection)
    plain = callback.extracted  # a Digits with plain activations
    (tested,) = trainer.test(plain, DataLoader(TensorDataset(test_x, test_y), batch_size=450), verbose=False)
    print(f"\n{plain.net}\nAccuracy of the plain network on test digits: {100 * tested['accuracy']:.1f} %")


if __name__ == "__main__":
    main()
