"""Tests of Triton functions that are generated from custom candidates, and of the fallback to the closed form."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import flexact
from custom_activations import SUPPORTED, UNSUPPORTED, register_unchecked
from flexact import FlexConfig
from flexact.candidates.registry import lookup, register_candidate
from flexact.ops import routed_activation, runs_fused
from flexact.ops.triton import basis, generated
from kernels import using

pytestmark = pytest.mark.usefixtures("triton_kernels")


def results(h: Tensor, keys: tuple[str, ...], alive: tuple[int, ...]) -> dict[str, Tensor]:
    p = torch.tensor([[0.25, 0.5, 0.25]], device=h.device)
    h, logits = h.detach().requires_grad_(), torch.zeros(3, device=h.device, requires_grad=True)
    x, statistics = routed_activation(h, logits, p, p, torch.ones_like(p[0, 0]), keys, alive, statistics=True)
    to_h, to_logits = torch.autograd.grad(x, (h, logits), torch.cos(h.detach()))
    return {"x": x.detach(), "statistics": statistics, "to_h": to_h, "to_logits": to_logits}


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_generated_form_gives_the_results_of_the_closed_form(name: str, device: torch.device) -> None:
    register_candidate(name, SUPPORTED[name])
    keys, h = ("tanh", name, "relu"), torch.linspace(-9.1, 9.3, 403, device=device)
    assert runs_fused(h, keys, (0, 1, 2))
    ours = results(h, keys, (0, 1, 2))
    with using("closed_form"):
        exact = results(h.double(), keys, (0, 1, 2))
    for what, tensor in exact.items():
        torch.testing.assert_close(ours[what].double(), tensor.double(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_functions_run_in_the_closed_form_and_the_reason_is_logged(
    name: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    function, reason = UNSUPPORTED[name]
    register_unchecked(name, function if not isinstance(function, nn.Module) else function.to(device))
    keys, h = ("tanh", name, "relu"), torch.linspace(-3.1, 3.2, 403, device=device)
    with caplog.at_level(logging.INFO, logger="flexact"):
        ours = results(h, keys, (0, 1, 2))
    (message,) = [record.getMessage() for record in caplog.records if record.name == generated.__name__]
    assert "runs in the closed form" in message
    assert reason in message
    assert not runs_fused(h, keys, (0, 1, 2))
    assert runs_fused(h, keys, (0, 2))
    results(h, keys, (0, 2))
    with using("closed_form"):
        expected = results(h, keys, (0, 1, 2))
    for what, tensor in expected.items():
        assert torch.equal(ours[what], tensor)


def test_candidates_with_the_same_source_share_a_form() -> None:
    register_candidate("one", SUPPORTED["clipped"])
    register_candidate("two", lambda h: h.clamp(-1.0, 2.0))
    register_candidate("three", lambda h: h.clamp(-1.0, 2.5))
    assert generated.form("one") is generated.form("two")
    assert generated.form("one") is not generated.form("three")
    assert len(basis.blend(("one", "two", "three"), (0, 1, 2)).basis) == 2


def test_a_users_form_takes_precedence() -> None:
    register_candidate("clipped", SUPPORTED["clipped"])
    own = generated.form("clipped")
    register_candidate("square", torch.square, triton=own)
    assert basis.form("square") == {lookup("square").triton: 1.0}


def test_a_network_that_is_fused_with_its_batch_norm_uses_the_form_of_its_original(device: torch.device) -> None:
    def outputs(fuse: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.CELU(alpha=0.5), nn.Conv2d(3, 2, 1)
        config = FlexConfig(candidates=("original", "relu"))
        network = flexact.convert(nn.Sequential(*layers).to(device), config=config, fuse=fuse)
        y = network(torch.randn(2, 2, 6, 6, device=device))
        y.square().sum().backward()
        return [y.detach(), *(one.grad for one in network.parameters() if one.grad is not None)]

    for fused, apart in zip(outputs(True), outputs(False), strict=True):
        torch.testing.assert_close(fused, apart, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_model_uses_the_closed_form_and_then_an_eager_one_the_form(device: torch.device) -> None:
    register_candidate("gate", SUPPORTED["scaled_sigmoid"])
    torch._dynamo.reset()
    config = FlexConfig(candidates=("relu", "gate", "tanh"), pick_by="blend")
    model = flexact.convert(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), config=config).to(device)
    flexact.Schedule(model, 10)
    h = torch.randn(2, 3, device=device)
    compiled = torch.compile(model, fullgraph=True, backend="eager")(h)
    assert not generated._rejected
    assert runs_fused(h, ("relu", "gate", "tanh"), (0, 1, 2))
    torch.testing.assert_close(compiled, model(h))


def test_a_dropped_candidate_has_no_part_in_the_kernels() -> None:
    register_candidate("gate", SUPPORTED["scaled_sigmoid"])
    assert len(basis.blend(("relu", "gate", "tanh"), (0, 1, 2)).basis) == 3
    dropped = basis.blend(("relu", "gate", "tanh"), (0, 2))
    assert all(isinstance(part, int) for part in dropped.basis)


KERNEL = """
import triton
import triton.language as tl

@triton.jit
def kernel(h_ptr, value_ptr, slope_ptr, BASIS: tl.constexpr):
    at = tl.arange(0, 64)
    value, slope = BASIS[0](tl.load(h_ptr + at))
    tl.store(value_ptr + at, value)
    tl.store(slope_ptr + at, slope)
"""

BUILD = """
import torch
from custom_activations import SUPPORTED
from flexact.candidates.registry import register_candidate
from flexact.ops.triton import basis, generated
from kernels import using
from kernel_of_a_form import kernel

h = torch.randn(64)
for name, function in SUPPORTED.items():
    register_candidate(name, function)
    constant, *_ = basis.Blend((generated.form(name),), (), 0).constants(False)
    assert kernel.warmup(h, h, h, constant, grid=(1,)).asm["cubin"]
    print(name)
"""


@pytest.mark.slow
def test_forms_compile_for_a_gpu(tmp_path: Path, output_with_fake_gpu: Callable[..., str]) -> None:
    (tmp_path / "kernel_of_a_form.py").write_text(KERNEL)
    assert output_with_fake_gpu(BUILD).split() == list(SUPPORTED)
