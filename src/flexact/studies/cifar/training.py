"""One training step: augment, forward, loss, backward, the policy's work on the logits, and the optimizer's step.

If the policy rewinds, a network is trained for the protocol's epochs after the rewind, on top of the picking. Learning
rate, order and crops restart at the rewind. If picking takes longer than these epochs, their order and crops repeat.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flexact import Schedule, penalty
from flexact.studies.cifar.methods import optimizer_groups, picking_sites
from flexact.studies.cifar.protocol import Protocol
from flexact.studies.cifar_data.augment import augmented, epoch_draws
from flexact.studies.cifar_data.data import Images
from flexact.studies.cuda_graph import GraphedTraining, autocast, wait
from flexact.studies.named_seeds import generator_of


class Training(GraphedTraining):
    """The training of a network, step by step, from any step of the run.

    network, images: on the device already.
    """

    def __init__(self, network: nn.Module, images: Images, protocol: Protocol, seed: int, device: torch.device) -> None:
        self.images, self.protocol = images, protocol
        self.steps_per_epoch = len(images.train_y) // protocol.batch
        """An incomplete last batch of an epoch is dropped."""
        self.network_steps = protocol.epochs * self.steps_per_epoch
        """The number of steps that train the final network."""
        super().__init__(network, device, self._steps(seed), [self.lr(step) for step in range(self.network_steps)])
        self.steps_done = 0
        """The number of steps of the whole run, picking included."""
        self.optimizer = torch.optim.SGD(
            optimizer_groups(network, protocol.weight_decay),
            lr=self._lr,
            momentum=protocol.momentum,
            fused=True,  # the only SGD that reads its learning rate on the device without synchronizing
        )
        if picking_sites(network):
            self.schedule = Schedule(network, optimizer=self.optimizer, network_steps=self.network_steps)
        self.total_steps = self.network_steps if self.schedule is None else self.schedule.total_steps
        self._totals = torch.zeros(3, dtype=torch.float64, device=device)

    @property
    def trained_steps(self) -> int:
        """The number of steps that trained the current weights; 0 after a rewind."""
        return self.steps_done if self.schedule is None else self.schedule.trained_steps

    @property
    def is_picking(self) -> bool:
        """Whether the run is before its rewind; always False if the policy does not rewind."""
        rewinds = self.schedule is not None and self.schedule.rewound_at is None
        return rewinds and self.total_steps > self.network_steps

    @property
    def is_done(self) -> bool:
        """Whether the final network is trained."""
        return not self.is_picking and self.trained_steps >= self.network_steps

    def lr(self, step: int) -> float:
        """The learning rate of a step (from 0): a cosine from the protocol's rate to 0 at the end of the last epoch."""
        return self.protocol.lr * 0.5 * (1 + math.cos(math.pi * step / self.network_steps))

    def step(self) -> None:
        """Train for one step, without waiting for the device."""
        if self.trained_steps % self.steps_per_epoch == 0:
            self._totals.zero_()
        self.steps_done += 1
        super().step()

    def totals(self) -> tuple[float, float]:
        """The epoch's mean loss and accuracy so far. Waits for the device."""
        wait(self.device)
        loss, right, steps = self._totals.tolist()
        return loss / steps, right / (steps * self.protocol.batch)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, except the seed."""
        return {
            "steps_done": self.steps_done,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "totals": self._totals,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`."""
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        self._totals.copy_(state["totals"])
        self.steps_done = state["steps_done"]
        self._place.fill_(self.trained_steps % self.network_steps)
        self._forget_graph()

    def autocast(self) -> torch.autocast:
        """bf16 on a GPU if the protocol has it."""
        return autocast(self.device, self.protocol.precision == "bf16")

    def _steps(self, seed: int) -> Tensor:
        """The images and the crops of each step, (steps, 2, batch)."""
        used = self.steps_per_epoch * self.protocol.batch
        orders = [epoch_order(len(self.images.train_y), seed, epoch)[:used] for epoch in range(self.protocol.epochs)]
        draws = [epoch_draws(used, seed, epoch) for epoch in range(self.protocol.epochs)]
        return torch.stack([torch.cat(one).view(-1, self.protocol.batch) for one in (orders, draws)], dim=1)

    def _work(self) -> None:
        images = self.images
        chosen, drawn = self._next_row()
        x = augmented(images.train_x.index_select(0, chosen), images.mean, images.std, drawn)
        y = images.train_y.index_select(0, chosen)
        with deterministic(self.device, self.protocol.benchmark):
            with self.autocast():
                answers = self.network(x)
                loss = F.cross_entropy(answers, y)
                total = loss if self.schedule is None else loss + penalty(self.network)
            total.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()
        with torch.no_grad():
            right = (answers.argmax(1) == y).sum()
            self._totals += torch.stack([self.loss.double(), right.double(), torch.ones_like(self._totals[0])])


def deterministic(device: torch.device, benchmark: bool = False) -> AbstractContextManager[Any]:
    """A context in which cuDNN is deterministic. The setting is global, so no other thread may train inside it.

    benchmark: whether cuDNN times its deterministic algorithms and keeps the fastest one.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=benchmark)


def epoch_order(count: int, seed: int, epoch: int) -> Tensor:
    """The order of the images in an epoch, int64 (count,): the same on every device and in a resumed run.

    >>> epoch_order(4, seed=0, epoch=1)
    tensor([1, 2, 3, 0])
    """
    return torch.randperm(count, generator=generator_of(f"order, seed {seed}, epoch {epoch}"))
