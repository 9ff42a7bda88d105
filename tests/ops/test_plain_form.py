"""Tests of plain torch as an implementation of the routed activation: what it keeps, and where it does not run. Its
values and gradients are compared with the reference in test_closed_form.py."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flexact
from flexact.ops import plain_form, reference, routed_activation
from flexact.ops.blending import Blending
from kernels import using

NAMES = ("relu", "tanh", "gelu", "silu", "identity")


@pytest.fixture(autouse=True)
def _plain_torch() -> Iterator[None]:
    with using("plain"):
        yield


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 5, dtype=dtype, requires_grad=True), torch.randn(5, dtype=dtype, requires_grad=True)


def routed(h: Tensor, logits: Tensor) -> Tensor:
    p = torch.softmax(logits.detach(), -1)[None]
    return routed_activation(h, logits, p, p, torch.ones((), dtype=p.dtype), NAMES, range(5), statistics=True)[0]


def expected(h: Tensor, logits: Tensor) -> Tensor:
    table = logits[None]
    return reference.routed_activation(h, table, torch.zeros_like(table), 1.0, NAMES, torch.ones(1, 5).bool())


def assert_gradients(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Asserts that a function has the gradients of the reference, also of tanh(x)."""
    h, logits = inputs()
    function(h, logits).tanh().sum().backward()
    found = h.grad, logits.grad
    torch.testing.assert_close(found, torch.autograd.grad(expected(h, logits).tanh().sum(), (h, logits)))


def test_a_retained_graph_gives_the_same_gradients_again() -> None:
    h, logits = inputs()
    x = routed(h, logits)
    first = torch.autograd.grad(x.sum(), (h, logits), retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(x.sum(), (h, logits))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_modules_may_write_to_the_result(dtype: torch.dtype) -> None:
    h, logits = (tensor.detach().requires_grad_() for tensor in inputs(torch.float32))
    given = h.to(dtype)
    untouched = torch.autograd.grad((2 * routed(given, logits)).sum(), (h, logits), retain_graph=True)
    assert all(map(torch.equal, untouched, torch.autograd.grad(routed(given, logits).mul_(2).sum(), (h, logits))))


def test_an_input_that_was_written_to_is_an_error() -> None:
    h, logits = inputs()
    given = h * 1
    x = routed(given, logits)
    given.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    assert_gradients(lambda h, logits: checkpoint(routed, h, logits, use_reentrant=use_reentrant))


def test_hooks_for_saved_tensors() -> None:
    def on_the_cpu(h: Tensor, logits: Tensor) -> Tensor:
        with save_on_cpu():
            return routed(h, logits)

    assert_gradients(on_the_cpu)


def test_a_dispatch_mode_that_observes_the_operations() -> None:
    def observed(h: Tensor, logits: Tensor) -> Tensor:
        with FlopCounterMode(display=False):
            return routed(h, logits)

    assert_gradients(observed)


def test_the_backward_frees_what_the_forward_kept() -> None:
    class Holder:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()

    holders: list[weakref.ref[Holder]] = []

    def pack(tensor: Tensor) -> Holder:
        holder = Holder(tensor)
        holders.append(weakref.ref(holder))
        return holder

    h, logits = inputs()
    with saved_tensors_hooks(pack, lambda holder: holder.tensor):
        x = routed(h, logits)
    assert sum(holder() is not None for holder in holders) > 5
    x.sum().backward()
    assert all(holder() is None for holder in holders)
    assert x.shape == h.shape  # the result itself is still referenced


def test_second_derivatives() -> None:
    h, logits = inputs()
    assert torch.autograd.gradgradcheck(lambda h: routed(h, logits), (h,))
    for function in (routed, expected):
        (slope,) = torch.autograd.grad(function(h, logits).sum(), h, create_graph=True)
        slope.square().sum().backward()
    assert h.grad is not None
    (slope,) = torch.autograd.grad(expected(h, logits).sum(), h, create_graph=True)
    torch.testing.assert_close(h.grad, 2 * torch.autograd.grad(slope.square().sum(), h)[0])


@pytest.mark.parametrize("needed", ["h", "logits"])
def test_only_one_gradient(needed: str) -> None:
    both = dict(zip(("h", "logits"), inputs(), strict=True))
    wanted = both[needed]
    given = {name: tensor if name == needed else tensor.detach() for name, tensor in both.items()}
    (found,) = torch.autograd.grad(routed(**given).sum(), wanted)
    torch.testing.assert_close((found,), torch.autograd.grad(expected(**given).sum(), wanted))


def blending(names: tuple[str, ...] = NAMES, rows: int = 1, hard: bool = False) -> Blending:
    p = torch.full((rows, len(names)), 1 / len(names))
    return Blending(p.clone() if hard else p, p, torch.ones(()), names, tuple(range(len(names))), 1, True)


def test_it_runs_only_where_it_has_the_results_of_the_closed_form() -> None:
    flexact.register_candidate("test_plain_wave", torch.sin)
    assert plain_form.supports(blending())
    others: list[dict[str, Any]] = [
        {"rows": 3},
        {"hard": True},
        {"names": ("relu", "test_plain_wave")},
        {"names": ("relu", "relu_squared")},  # overflows
        {"names": ("relu", "tanhshrink")},  # torch's own derivative loses digits
    ]
    assert not any(plain_form.supports(blending(**changes)) for changes in others)


def test_channels_that_dropped_an_infinite_candidate_stay_finite() -> None:
    h = torch.tensor([[torch.inf, 1.0]]).requires_grad_()
    p = torch.tensor([[0.0, 0.5, 0.5], [0.4, 0.3, 0.3]])
    x, _ = routed_activation(h, torch.zeros(6), p, p, torch.ones(()), ("identity", "sigmoid", "tanh"), range(3))
    assert x[0, 0].item() == 1.0
