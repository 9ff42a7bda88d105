"""The routed activation where a second derivative asks for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexact.candidates import BUILT_IN
from flexact.ops import routed_activation

NAMES = [candidate.name for candidate in BUILT_IN]
KINKS = (0.0, 0.5, -0.5, 1.0, -1.0, -2.0, 3.0, -3.0, 6.0)


def away_from_kinks(size: int) -> Tensor:
    h = torch.linspace(-6.9, 6.9, size, dtype=torch.float64)
    for kink in KINKS:
        h = torch.where((h - kink).abs() < 0.05, h + 0.1, h)
    return h


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_are_the_numerical_ones(name: str) -> None:
    names, tau = (name, "sigmoid" if name == "tanh" else "tanh"), torch.tensor(0.7, dtype=torch.float64)

    def routed(h: Tensor, logits: Tensor) -> Tensor:
        p = torch.softmax(torch.log_softmax(logits.detach(), -1) / tau, -1).view(1, 2)
        return routed_activation(h, logits, p, p, tau, names, (0, 1))[0]

    h = away_from_kinks(12).requires_grad_()
    logits = torch.tensor([0.4, -0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(routed, (h, logits))
