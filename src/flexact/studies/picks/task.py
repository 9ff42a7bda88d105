"""What a task of the benchmark is. A new one is one file in `tasks/`, named there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Problem(ABC):
    """A task with its data on a device, for one seed: what is split or drawn depends on the seed alone."""

    @abstractmethod
    def network(self) -> nn.Module:
        """A network with the original activation, as modules. Called after torch's seed was set; on the CPU."""

    @abstractmethod
    def order(self, steps: int, generator: torch.Generator) -> Tensor:
        """Which data each step takes: an integer tensor on the CPU with one row per step."""

    @abstractmethod
    def loss(self, network: nn.Module, rows: Tensor) -> Tensor:
        """The training loss of one step. It must not wait for the device: a CUDA graph holds it."""

    @abstractmethod
    def held_out_loss(self, network: nn.Module) -> Tensor:
        """The loss on data that is neither trained on nor scored, for the race."""

    @abstractmethod
    def score(self, network: nn.Module) -> float:
        """On the test data; higher is better."""


@dataclass(frozen=True)
class Task:
    """A task of the benchmark."""

    name: str
    title: str
    unit: str
    """Of the score."""
    candidates: tuple[str, ...]
    """The original activation first."""
    steps: int
    """Of a plain run."""
    lr: float
    """The highest learning rate; it falls to 0 along a cosine, with AdamW after a warm-up."""
    problem: Callable[[int, torch.device, Path | None], Problem]
    """Builds the problem of a seed on a device; the path is the folder of the data sets."""
    dataset: str | None = None
    """The data set that it reads from the folder; None where it makes its own data."""
    optimizer: str = "adamw"
    """"adamw" or "sgd" (Nesterov, momentum 0.9)."""
    weight_decay: float = 0.0
    precision: str = "float32"
    """Of a GPU's matrix products: "float32", "tf32" or "bf16" (by autocast)."""
    clip: float | None = None
    """The largest norm of the gradient."""
    network: str | None = None
    """Tasks that share a name here differ in their candidates alone: a network that one trained is not trained again
    for the other."""

    @property
    def original(self) -> str:
        """The candidate that the network has before anything picks."""
        return self.candidates[0]

    def set_up(self, seed: int, device: torch.device, data: Path | None) -> Problem:
        """The problem of a seed."""
        return self.problem(seed, device, data)

    def make_optimizer(self, groups: list[dict[str, Any]], lr: Tensor, device: torch.device) -> Optimizer:
        """An optimizer whose step a CUDA graph can hold; `lr` is read on the device at every step."""
        on_gpu = device.type == "cuda"
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True, fused=True)
        return torch.optim.AdamW(groups, lr=lr, fused=True, capturable=on_gpu)

    def autocast(self, device: torch.device) -> torch.autocast:
        """For a forward pass. Without the cache of cast weights, which must not outlive a capture."""
        half = device.type == "cuda" and self.precision == "bf16"
        return torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False)

    @contextmanager
    def matrix_products(self, device: torch.device) -> Iterator[None]:
        """For forward and backward passes: lets a GPU multiply in TF32 where the task has it."""
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = device.type == "cuda" and self.precision == "tf32"
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
