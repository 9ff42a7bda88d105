"""Tests of what only the C code does: which inputs it takes, threads, candidates without a formula, derivatives."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from flexact.candidates.registry import lookup, register_candidate
from flexact.ops import dispatch, policy_kernels, routed_activation
from flexact.ops.blending import Blending
from flexact.ops.native import policy as native_policy
from flexact.ops.native import routed as native
from kernels import using
from routed_cases import ALL, FIVE, SIXTEEN, case, spread

pytestmark = pytest.mark.skipif(not dispatch.c_compiler(), reason="there is no C compiler")
FORMULAS = native.FUNCTIONS[1:]
P = torch.full((1, 2), 0.5)
ONE = torch.ones(())


def blending(names: tuple[str, ...] = ("relu", "tanh"), **changed: object) -> Blending:
    p = torch.full((1, len(names)), 1 / len(names))
    return Blending(p, p, ONE, names, tuple(range(len(names))), 1, True)._replace(**changed)


REFUSED: dict[str, Callable[[], tuple[Tensor, Blending]]] = {
    "float64": lambda: (torch.randn(3).double(), blending()),
    "an empty tensor": lambda: (torch.randn(0), blending()),
    "channels": lambda: (torch.randn(3, 2), blending(weights=P.expand(2, 2), probabilities=P.expand(2, 2))),
    "a hard forward": lambda: (torch.randn(3), blending(weights=torch.tensor([[1.0, 0.0]]))),
    "weights in float64": lambda: (torch.randn(3), blending(weights=(p := P.double()), probabilities=p)),
    "17 candidates": lambda: (torch.randn(3), blending(ALL[:17])),
    "another device": lambda: (torch.empty(3, device="meta"), blending()),
}


def test_it_is_the_default_for_float32_and_half_precision() -> None:
    with using("auto"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert native.supports(torch.randn(3).to(dtype), blending())
        assert policy_kernels.chosen(torch.nn.Parameter(torch.zeros(2)), 2) is native_policy


@pytest.mark.parametrize("reason", REFUSED)
def test_other_inputs_are_left_to_the_closed_form(reason: str) -> None:
    with using("native"):
        assert not native.supports(*REFUSED[reason]())


@pytest.mark.parametrize("size", [511, 513, 3 * (1 << 15) + 700])
def test_the_result_does_not_depend_on_the_number_of_threads(size: int) -> None:
    one, threads, found = case(spread(size), FIVE), torch.get_num_threads(), []
    try:
        with using("native"):
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                found.append(one.run())
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found[0], other, strict=True))


@pytest.mark.parametrize("alive", [(0, 1, 2, 3), (1, 3), (1,)], ids=str)
def test_values_of_a_candidate_without_a_formula_are_kept_or_computed_again_block_by_block(
    alive: tuple[int, ...],
) -> None:
    register_candidate("bump", lambda h: h * torch.exp(-h * h))
    one = case(spread(5000), ("relu", "bump", "tanh", "hardtanh"))
    one.alive[:] = False
    one.alive[:, list(alive)] = True
    with using("native"):
        kept = one.run()
        with mock.patch.object(native, "MOST_KEPT", 0), mock.patch.object(native, "BLOCK", 700):
            again = one.run()
    one.check(kept)
    one.check(again)
    for ours, theirs in ((kept.x, again.x), (kept.to_h, again.to_h)):
        assert torch.equal(ours, theirs)


def test_only_the_input_is_saved_if_every_candidate_has_a_formula() -> None:
    h, logits = spread(1000).requires_grad_(), torch.zeros(16, requires_grad=True)
    p, saved = torch.full((1, 16), 1 / 16), list[Tensor]()
    with (
        using("native"),
        torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one),
    ):
        routed_activation(h, logits, p, p, ONE, SIXTEEN, range(16), statistics=True)
    storages = [tensor.untyped_storage() for tensor in saved]
    large = {storage.data_ptr() for storage in storages if storage.nbytes() > 400}
    assert large == {h.untyped_storage().data_ptr()}


def test_an_upstream_gradient_without_memory_is_materialised() -> None:
    h, names = spread(50), ("relu", "tanh")
    with using("native"):
        gradient, _ = native.backward(torch._efficientzerotensor(50), h, blending(), True)
        negative = torch.complex(torch.zeros(50), h).conj().imag
        assert negative.is_neg()
        x, _ = native.forward(negative, blending(names))
    assert not gradient.any()
    torch.testing.assert_close(x, (torch.relu(-h) + torch.tanh(-h)) / 2)


# Derivatives


def test_the_gradient_of_a_second_derivative_equals_that_of_the_closed_form() -> None:
    names, found = ("tanh", "gelu", "silu", "sine"), []
    p = torch.softmax(torch.linspace(-1, 1, 4), -1).view(1, 4)
    for kernels in ("native", "closed_form"):
        h, logits = spread(60).requires_grad_(), torch.zeros(4, requires_grad=True)
        with using(kernels):
            x, _ = routed_activation(h.sin(), logits, p, p, ONE, names, range(4))
            (slope,) = torch.autograd.grad(x.sum(), h, create_graph=True)
            (curvature,) = torch.autograd.grad(slope.sum(), h, create_graph=True)
            found.append(torch.autograd.grad((curvature + x).square().sum(), (h, logits)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


# Numbers


@pytest.mark.parametrize("name", FORMULAS)
def test_nan_reaches_the_gradient_as_with_the_function_itself(name: str) -> None:
    h, alone = torch.tensor([torch.nan, 1.0]), torch.ones(1, 1)
    own = h.clone().requires_grad_()
    (theirs,) = torch.autograd.grad(lookup(name).module()(own).sum(), own)
    with using("native"):
        ours, _ = native.backward(torch.ones(2), h, Blending(alone, alone, ONE, (name,), (0,), 1, False), False)
    assert ours.isnan()[0] or ours[0] == theirs[0]
