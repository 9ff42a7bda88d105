"""What the animals of the zoo have in common: one idiom of writing a forward each, and what should become of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Kind = TypeVar("Kind", bound=type)
EXPECTED: dict[type[nn.Module], str | None] = {}
"""None where every activation becomes a site, or a part of the warning that names what is left alone."""


class Animal(nn.Module):
    """Two layers around whatever `act` says."""

    tolerance = 1e-3
    """How far a blend of the original and almost nothing else may be from the original."""
    recomputes = False
    """Whether a part of the forward runs once more in the backward, where the tests' oracle does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 3)
        self.p = 0.5

    def act(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))

    def inputs(self) -> tuple[tuple, dict]:
        """What the animal is called with."""
        return (torch.randn(5, 6),), {}

    def change(self) -> None:
        """What a user changes after the conversion."""


def identical(cls: Kind) -> Kind:
    """Every activation becomes a site, and the rest stays what it was."""
    EXPECTED[cls] = None
    return cls


def left_alone(reason: str) -> Callable[[Kind], Kind]:
    """An activation stays what it was, with a warning that names the module and this reason."""

    def note(cls: Kind) -> Kind:
        EXPECTED[cls] = reason
        return cls

    return note
