"""Tests of Triton forms of custom candidates: they are used like built-in ones, and wrong forms are refused by name."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, nn

import flexact
from flexact import FlexConfig
from flexact.candidates.registry import lookup, register_candidate, registered_candidates
from flexact.errors import FlexActError
from flexact.ops import closed_form, dispatch, routed_activation, runs_fused
from flexact.ops.blending import Blending
from flexact.ops.triton import routed
from kernels import using

pytestmark = pytest.mark.usefixtures("triton_kernels")


@triton.jit
def bump_form(x):
    bell = tl.exp(-x * x)
    return x * bell, (1 - 2 * x * x) * bell


@triton.jit
def square_form(x):
    return x * x, 2 * x


@triton.jit
def wrong_slope_form(x):
    return x * x, 3 * x


@triton.jit
def two_arguments_form(x, y):
    return x, y


@triton.jit
def broken_form(x):
    return tl.no_such_function(x), x


def bump(h: Tensor) -> Tensor:
    return h * torch.exp(-h * h)


def results(h: Tensor, keys: tuple[str, ...], rows: int, alive: tuple[int, ...]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    p = torch.rand(rows, len(keys), device=h.device)
    p[:, [k for k in range(len(keys)) if k not in alive]] = 0
    p /= p.sum(1, keepdim=True)
    h = h.detach().requires_grad_()
    logits = torch.zeros(p.numel(), device=h.device, requires_grad=True)
    one = torch.ones((), device=h.device)
    x, statistics = routed_activation(h, logits, p, p, one, keys, alive, statistics=True)
    to_h, to_logits = torch.autograd.grad(x.square().sum(), (h, logits))
    return {"x": x.detach(), "statistics": statistics, "to_h": to_h, "to_logits": to_logits}


@pytest.mark.usefixtures("launches_from_python")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("alive", [(0, 1, 2, 3), (1, 2), (2,)])
def test_a_form_gives_the_results_of_the_closed_form(
    rows: int, alive: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_candidate("bump", bump, triton=bump_form)
    register_candidate("square", torch.square, triton=square_form)
    keys, h = ("relu", "bump", "square", "tanh"), 3 * torch.randn(4, 3, 5, device=device)
    launched: list[Any] = []
    forward = routed.forward
    monkeypatch.setattr(routed, "forward", lambda *given: launched.append(given) or forward(*given))
    assert runs_fused(h, keys, alive)
    launched.clear()
    ours = results(h, keys, rows, alive)
    assert len(launched) == 1
    with using("closed_form"):
        expected = results(h, keys, rows, alive)
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_a_network_that_is_fused_with_its_batch_norm_uses_it(device: torch.device) -> None:
    register_candidate("bump", bump, triton=bump_form)
    config = FlexConfig(candidates=("relu", "bump"))

    def outputs(fuse: bool) -> list[Tensor]:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 1)).to(device)
        network = flexact.convert(network, config=config, fuse=fuse)
        y = network(torch.randn(2, 2, 6, 6, device=device))
        y.square().sum().backward()
        return [y.detach(), *(one.grad for one in network.parameters() if one.grad is not None)]

    for fused, apart in zip(outputs(True), outputs(False), strict=True):
        torch.testing.assert_close(fused, apart, rtol=1e-3, atol=1e-4)


def test_a_wrong_form_is_refused_at_its_first_use(device: torch.device) -> None:
    register_candidate("cube", lambda h: h**3, triton=square_form)
    register_candidate("steep", torch.square, triton=wrong_slope_form)
    h = torch.randn(5, device=device)
    with pytest.raises(FlexActError, match=r"the Triton form of candidate 'cube' gives the value .* at h = "):
        results(h, ("relu", "cube"), 1, (0, 1))
    with pytest.raises(FlexActError, match=r"candidate 'steep' gives the slope .* its function gives"):
        results(h, ("relu", "steep"), 1, (0, 1))
    results(h, ("relu", "steep"), 1, (0,))  # not used


def test_a_form_that_does_not_compile_is_refused_by_name(device: torch.device) -> None:
    register_candidate("broken", bump, triton=broken_form)
    with pytest.raises(FlexActError, match="the Triton form of candidate 'broken' does not compile"):
        results(torch.randn(5, device=device), ("relu", "broken"), 1, (0, 1))
    assert dispatch.active(device).name == "triton"


def test_an_invalid_form_is_refused_at_registration() -> None:
    with pytest.raises(FlexActError, match=r"must be a function with the decorator triton\.jit"):
        register_candidate("bump", bump, triton=bump)
    with pytest.raises(FlexActError, match="takes one argument, the input"):
        register_candidate("bump", bump, triton=two_arguments_form)
    register_candidate("bump", bump, triton=bump_form)
    register_candidate("bump_again", bump, triton=bump_form)
    other = functools.wraps(bump_form.fn)(lambda x: x)
    with pytest.raises(FlexActError, match=r"same name as that of 'bump', .*bump_form"):
        register_candidate("another", bump, triton=type(bump_form)(other))


def test_compiled_sites_use_the_closed_form(device: torch.device) -> None:
    register_candidate("bump", bump, triton=bump_form)
    torch._dynamo.reset()
    model = flexact.convert(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), config=FlexConfig(candidates=("relu", "bump")))
    model = model.to(device)
    schedule = flexact.Schedule(model, 10)
    h = torch.randn(2, 3, device=device)
    compiled = torch.compile(model, fullgraph=True, backend="eager")(h)
    torch.testing.assert_close(compiled, model(h))
    assert not schedule.committed


def test_a_candidate_is_sent_to_another_process_without_its_form() -> None:
    register_candidate("squared", torch.square, triton=square_form)
    travelled = pickle.loads(pickle.dumps(registered_candidates()["squared"]))
    assert travelled.triton is None
    assert lookup("squared").triton is square_form
    h = torch.randn(4)
    assert torch.equal(travelled.function(h), torch.square(h))


def test_second_derivatives_match_the_torch_function(device: torch.device) -> None:
    register_candidate("bump", bump, triton=bump_form)
    h = torch.randn(6, device=device, requires_grad=True)
    p, one = torch.tensor([[0.25, 0.75]], device=device), torch.ones((), device=device)
    x, _ = routed_activation(h, torch.zeros(2, device=device, requires_grad=True), p, p, one, ("tanh", "bump"), (0, 1))
    (first,) = torch.autograd.grad(x.sum(), h, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), h)
    (first,) = torch.autograd.grad((0.25 * torch.tanh(h) + 0.75 * bump(h)).sum(), h, create_graph=True)
    (expected,) = torch.autograd.grad(first.sum(), h)
    torch.testing.assert_close(second, expected, rtol=1e-4, atol=1e-5)


def test_the_closed_form_and_not_the_triton_form_is_the_oracle(device: torch.device) -> None:
    register_candidate("bump", bump, triton=bump_form)
    one = torch.ones(1, 1, device=device)
    h = torch.randn(7, device=device)
    x, _ = closed_form.forward(h, Blending(one, one, one[0, 0], ("bump",), (0,), 1, False))
    torch.testing.assert_close(x, bump(h))


BUILD = """
import sys
import torch
import forms
from flexact.candidates.registry import register_candidate
from flexact.ops.blending import Blending
from flexact.ops.triton import routed
from flexact.ops.triton.launch import Launches

