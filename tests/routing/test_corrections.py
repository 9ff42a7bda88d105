"""Tests of the corrections, each against its explicit formula."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexact.routing import corrections

seeds = st.integers(0, 2**32)


def doubles(seed: int, rows: int = 3, k: int = 5) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def everyone(rows: int = 3, k: int = 5) -> Tensor:
    return torch.ones(rows, k, dtype=torch.bool)


def test_target_is_the_softmax_of_minus_sensitivity_over_lambda() -> None:
    sensitivity = torch.tensor([[0.5, 0.1, 1.0]])
    weights = [math.exp(-g / 0.3) for g in (0.5, 0.1, 1.0)]
    expected = torch.tensor([[w / sum(weights) for w in weights]])
    torch.testing.assert_close(corrections.target(sensitivity, 0.3, everyone(1, 3)), expected)


def test_target_leaves_out_dropped_candidates() -> None:
    alive = torch.tensor([[True, False, True]])
    target = corrections.target(torch.tensor([[1.0, 0.0, 1.0]]), 0.3, alive)
    assert target.tolist() == [[0.5, 0.0, 0.5]]


@given(seed=seeds)
def test_kl_equals_torchs(seed: int) -> None:
    target, log_q = torch.softmax(doubles(seed), -1), torch.log_softmax(doubles(seed + 1), -1)
    expected = torch.nn.functional.kl_div(log_q, target, reduction="none").sum(-1)
    torch.testing.assert_close(corrections.kl(target, log_q), expected)


def test_kl_of_a_distribution_to_itself_is_zero_also_with_zero_probabilities() -> None:
    target = torch.tensor([[0.5, 0.0, 0.5], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(corrections.kl(target, target.log()), torch.zeros(2))


@settings(max_examples=50)
@given(seed=seeds, temperature=st.sampled_from([0.01, 0.1, 1.0, 4.0]), drop=st.booleans())
def test_proposition_2(seed: int, temperature: float, drop: bool) -> None:
    """The gradient of KL(p̃ ‖ p) with respect to log π is (p − p̃)/τ, with p = softmax((log π + g)/τ)."""
    alive = everyone()
    if drop:
        alive[0, 1] = alive[2, 4] = False
    noise = doubles(seed + 1)
    target = corrections.target(doubles(seed + 2).abs(), 0.5, alive)
    log_pi = torch.log_softmax(doubles(seed).masked_fill(~alive, -torch.inf), -1).requires_grad_()
    log_p = torch.log_softmax((log_pi + noise) / temperature, -1)
    (gradient,) = torch.autograd.grad(corrections.kl(target, log_p).sum(), log_pi)
    torch.testing.assert_close(gradient, (log_p.detach().exp() - target) / temperature)


@given(seed=seeds, bound=st.floats(0.01, 10))
def test_clipping_bounds_the_norm_and_keeps_the_direction(seed: int, bound: float) -> None:
    gradient = doubles(seed)
    clipped = corrections.clip_rows(gradient, bound)
    norm, ours = gradient.norm(dim=-1), clipped.norm(dim=-1)
    torch.testing.assert_close(ours, norm.clamp(max=bound))
    torch.testing.assert_close(clipped / ours.unsqueeze(1), gradient / norm.unsqueeze(1))
    assert torch.equal(clipped[norm <= bound], gradient[norm <= bound])


def test_clipping_a_zero_gradient_leaves_zero() -> None:
    assert not corrections.clip_rows(torch.zeros(2, 3), 1.0).any()


@given(seed=seeds, alpha=st.floats(0.01, 5), size=st.floats(1e-6, 1e6))
def test_relative_kl_adds_the_kl_gradient_in_units_of_the_task_gradient(seed: int, alpha: float, size: float) -> None:
    gradient, q, target = doubles(seed), torch.softmax(doubles(seed + 1), -1), torch.softmax(doubles(seed + 2), -1)
    sizes = torch.full((3, 1), size, dtype=torch.float64)
    widths = torch.tensor([[1], [16], [4]])
    pulled = corrections.relative_kl(gradient, q, target, torch.tensor(alpha, dtype=torch.float64), sizes, widths)
    torch.testing.assert_close(pulled, gradient + alpha * size / widths * (q - target))


FIVE = ("relu", "sigmoid", "tanh", "leaky_relu", "identity")


def blended(h: Tensor, logits: Tensor, hard: bool = False, noise: Tensor | None = None, tau: float = 1.0) -> Tensor:
    rows = logits.shape[0]
    noise = torch.zeros_like(logits) if noise is None else noise
    temperature = torch.tensor(tau, dtype=logits.dtype)
    return corrections.normalised_blend(h, logits.flatten(), everyone(rows), noise, temperature, FIVE, hard, 1)


def unit(value: Tensor, dims: tuple[int, ...]) -> Tensor:
    return value / value.square().sum(dims, keepdim=True).sqrt()


@pytest.mark.parametrize("rows", [1, 3], ids=["layer", "channel"])
def test_output_normalisation_blends_unit_outputs(rows: int) -> None:
    torch.manual_seed(0)
    h, logits, noise = torch.randn(4, 3, 2, dtype=torch.float64), doubles(1, rows), doubles(2, rows)
    p = torch.softmax((torch.log_softmax(logits, -1) + noise) / 0.7, -1)
    dims = (1, 2) if rows == 1 else (2,)
    values = (torch.relu(h), torch.sigmoid(h), torch.tanh(h), torch.nn.functional.leaky_relu(h), h)
    units = [torch.nan_to_num(unit(value, dims)) for value in values]  # relu may be 0 for a whole channel
    expected = sum(p[:, k].view(1, rows, 1) * value for k, value in enumerate(units))
    torch.testing.assert_close(blended(h, logits, noise=noise, tau=0.7), expected)


def test_output_normalisation_has_autograds_gradient() -> None:
    torch.manual_seed(0)
    h = (torch.randn(3, 4, dtype=torch.float64) + 0.01).requires_grad_()
    logits = doubles(1, 1).requires_grad_()
    assert torch.autograd.gradcheck(blended, (h, logits))


def test_hard_output_normalisation_is_the_likeliest_candidate_with_the_soft_gradient() -> None:
    torch.manual_seed(0)
    h, delta = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    logits = torch.tensor([[0.0, 0.0, 2.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    hard, soft = blended(h, logits, hard=True), blended(h, logits)
    torch.testing.assert_close(hard, unit(torch.tanh(h), (1,)))
    torch.testing.assert_close(*(torch.autograd.grad(x, logits, delta)[0] for x in (hard, soft)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_output_normalisation_of_zeros_and_of_large_values_is_finite(dtype: torch.dtype) -> None:
    h = torch.stack([torch.zeros(64), torch.full((64,), 1e4), torch.full((64,), -1e4)]).to(dtype).requires_grad_()
    logits = torch.zeros(1, 5, requires_grad=True)
    x = blended(h, logits)
    assert x.dtype == dtype
    assert all(t.isfinite().all() for t in (x, *torch.autograd.grad(x.float().sum(), (h, logits))))
