"""The unit of nmODE, a neural memory ODE (Yi, Artificial Intelligence Review 56, 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from flexact.baselines.learnable import Learnable

STEPS = 8
"""Runge-Kutta steps; the error of p(1) is below 10⁻⁵."""


class NeuralMemoryUnit(Learnable):
    """w·p(1) + v, where dp/dt = −p + sin²(p + z) and p(0) = 0, with w initialised to 1 and v to 0.

    Two parameters. The memory neuron p itself has none: nmODE learns the maps to its input and from its output. v and w
    are that output map for one unit; without it, the output would stay in [0, 1].
    """

    start = (1.0, 0.0)

    @staticmethod
    def function(z: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return scale * memory(z) + shift


def memory(gamma: Tensor, steps: int = STEPS) -> Tensor:
    """Return p(1) for dp/dt = −p + sin²(p + γ) and p(0) = 0, by the classical Runge-Kutta method of order 4."""
    h, p = 1 / steps, torch.zeros_like(gamma)
    for _ in range(steps):
        k1 = _rate(p, gamma)
        k2 = _rate(p + h / 2 * k1, gamma)
        k3 = _rate(p + h / 2 * k2, gamma)
        k4 = _rate(p + h * k3, gamma)
        p = p + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return p


def _rate(p: Tensor, gamma: Tensor) -> Tensor:
    return torch.sin(p + gamma).square() - p