hashes = []

def build(launches, *tensors):
    for launch, places in launches.steps:
        compiled = launch._compiled([tensors[i] for i in places])
        assert compiled.asm["cubin"]
        hashes.append(compiled.hash)

Launches.__call__ = build
register_candidate("bump", forms.bump, triton=forms.bump_form)
register_candidate("square", torch.square, triton=forms.square_form)
keys, p, temperature = ("relu", "bump", "square", "tanh"), torch.rand(1, 4), torch.tensor(0.5)
h = torch.randn(4, 6, 5, 7)
blending = Blending(p, p, temperature, keys, (0, 1, 2, 3), 1, True)
routed.forward(h, blending)
if "all" not in sys.argv:
    print(*hashes)
    sys.exit()
routed.backward(h, h, blending, True)
norm = routed.Norm(torch.rand(2, 6), torch.rand(6), torch.rand(6))
preactivation = routed.Preactivation(norm, h, None, True)
routed.forward(h, blending, preactivation)
routed.backward(h, h, blending, True, preactivation)
print(*hashes)
"""

FORMS = """
import torch, triton
import triton.language as tl

def bump(h):
    return h * torch.exp(-h * h)

@triton.jit
def bump_form(x):
    bell = tl.exp(-x * x)
    return x * bell, (1 - 2 * x * x) * bell

@triton.jit
def square_form(x):
    return x * x, 2 * x
"""


@pytest.mark.slow
def test_the_kernels_build_for_a_gpu_and_an_edited_form_is_rebuilt(
    tmp_path: Path, output_with_fake_gpu: Callable[..., str]
) -> None:
    def hashes(forms: str, *arguments: str) -> list[str]:
        (tmp_path / "forms.py").write_text(forms)
        return output_with_fake_gpu(BUILD, *arguments).split()

    every, again, edited = hashes(FORMS, "all"), hashes(FORMS), hashes(FORMS.replace("2 * x\n", "x + x\n"))
    assert every[: len(again)] == again
    assert not set(every) & set(edited)
