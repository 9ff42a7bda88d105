"""What every method works with in one cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from flexact.studies.picks.task import Problem, Task
from flexact.studies.picks.training import Training, activation_names, build, never, put

Picks = Mapping[str, str]
"""Site → candidate."""


@dataclass(frozen=True)
class Setting:
    """A task's problem for one seed on a device."""

    task: Task
    problem: Problem
    seed: int
    device: torch.device
    kept: Path
    """The folder in which plain runs are kept for other cells."""
    name: str
    """Of the cell."""
    stop: Callable[[], bool] = never

    @cached_property
    def sites(self) -> list[str]:
        """The names of the network's activations, in the order of definition."""
        return activation_names(self.task, self.network())

    def network(self) -> nn.Module:
        """The network with its original activation, at its initial weights."""
        return build(self.task, self.problem, self.seed)

    def everywhere(self, candidate: str) -> dict[str, str]:
        """The picks of a network with one candidate at every site."""
        return dict.fromkeys(self.sites, candidate)

    def plain(self, picks: Picks, steps: int) -> Training:
        """A network with these picks, ready to be trained for so many steps."""
        return self.training(put(self.network(), picks), steps)

    def training(self, network: nn.Module, steps: int) -> Training:
        """Any network of the task, ready to be trained."""
        return Training(self.task, self.problem, network, self.seed, self.device, steps)
