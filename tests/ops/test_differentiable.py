"""Tests of second derivatives of the routed activation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexact.candidates.registry import BUILT_IN
from flexact.ops import derivatives, differentiable, routed_activation
from flexact.ops.blending import Blending

NAMES = [candidate.name for candidate in BUILT_IN]
KINKS = (0.0, 0.5, -0.5, 1.0, -1.0, -2.0, 3.0, -3.0, 6.0)


def away_from_kinks(size: int) -> Tensor:
    h = torch.linspace(-6.9, 6.9, size, dtype=torch.float64)
    for kink in KINKS:
        h = torch.where((h - kink).abs() < 0.05, h + 0.1, h)
    return h


@pytest.mark.parametrize("name", NAMES)
def test_second_derivatives_equal_numerical_ones(name: str) -> None:
    names, tau = (name, "sigmoid" if name == "tanh" else "tanh"), torch.tensor(0.7, dtype=torch.float64)

    def routed(h: Tensor, logits: Tensor) -> Tensor:
        p = torch.softmax(torch.log_softmax(logits.detach(), -1) / tau, -1).view(1, 2)
        return routed_activation(h, logits, p, p, tau, names, (0, 1))[0]

    h = away_from_kinks(12).requires_grad_()
    logits = torch.tensor([0.4, -0.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(routed, (h, logits))


def test_a_built_in_candidate_without_a_formula_has_the_second_derivative_of_the_plain_blend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(derivatives._FORMULAS, "tanh")
    monkeypatch.setattr(derivatives, "known", derivatives.known.__wrapped__)  # without its cache
    tau = torch.tensor(1.0, dtype=torch.float64)
    p = torch.tensor([[0.7, 0.3]], dtype=torch.float64)
    h, logits = away_from_kinks(12).requires_grad_(), p.log().flatten().requires_grad_()
    assert not derivatives.known(("tanh", "relu"), (0, 1))
    x, _ = routed_activation(h, logits, p, p, tau, ("tanh", "relu"), (0, 1))
    (slope,) = torch.autograd.grad(x.sum(), h, create_graph=True)
    (found,) = torch.autograd.grad(slope.sum(), h)
    value = torch.tanh(h.detach())
    torch.testing.assert_close(found, 0.7 * -2 * value * (1 - value**2))


@pytest.mark.parametrize("rows", [1, 3], ids=["layer", "channel"])
@pytest.mark.parametrize("hard", [False, True])
def test_the_gradient_of_a_second_derivative_equals_that_of_the_plain_blend(hard: bool, rows: int) -> None:
    """A physics-informed network does this: autograd.grad twice for u″, then the gradients of h and of the logits."""
    names, tau = ("tanh", "gelu", "silu", "sine"), torch.tensor(0.7, dtype=torch.float64)
    torch.manual_seed(0)
    start, given = torch.randn(5, 3, dtype=torch.float64), torch.randn(rows, 4, dtype=torch.float64)
    p = torch.softmax(given / tau, -1)
    weights = torch.nn.functional.one_hot(p.argmax(-1), 4).to(p.dtype) if hard else p
    found = []
    for plain in (False, True):
        h, logits = start.clone().requires_grad_(), given.flatten().requires_grad_()
        if plain:
            blending = Blending(weights, p, tau, names, (0, 1, 2, 3), 1, False)
            x = differentiable.routed_activation(h.sin(), logits, blending)
        else:
            x = routed_activation(h.sin(), logits, weights, p, tau, names, range(4))[0]
        (slope,) = torch.autograd.grad(x.sum(), h, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), h, create_graph=True)
        found.append(torch.autograd.grad((curvature + x).square().sum(), (h, logits)))
    torch.testing.assert_close(*found)
