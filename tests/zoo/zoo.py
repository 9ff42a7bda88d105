"""The base of the zoo's models: each has one idiom of writing a forward, and the expected result of its conversion."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Kind = TypeVar("Kind", bound=type)
EXPECTED: dict[type[nn.Module], str | None] = {}
"""None where every activation becomes a site, or a part of the warning that names what is left alone."""


class Animal(nn.Module):
    """Two layers around the activation in `act`."""

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
        """Returns the inputs of the model."""
        return (torch.randn(5, 6),), {}

    def change(self) -> None:
        """Makes a change that a user makes after the conversion."""


def identical(cls: Kind) -> Kind:
    """Declares that every activation becomes a site, and everything else is unchanged."""
    EXPECTED[cls] = None
    return cls


def left_alone(reason: str) -> Callable[[Kind], Kind]:
    """Declares that an activation is left unchanged, with a warning that names the module and this reason."""

    def note(cls: Kind) -> Kind:
        EXPECTED[cls] = reason
        return cls

    return note
