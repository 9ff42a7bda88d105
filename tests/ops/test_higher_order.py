"""Tests of second and higher derivatives with the kernels in C and in Triton, against torch's autograd in float64, and
of what their nodes do in the autograd graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flexact.candidates.registry import BUILT_IN
from flexact.ops import closed_form_blends, derivatives, differentiable, routed_activation
from flexact.ops.blending import Blending

NAMES = tuple(candidate.name for candidate in BUILT_IN)
SMOOTH = ("tanh", "gelu", "silu", "sine")
KINKS = (0.0, 0.5, -0.5, 1.0, -1.0, -2.0, 2.0, 3.0, -3.0, 6.0)
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(3, 4, 2, 3),
    "channels last": lambda: torch.randn(3, 4, 2, 3).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(3, 4, 2).transpose(0, 2),
    "slice": lambda: torch.randn(3, 4, 6)[:, :, ::2],
    "expanded": lambda: torch.randn(3, 1, 2).expand(3, 4, 2),
    "one number": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 4, 2),
    "several tiles": lambda: torch.randn(5, 1031),
}


@pytest.fixture(scope="module")
def device(kernel_device: torch.device) -> torch.device:
    return kernel_device


def away_from_kinks(size: int) -> Tensor:
    h = torch.linspace(-6.9, 6.9, size)
    for kink in KINKS:
        h = torch.where((h - kink).abs() < 0.05, h + 0.1, h)
    return h


def blending_of(names: tuple[str, ...], rows: int, h: Tensor, channel_dim: int = 1) -> tuple[Blending, Tensor]:
    """Returns a blending with a temperature of 0.7, and the logits."""
    given = torch.linspace(-1, 1, rows * len(names), dtype=torch.float64).view(rows, -1)
    p = torch.softmax(given / 0.7, -1).to(h)
    tau = torch.tensor(0.7).to(p)
    return Blending(p, p, tau, names, tuple(range(len(names))), channel_dim, False), given.flatten().to(h)


def routed(h: Tensor, logits: Tensor, blending: Blending) -> Tensor:
    weights, p, tau, names, alive, channel_dim, _ = blending
    return routed_activation(h, logits, weights, p, tau, names, alive, channel_dim)[0]


def physics(
    function: Callable[[Tensor, Tensor, Blending], Tensor],
    start: Tensor,
    names: tuple[str, ...],
    rows: int = 1,
    inner: Callable[[Tensor], Tensor] = torch.sin,
    wide: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Returns the first and the second derivative of two calls in a row, and the gradients of a loss of them."""
    h = start.detach().requires_grad_()
    blending, logits = blending_of(names, rows, torch.empty(0, dtype=wide, device=h.device))
    logits.requires_grad_()
    x = function(function(inner(h), logits, blending), logits, blending)
    (slope,) = torch.autograd.grad(x.sum(), h, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), h, create_graph=True)
    found = torch.autograd.grad((curvature + x).square().sum(), (h, logits))
    return [slope.detach(), curvature.detach(), *found]


def check(
    start: Tensor,
    names: tuple[str, ...],
    rows: int = 1,
    inner: Callable[[Tensor], Tensor] = torch.sin,
    tolerance: float = 1e-4,
) -> None:
    ours = physics(routed, start, names, rows, inner)
    theirs = physics(differentiable.routed_activation, start.double(), names, rows, inner, torch.float64)
    for one, other in zip(ours, theirs, strict=True):
        scale = other.abs().max().item() if other.numel() else 1.0
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance * max(scale, 1.0))


