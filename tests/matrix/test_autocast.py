"""Mixed precision: autocast to bf16 and fp16 with a GradScaler, in a run that drops candidates and commits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flexact
from flexact import FlexConfig, Policy
from flexact.routing.sites import sites_of
from matrix.models import Column, optimizer_of

STEPS = 200
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")],
    ),
]


@pytest.fixture(autouse=True)
def without_onednn() -> Iterator[None]:
    """bf16 convolutions crash on some virtual machines that claim to have AMX, with or without flexact."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def moved(batch: Any, device: str) -> Any:
    inputs, wanted = batch
    return tuple(one.to(device) for one in inputs), wanted.to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_two_hundred_steps_stay_finite_with_float32_logits_and_statistics(
    column: Column, dtype: torch.dtype, device: str
) -> None:
    model = column.build(FlexConfig(policy=Policy(noise=0.5, final_temperature=0.1))).to(device)
    optimizer = optimizer_of(model, 0.02, momentum=0.9)
    schedule = flexact.Schedule(model, STEPS, optimizer)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16, init_scale=2.0**10)
    sites, seen = sites_of(model), set[torch.dtype]()
    handles = [site.register_forward_hook(lambda site, inputs, x: seen.add(x.dtype)) for site in sites]
    losses: list[Tensor] = []
    for step in range(STEPS):
        batch = moved(column.batch(step % 4, 6), device)
        if column.is_site:
            batch = (batch[0][0].to(dtype),), batch[1]  # the dtype that an earlier layer would pass on
        with torch.autocast(device, dtype):
            loss = column.loss(model, batch)
        loss = loss + flexact.penalty(model)
        if not schedule.committed:
            assert {table.dtype for table in (schedule.router.p, schedule.router.sensitivity())} == {torch.float32}
        if loss.requires_grad:  # a committed FlexAct by itself has nothing to train
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    for handle in handles:
        handle.remove()
    assert seen == {dtype}, "the sites themselves ran in half precision"
    assert torch.stack(losses).isfinite().all()
    assert {site.logits.dtype for site in sites} == {torch.float32}
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("evidence")}
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert schedule.committed
    if not column.is_site:
        assert sum(losses[-4:]) < 0.9 * sum(losses[:4]), "it must learn something"


def test_an_overflow_skips_the_step_and_moves_no_logit(column: Column) -> None:
    """On overflow a GradScaler skips the optimizer's step, and so the Schedule's update of the logits."""
    model = column.build(FlexConfig())
    optimizer = optimizer_of(model)
    schedule = flexact.Schedule(model, STEPS, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    before = copy.deepcopy(model.state_dict())
    for scale in (torch.inf, 1.0):
        scaler.scale(column.loss(model, column.batch()) * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        if scale == torch.inf:
            assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())
    assert all(not torch.equal(one, before[name]) for name, one in model.named_parameters() if "logits" in name)
