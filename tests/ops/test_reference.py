"""Tests of the reference implementation against formulas worked out by hand. Other tests use it as their oracle."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flexact.ops import reference

FIVE = ("relu", "sigmoid", "tanh", "leaky_relu", "identity")
FUNCTIONS = (
    torch.relu,
    torch.sigmoid,
    torch.tanh,
    lambda h: torch.nn.functional.leaky_relu(h, 0.01),
    lambda h: h,
)


def everyone(rows: int = 1, k: int = 5) -> Tensor:
    return torch.ones(rows, k, dtype=torch.bool)


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_two_equal_candidates_are_averaged() -> None:
    x = reference.routed_activation(
        torch.tensor([-1.0, 2.0]), torch.zeros(1, 2), torch.zeros(1, 2), 1.0, ("relu", "tanh"), everyone(k=2)
    )
    torch.testing.assert_close(x, torch.tensor([math.tanh(-1) / 2, (2 + math.tanh(2)) / 2]))


def test_the_blend_is_weighted_by_the_tempered_softmax_of_log_pi_and_noise() -> None:
    h, logits, noise, temperature = doubles(4, 3), doubles(1, 5), doubles(1, 5), 0.7
    pi = [math.exp(v) / sum(math.exp(u) for u in logits[0].tolist()) for v in logits[0].tolist()]
    z = [math.exp((math.log(q) + g) / temperature) for q, g in zip(pi, noise[0].tolist(), strict=True)]
    expected = sum(one / sum(z) * function(h) for one, function in zip(z, FUNCTIONS, strict=True))
    x = reference.routed_activation(h, logits, noise, temperature, FIVE, everyone())
    torch.testing.assert_close(x, expected)


def test_proposition_1_equals_autograd() -> None:
    """∂L/∂log π_k = (p_k/τ)·⟨δ, a_k − x⟩, with log π as the leaf."""
    h, delta, noise, temperature = doubles(6, 4), doubles(6, 4), doubles(1, 5), 0.6
    log_pi = torch.log_softmax(doubles(1, 5), -1).requires_grad_()
    x = reference.routed_activation(h, log_pi, noise, temperature, FIVE, everyone())
    (gradient,) = torch.autograd.grad(x, log_pi, delta)
    p = torch.softmax((log_pi.detach() + noise) / temperature, -1)[0]
    expected = [p[k] / temperature * (delta * (f(h) - x.detach())).sum() for k, f in enumerate(FUNCTIONS)]
    torch.testing.assert_close(gradient[0], torch.stack(expected))


def test_hard_forward_is_the_likeliest_candidate_and_its_gradient_is_the_soft_one() -> None:
    h, noise, delta = doubles(6, 4), doubles(1, 5), doubles(6, 4)
    logits = doubles(1, 5).requires_grad_()
    hard = reference.routed_activation(h, logits, noise, 0.5, FIVE, everyone(), hard=True)
    likeliest = int((torch.log_softmax(logits, -1) + noise).argmax())
    torch.testing.assert_close(hard, FUNCTIONS[likeliest](h))
    soft = reference.routed_activation(h, logits, noise, 0.5, FIVE, everyone())
    for gradients in zip(
        torch.autograd.grad(hard, logits, delta), torch.autograd.grad(soft, logits, delta), strict=True
    ):
        torch.testing.assert_close(*gradients)


def test_a_dropped_candidate_does_not_contribute_whatever_its_logit() -> None:
    h, logits, noise = doubles(5), doubles(1, 5), doubles(1, 5)
    alive = torch.tensor([[True, False, True, True, False]])
    kept = [0, 2, 3]
    x = reference.routed_activation(h, logits, noise, 0.8, FIVE, alive)
    expected = reference.routed_activation(
        h, logits[:, kept], noise[:, kept], 0.8, [FIVE[k] for k in kept], everyone(k=3)
    )
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("channel_dim", [0, 1, 2, -1])
@pytest.mark.parametrize("hard", [False, True])
def test_each_channel_is_routed_by_its_own_row(channel_dim: int, hard: bool) -> None:
    h = doubles(3, 3, 3)
    logits, noise, alive = doubles(3, 5), doubles(3, 5), torch.rand(3, 5) < 0.7
    alive[:, 0] = True
    x = reference.routed_activation(h, logits, noise, 0.5, FIVE, alive, hard, channel_dim)
    for channel in range(3):
        row = slice(channel, channel + 1)
        expected = reference.routed_activation(
            h.select(channel_dim, channel), logits[row], noise[row], 0.5, FIVE, alive[row], hard
        )
        torch.testing.assert_close(x.select(channel_dim, channel), expected)


def test_mean_sensitivity_is_the_mean_absolute_slope() -> None:
    h = doubles(8, 3)
    ours = reference.mean_sensitivity(h, FIVE)
    positive, s = (h > 0).double(), torch.sigmoid(h)
    slopes = (positive, s * (1 - s), 1 - torch.tanh(h) ** 2, positive + 0.01 * (1 - positive), torch.ones_like(h))
    torch.testing.assert_close(ours, torch.stack([slope.mean() for slope in slopes]).view(1, 5))


def test_mean_sensitivity_of_each_channel_equals_that_of_the_channel_alone() -> None:
    h = doubles(4, 3, 2)
    by_channel = reference.mean_sensitivity(h, FIVE, rows=3, channel_dim=1)
    alone = [reference.mean_sensitivity(h[:, channel], FIVE) for channel in range(3)]
    torch.testing.assert_close(by_channel, torch.cat(alone))
