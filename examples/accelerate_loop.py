"""Train with Hugging Face accelerate, stop half-way and resume. Takes about five seconds on a CPU.

Run it directly or with `accelerate launch`; all ranks make the same picks. The model is converted before `prepare`, the
schedule is registered so that `save_state` and `load_state` include it, and the unwrapped model is extracted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flexact

EPOCHS = 30


class Run:
    """Everything that a program builds before it starts or resumes a run."""

    def __init__(self, data: TensorDataset) -> None:
        set_seed(0)
        self.accelerator = Accelerator(gradient_accumulation_steps=2)
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        net = flexact.convert(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
        loader = DataLoader(data, batch_size=32, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(net, optimizer, loader)
        steps = -(-len(self.loader) // self.accelerator.gradient_accumulation_steps)  # optimizer steps per epoch
        self.schedule = flexact.Schedule(net, total_steps=EPOCHS * steps, optimizer=optimizer)
        self.accelerator.register_for_checkpointing(self.schedule)

    def train(self, epochs: Iterable[int]) -> None:
        self.model.train()
        for epoch in epochs:
            self.loader.set_epoch(epoch)
            for batch, target in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = nn.functional.cross_entropy(self.model(batch), target) + flexact.penalty(self.model)
                    self.accelerator.backward(loss)
                    self.optimizer.step()  # accelerate skips it until the gradients are accumulated
                    self.optimizer.zero_grad()
                if self.accelerator.sync_gradients:  # the optimizer has made a step
                    self.schedule.step(loss)

    @property
    def network(self) -> Any:
        return self.accelerator.unwrap_model(self.model)


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    x, test_x, y, test_y = train_test_split(images, labels, test_size=0.25, random_state=0)

    with tempfile.TemporaryDirectory() as own:
        first = Run(TensorDataset(x, y))
        (folder,) = broadcast_object_list([own])  # the folder of the first rank
        first.train(range(12))
        first.accelerator.save_state(folder)

        second = Run(TensorDataset(x, y))
        accelerator = second.accelerator
        accelerator.load_state(folder)
        accelerator.wait_for_everyone()
    second.train(range(12, EPOCHS))

    accelerator.print(flexact.selection(second.network))
    plain = flexact.extract(second.network).cpu().eval()
    accuracy = (plain(test_x).argmax(1) == test_y).float().mean()
    accelerator.print(f"\n{plain}\nAccuracy of the plain network on test digits: {100 * accuracy:.1f} %")
    accelerator.end_training()


if __name__ == "__main__":
    main()