@pytest.mark.parametrize("name", NAMES)
def test_a_second_derivative_and_its_gradients_equal_those_of_the_plain_blend_in_float64(
    name: str, device: torch.device
) -> None:
    h = away_from_kinks(60).to(device)
    blending, logits = blending_of((name, "softsign" if name == "tanh" else "tanh"), 1, h)

    def results(function: Callable[[Tensor, Tensor, Blending], Tensor], dtype: torch.dtype) -> list[Tensor]:
        own = Blending(*[one.to(dtype) for one in blending[:3]], *blending[3:])
        inputs = h.to(dtype).requires_grad_(), logits.to(dtype).requires_grad_()
        x = function(*inputs, own)
        (slope,) = torch.autograd.grad(x.sum(), inputs[0], create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum() + 0 * x.sum(), inputs[0], create_graph=True)
        return [slope, curvature, *torch.autograd.grad((curvature + x + slope).square().sum(), inputs)]

    for ours, theirs in zip(results(routed, torch.float32), results(plain, torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=2e-5)


def plain(h: Tensor, logits: Tensor, blending: Blending) -> Tensor:
    return differentiable.routed_activation(h, logits, blending)


@pytest.mark.parametrize("rows", [1, 4], ids=["layer", "channel"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout: str, rows: int, device: torch.device) -> None:
    torch.manual_seed(0)
    start = LAYOUTS[layout]().to(device)
    if rows == 4 and (start.dim() < 2 or start.shape[1] != 4):
        pytest.skip("it does not have four channels")
    check(start, SMOOTH, rows, inner=lambda h: h)  # h itself has the layout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    check(torch.linspace(-3, 3, 50, device=device).to(dtype), SMOOTH, tolerance=0.05)


def test_candidates_that_are_combinations_of_basis_functions(device: torch.device) -> None:
    check(away_from_kinks(50).to(device), ("elu", "selu", "leaky_relu", "identity", "gelu_tanh", "hardswish"))


@pytest.mark.parametrize("name", NAMES)
def test_second_and_third_derivatives_at_kinks_and_for_huge_inputs(name: str, device: torch.device) -> None:
    h = torch.tensor([*KINKS, 6.0, -20.5, 25.0, 80.0, -90.0, 1e3, -1e3, 1e5, -1e5], device=device)
    one = torch.ones(1, 1, device=device)
    x = h.clone().requires_grad_()
    blending = Blending(one, one, one[0, 0], (name,), (0,), 1, False)
    (slope,) = torch.autograd.grad(routed(x, torch.zeros(1, device=device), blending).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum() + 0 * slope.sum(), x)
    exact = h.double()
    candidate = next(one for one in BUILT_IN if one.name == name)
    value = candidate.function(exact)
    expected = derivatives.higher(name, exact, value, candidate.derivative(exact, value))
    for ours, theirs in zip((second, third), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


# The graph


def test_a_third_derivative_equals_a_numerical_one() -> None:
    names, tau = ("tanh", "gelu", "softplus", "sine"), torch.tensor(0.7, dtype=torch.float64)

    def slope(h: Tensor, logits: Tensor) -> Tensor:
        p = torch.softmax(logits.detach() / tau, -1).view(1, -1)
        x = routed_activation(h, logits, p, p, tau, names, range(4))[0]
        return torch.autograd.grad(x.sum(), h, create_graph=True)[0]

    h = torch.linspace(-2, 2, 5, dtype=torch.float64, requires_grad=True)
    logits = torch.tensor([0.4, -0.3, 0.1, 0.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(slope, (h, logits))


def test_a_fourth_derivative(device: torch.device) -> None:
    h = torch.linspace(-2, 2, 9, device=device).requires_grad_()
    blending, logits = blending_of(("sine",), 1, h)
    x = routed(h, logits, blending)
    for _ in range(4):
        (x,) = torch.autograd.grad(x.sum(), h, create_graph=True)
    torch.testing.assert_close(x, h.sin(), rtol=1e-4, atol=1e-5)


def graph(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns h, the logits, x, and the derivative of x with a graph."""
    h = torch.linspace(-2, 2, 9, device=device).requires_grad_()
    blending, logits = blending_of(SMOOTH, 1, h)
    logits.requires_grad_()
    x = routed(h, logits, blending)
    (slope,) = torch.autograd.grad(x.sum(), h, create_graph=True)
    return h, logits, x, slope


def test_each_gradient_alone_equals_that_of_all(device: torch.device) -> None:
    h, logits, x, slope = graph(device)
    loss = (slope * x).sum()
    to_h, to_logits = torch.autograd.grad(loss, (h, logits), retain_graph=True)
    (only_h,) = torch.autograd.grad(loss, h, retain_graph=True)
    (only_logits,) = torch.autograd.grad(loss, logits, retain_graph=True)
    torch.testing.assert_close(only_h, to_h)
    torch.testing.assert_close(only_logits, to_logits)


def test_the_gradient_with_respect_to_the_output_does_not_include_the_input(device: torch.device) -> None:
    _, _, x, slope = graph(device)
    (to_x,) = torch.autograd.grad((slope * x).sum(), x, create_graph=True)
    torch.testing.assert_close(to_x, slope)


def test_a_backward_that_is_repeated_has_the_same_result(device: torch.device) -> None:
    h, logits, x, slope = graph(device)
    first = torch.autograd.grad((slope * x).sum(), (h, logits), retain_graph=True)
    torch.autograd.grad(slope.sum(), h, retain_graph=True)
    again = torch.autograd.grad((slope * x).sum(), (h, logits))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, again, strict=True))


def test_a_backward_after_a_differentiable_one_has_the_gradient_of_x(device: torch.device) -> None:
    h, logits, x, slope = graph(device)
    to_h, to_logits = torch.autograd.grad(x.sum(), (h, logits), retain_graph=True)
    torch.testing.assert_close(to_h, slope.detach())
    blending, other = blending_of(SMOOTH, 1, h)
    other.requires_grad_()
    (expected,) = torch.autograd.grad(routed(h, other, blending).sum(), other)
    torch.testing.assert_close(to_logits, expected, rtol=1e-4, atol=1e-5)


def test_the_graph_is_freed_when_nothing_refers_to_it(device: torch.device) -> None:
    h, logits, x, slope = graph(device)
    (curvature,) = torch.autograd.grad(slope.sum(), h, create_graph=True)
    curvature.sum().backward(retain_graph=True)
    freed = [weakref.ref(tensor) for tensor in (h, logits)]
    del h, logits, x, slope, curvature
    assert [reference() for reference in freed] == [None, None]


def test_a_call_that_is_recomputed_has_the_same_second_derivative(device: torch.device) -> None:
    found = []
    for recompute in (False, True):
        h = torch.linspace(-2, 2, 9, device=device).requires_grad_()
        blending, logits = blending_of(SMOOTH, 1, h)
        logits.requires_grad_()
        call = (lambda *args: checkpoint(routed, *args, use_reentrant=False)) if recompute else routed
        (slope,) = torch.autograd.grad(call(h.sin(), logits, blending).sum(), h, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), (h, logits)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_derivatives_of_a_call_take_no_memory_until_they_are_needed(device: torch.device) -> None:
    h = torch.randn(1000, device=device).requires_grad_()
    blending, logits = blending_of(SMOOTH, 1, h)
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: sizes.append(one.untyped_storage().nbytes()) or one, lambda one: one
    ):
        routed(h, logits.requires_grad_(), blending)
    assert [size for size in sizes if size > 100] == [4000]


def test_the_closed_form_does_not_run(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise these tests would not test the kernels."""
    monkeypatch.delattr(closed_form_blends.ClosedFormBlends, "__init__")
    *_, slope = graph(device)
    assert slope.requires_grad
