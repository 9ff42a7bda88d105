"""The setting of one cell, which all methods use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from flexact.candidates import lookup
from flexact.errors import FlexActError
from flexact.studies.picks.task import Problem, Task
from flexact.studies.picks.training import Training, never, number, put

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
    """The folder of cached plain runs."""
    name: str
    """The name of the cell."""
    stop: Callable[[], bool] = never

    @cached_property
    def sites(self) -> list[str]:
        """The names of the network's activations, in the order of definition."""
        kind = type(lookup(self.task.original).module())
        found = [name for name, module in self.network().named_modules() if type(module) is kind]
        if not found:
            raise FlexActError(
                f"the network of the task {self.task.name} has no {kind.__name__} module. Its first candidate, here "
                f"{self.task.original}, must be the network's original activation: put that one first."
            )
        return found

    def network(self) -> nn.Module:
        """Return the network with its original activation, with the same weights for every method of a seed."""
        torch.manual_seed(number("weights", self.seed))
        return self.problem.network()

    def everywhere(self, candidate: str) -> dict[str, str]:
        """Return picks with one candidate at every site."""
        return dict.fromkeys(self.sites, candidate)

    def plain(self, picks: Picks, steps: int) -> Training:
        """Return the training of a network with these picks."""
        return self.training(put(self.network(), picks), steps)

    def training(self, network: nn.Module, steps: int) -> Training:
        """Return the training of a network of this task."""
        return Training(self.task, self.problem, network, self.seed, self.device, steps)
