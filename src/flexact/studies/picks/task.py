"""Tasks of the benchmark. A new task is one file in `tasks/`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flexact.studies.cuda_graph import autocast


class Problem(ABC):
    """The data of a task on a device for one seed. All randomness depends only on the seed."""

    @abstractmethod
    def network(self) -> nn.Module:
        """Return a network on the CPU whose activations are modules. Called after torch's seed was set."""

    @abstractmethod
    def order(self, steps: int, generator: torch.Generator) -> Tensor:
        """Return the data indices of each step: an integer tensor on the CPU with one row per step."""

    @abstractmethod
    def loss(self, network: nn.Module, rows: Tensor) -> Tensor:
        """Return the training loss of one step. It must not synchronize, because it is captured in a CUDA graph."""

    @abstractmethod
    def held_out_loss(self, network: nn.Module) -> Tensor:
        """Return the loss on held-out data, which the race uses."""

    @abstractmethod
    def score(self, network: nn.Module) -> float:
        """Return the score on the test data; higher is better."""


@dataclass(frozen=True)
class Task:
    """A task of the benchmark."""

    name: str
    title: str
    unit: str
    """The unit of the score."""
    candidates: tuple[str, ...]
    """The candidates; the original activation comes first."""
    problem: Callable[[int, torch.device, Any], Problem]
    """Builds the problem from seed, device and the data set; None if it makes its own data."""
    steps: int = 8_000
    """Steps of a plain run."""
    lr: float = 1e-3
    """The highest learning rate. It falls to 0 along a cosine; with AdamW, a warm-up comes first."""
    dataset: str = ""
    """The data set that it needs; empty if it makes its own data."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """The optimizer; SGD has a Nesterov momentum of 0.9."""
    weight_decay: float = 0.0
    precision: str = "float32"
    """Precision of matrix products on a GPU: "float32", "tf32" or "bf16" (by autocast)."""
    clip: float | None = None
    """Maximum norm of the gradient."""
    network: str | None = None
    """Tasks with the same name here differ only in their candidates, so they share cached plain runs."""

    @property
    def original(self) -> str:
        """The activation of the network before picking."""
        return self.candidates[0]

    def make_optimizer(self, groups: list[dict[str, Any]], lr: Tensor, device: torch.device) -> Optimizer:
        """Return an optimizer whose step can be captured; it reads `lr` on the device at every step."""
        on_gpu = device.type == "cuda"
        if self.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True, fused=True)
        return torch.optim.AdamW(groups, lr=lr, fused=True, capturable=on_gpu)

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return autocast for a forward pass."""
        return autocast(device, self.precision == "bf16")

    @contextmanager
    def matrix_products(self, device: torch.device) -> Iterator[None]:
        """Allow TF32 on a GPU during forward and backward passes if the task uses it."""
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = device.type == "cuda" and self.precision == "tf32"
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
