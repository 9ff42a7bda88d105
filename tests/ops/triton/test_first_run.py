"""Tests that a first run waits for no kernel once it has begun: what a drop or the commitment launches was requested
before, in the background."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexact
from flexact.ops.triton import ahead
from flexact.ops.triton.launch import Launches
from flexact.routing.sites import sites_of
from flexact.studies.cifar_resnets import ResNet

pytestmark = pytest.mark.usefixtures("triton_kernels", "launches_from_python")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[Hashable]]:
    """Keys of the kernels that were launched, and of those that were requested ahead. Nothing is compiled or run."""
    found: dict[str, set[Hashable]] = {"launched": set(), "requested": set()}

    def record(launches: Launches, *tensors: Tensor) -> None:
        for launch, places in launches.steps:
            dtypes = tuple(tensors[place].dtype for place in places)
            launch._build_prepared_ahead(-1, dtypes)  # as `build`, which the interpreter does not need
            found["launched"].add(launch._build_key(-1, dtypes))

    def request(key: Hashable, *_: Any) -> None:
        found["requested"].add(key)

    monkeypatch.setattr(Launches, "__call__", record)
    monkeypatch.setattr(ahead, "start", request)
    monkeypatch.setattr(ahead, "start_later", request)
    return found


def step(model: torch.nn.Module, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()


def evaluate(model: torch.nn.Module, x: Tensor) -> None:
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(x)
    model.train()


@pytest.mark.parametrize("fuse", [False, True])
def test_a_drop_and_the_commitment_launch_only_kernels_that_were_requested_before(
    fuse: bool, kernels: dict[str, set[Hashable]]
) -> None:
    torch.manual_seed(0)
    model = flexact.convert(ResNet((1, 1), width=8), fuse=fuse)
    flexact.Schedule(model, network_steps=10_000)
    x = torch.randn(2, 3, 8, 8)
    step(model, x)
    counts = [len(kernels["launched"])]
    for left in (3, 2, 1):
        known = kernels["launched"] | kernels["requested"]
        evaluate(model, x)
        for number, site in enumerate(sites_of(model)):  # sites pick different candidates
            site.logits.data = torch.eye(site.k)[number % site.k]
            site.keep(left, step=0)
        step(model, x)
        evaluate(model, x)
        assert kernels["launched"] <= known
        counts.append(len(kernels["launched"]))
    assert all(site.committed for site in sites_of(model))
    assert (counts[-1] > counts[-2]) == fuse  # a fused site goes on with kernels of its pick alone
