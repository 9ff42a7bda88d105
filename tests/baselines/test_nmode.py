"""Tests of nmODE's memory unit against a numerical solver."""

from __future__ import annotations

import numpy as np
import torch
from scipy.integrate import solve_ivp

from flexact.baselines import NeuralMemoryUnit
from flexact.baselines.nmode import memory


def test_the_memory_matches_an_adaptive_solver() -> None:
    inputs = np.linspace(-8, 8, 41)
    found = solve_ivp(lambda _, p: np.sin(p + inputs) ** 2 - p, (0, 1), np.zeros(41), rtol=1e-10, atol=1e-12)
    ours = memory(torch.from_numpy(inputs))
    torch.testing.assert_close(ours, torch.from_numpy(found.y[:, -1]), rtol=0, atol=1e-5)
    finer = memory(torch.from_numpy(inputs), steps=64)
    torch.testing.assert_close(finer, torch.from_numpy(found.y[:, -1]), rtol=0, atol=1e-8)


def test_the_readout_scales_and_shifts_the_memory_and_has_the_only_parameters() -> None:
    unit, z = NeuralMemoryUnit().double(), torch.linspace(-3, 3, 7, dtype=torch.float64)
    torch.testing.assert_close(unit(z), memory(z))
    unit.learned.data = torch.tensor([[-2.0, 5.0]], dtype=torch.float64)
    torch.testing.assert_close(unit(z), 5 - 2 * memory(z))
    assert sum(parameter.numel() for parameter in unit.parameters()) == 2
