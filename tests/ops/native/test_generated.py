"""Tests of C code that is generated from custom candidates, against torch in float64, and of the fallback to torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import flexact
from custom_activations import SUPPORTED, UNSUPPORTED, register_unchecked
from flexact import FlexConfig
from flexact.candidates.registry import lookup
from flexact.ops import dispatch, routed_activation
from flexact.ops.native import generated, library
from flexact.ops.native import routed as native
from kernels import using

if dispatch.why_not_native("cpu"):
    pytest.skip("there is no C compiler", allow_module_level=True)


@pytest.fixture(autouse=True)
def _native_kernels() -> Iterator[None]:
    with using("native"):
        yield


def results(h: Tensor, keys: tuple[str, ...], probabilities: list[float]) -> dict[str, Tensor]:
    h = h.detach().requires_grad_()
    p, logits, one = torch.tensor([probabilities]), torch.zeros(len(keys), requires_grad=True), torch.ones(())
    x, statistics = routed_activation(h, logits, p, p, one, keys, range(len(keys)), statistics=True)
    delta = torch.linspace(-1, 1, h.numel()).to(h.dtype)
    to_h, to_logits = torch.autograd.grad(x, (h, logits), delta)
    return {"x": x.detach(), "statistics": statistics, "to_h": to_h, "to_logits": to_logits}


def exact(h: Tensor, keys: tuple[str, ...], probabilities: list[float]) -> dict[str, Tensor]:
    """The same by autograd in float64."""
    h = h.detach().double().requires_grad_()
    logits = torch.zeros(len(keys), dtype=torch.float64, requires_grad=True)
    p = torch.softmax(torch.tensor([probabilities], dtype=torch.float64).log() + logits, -1)[0]
    values = [lookup(key).function(h) for key in keys]
    x = sum(weight * value for weight, value in zip(p, values, strict=True))
    to_h, to_logits = torch.autograd.grad(x, (h, logits), torch.linspace(-1, 1, h.numel(), dtype=torch.float64))
    slopes = []
    for key in keys:
        total = lookup(key).function(h).sum()
        slopes.append(torch.autograd.grad(total, h)[0].abs().mean() if total.requires_grad else torch.zeros(()))
    return {"x": x.detach(), "statistics": torch.stack(slopes)[None], "to_h": to_h, "to_logits": to_logits}


@pytest.mark.parametrize("name", SUPPORTED)
def test_generated_code_computes_the_function_and_its_derivative(name: str) -> None:
    flexact.register_candidate(name, SUPPORTED[name])
    h = torch.linspace(-9.1, 9.3, 2003)
    assert generated.address(name)
    ours, expected = (run(h, ("tanh", name), [0.3, 0.7]) for run in (results, exact))
    for what, tensor in expected.items():
        atol = 1e-3 if what == "to_logits" else 1e-5  # a sum over all elements
        torch.testing.assert_close(ours[what].double(), tensor.double(), rtol=4e-6, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    flexact.register_candidate("scaled_sigmoid", SUPPORTED["scaled_sigmoid"])
    h = torch.linspace(-4, 4, 101).to(dtype)
    half, single = (results(tensor, ("relu", "scaled_sigmoid"), [0.3, 0.7]) for tensor in (h, h.float()))
    assert half["x"].dtype == dtype
    assert torch.equal(half["x"], single["x"].to(dtype))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_functions_run_in_torch_and_the_reason_is_logged(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    function, reason = UNSUPPORTED[name]
    register_unchecked(name, function)
    h = torch.linspace(-3.1, 3.2, 2003)
    with torch.random.fork_rng(), caplog.at_level(logging.INFO, logger="flexact"):
        ours = results(h, ("tanh", name), [0.3, 0.7])
    (message,) = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert "runs in torch operations" in message
    assert reason in message
    for cached in (native._functions, native.plan_of):
        cached.cache_clear()
    monkeypatch.setattr(generated, "address", lambda key: 0)
    for what, tensor in results(h, ("tanh", name), [0.3, 0.7]).items():
        assert torch.equal(ours[what], tensor)


def test_a_failed_compilation_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    flexact.register_candidate("clipped", SUPPORTED["clipped"])

    def fail(code: str) -> None:
        raise OSError("cc failed")

    monkeypatch.setattr(library, "generated", fail)
    with caplog.at_level(logging.INFO, logger="flexact"):
        assert generated.address("clipped") == 0
    assert "cc failed" in caplog.text
    results(torch.randn(9), ("relu", "clipped"), [0.5, 0.5])


def test_an_original_activation_with_its_own_settings_has_code() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.CELU(alpha=0.5), nn.Linear(5, 1))
    site = flexact.convert(model, config=FlexConfig(candidates=("original", "relu")))[1]
    assert isinstance(site, flexact.FlexAct)
    assert generated.address(site.keys[site.original_index])


def test_code_is_compiled_at_the_first_call_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library.load()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # imports torch._dynamo, as every training program does
    flexact.register_candidate("mish_by_hand", SUPPORTED["mish_by_hand"])
    site = flexact.FlexAct(candidates=("relu", "mish_by_hand"))
    assert not list(tmp_path.rglob("*.so"))
    before = os.times()
    site(torch.randn(64, requires_grad=True)).sum().backward()
    after = os.times()
    assert sum(after[:4]) - sum(before[:4]) < 1
    assert len(list(tmp_path.rglob("generated-*.so"))) == 1
