"""The Gumbel softmax: noise that is determined by a seed and a step, and the probabilities of logits."""

from __future__ import annotations

import torch
from torch import Tensor


def gumbel_noise(rows: int, k: int, seed: int, step: int) -> Tensor:
    """Return (rows, k) Gumbel(0, 1) numbers that depend only on the seed and the step.

    They are drawn on the CPU in float64, so that they are the same on every device. u is clamped away from 0 and 1, so
    that −log(−log u) is finite.
    """
    generator = torch.Generator("cpu").manual_seed(_mixed(seed, step))
    u = torch.rand(rows, k, generator=generator, dtype=torch.float64, device="cpu").clamp_(1e-12, 1 - 1e-12)
    return -(-u.log()).log()


def _mixed(seed: int, step: int) -> int:
    """Hash a seed and a step into 63 bits (the finaliser of splitmix64), so that neighbouring seeds share no noise."""
    z = (seed * 0x9E3779B97F4A7C15 + step * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) >> 1


def log_pi(logits: Tensor, alive: Tensor) -> Tensor:
    """Return log π over the candidates that are alive; −∞ for the others."""
    return torch.log_softmax(logits.masked_fill(~alive, -torch.inf), dim=-1)


def probabilities(log_pi: Tensor, noise: Tensor | None, temperature: Tensor) -> Tensor:
    """Return p = softmax((log π + g)/τ)."""
    return torch.softmax((log_pi if noise is None else log_pi + noise) / temperature, dim=-1)
