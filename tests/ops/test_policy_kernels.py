"""Tests of the kernels of the draw and of the policy, in C and in Triton, against plain torch."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import flexact
from flexact import FlexAct, FlexConfig, Policy
from flexact.policy import logit_updates as policy
from flexact.policy.evidence import RoundStatistics
from flexact.policy.optimizers import Step
from flexact.routing import call_statistics as gathering
from policy_sites import CANDIDATES, POLICIES, Sites, assert_alike, one_step, plain_torch

pytestmark = pytest.mark.filterwarnings("ignore:.*(invalid value|overflow|All-NaN).*:RuntimeWarning")  # interpreter's


@pytest.fixture(scope="module")
def device(kernel_device: torch.device) -> torch.device:
    return kernel_device


# The draw


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_the_draw_equals_plain_torchs(noise: float, device: torch.device) -> None:
    ours, theirs = Sites(device, noise=noise), Sites(device, noise=noise)
    for step in range(2):
        fused = ours.draw(step)
        with plain_torch():
            plain = theirs.draw(step)
        assert_alike(list(fused), list(plain))
        assert all(torch.equal(table == 0, ~ours.router.alive()) for table in fused)
        ours.drop()
        theirs.drop()


@settings(max_examples=30)
@given(data=st.data())
def test_the_draw_equals_plain_torchs_for_any_logits(data: st.DataObject, device: torch.device) -> None:
    number = st.floats(-1e4, 1e4, width=32)
    logits = torch.tensor(data.draw(st.lists(st.lists(number, min_size=5, max_size=5), min_size=1, max_size=3)))
    rows, k = logits.shape
    alive = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows * k, max_size=rows * k))).view(rows, k)
    alive[:, data.draw(st.integers(0, k - 1))] = True
    temperature = data.draw(st.floats(1e-6, 100.0))
    own = FlexAct(CANDIDATES[:k], FlexConfig(granularity="channel", policy=Policy(noise=1.0)), channels=rows).to(device)
    with torch.no_grad():
        own.logits.copy_(logits.flatten())
        own.temperature.fill_(temperature)
    own.drop(~alive, step=0)
    own.router.scheduled = True
    own.router.refresh(training=True)
    pi, p = own.router.pi, own.router.p
    assert_alike([pi.sum(-1), p.sum(-1)], [torch.ones(rows, device=device)] * 2)
    with plain_torch():
        own.router.refresh(training=True)
    assert_alike([pi, p], [own.router.pi, own.router.p])


def test_a_nan_logit_affects_its_own_row_only(device: torch.device) -> None:
    ours, theirs = Sites(device), Sites(device)
    for one in (ours, theirs):
        with torch.no_grad():
            one.sites[2].logits[1] = torch.nan
    with plain_torch():
        plain = theirs.draw(0)
    assert_alike(list(ours.draw(0)), list(plain))
    assert ours.router.p.isnan().any(-1).sum() == 1


def test_a_forward_keeps_an_earlier_draw(device: torch.device) -> None:
    """Autograd still holds the earlier draw."""
    sites = Sites(device, noise=1.0)
    pi, p = sites.draw(0)
    before = p.clone()
    sites.draw(1)
    assert torch.equal(p, before)
    assert not torch.equal(p, sites.router.p)
    assert sites.router.pi.data_ptr() != pi.data_ptr()


# The policy


@pytest.mark.parametrize(
    ("changes", "logit_step"), [*zip(POLICIES, ["schedule", "optimizer"] * 6, strict=True), ({}, "optimizer")], ids=str
)
def test_the_policy_equals_plain_torchs(changes: dict[str, Any], logit_step: str, device: torch.device) -> None:
    ours, theirs = (Sites(device, logit_step=logit_step, **changes) for _ in range(2))
    for step in range(4):
        one_step(ours, step)
        with plain_torch():
            one_step(theirs, step)
        assert_alike(ours.state(), theirs.state())
        assert [one.logits.grad is None for one in ours.sites] == [one.logits.grad is None for one in theirs.sites]
        if step == 1:
            ours.drop()
            theirs.drop()
        if step == 2:
            ours.statistics.reset()
            theirs.statistics.reset()


@pytest.mark.parametrize(
    ("scaled", "share", "logit_step"),
    [(False, "site", "schedule"), (True, "model", "schedule"), (True, "site", "optimizer")],
)
def test_the_step_of_an_optimizer_that_maximizes_or_holds_some_of_the_sites_equals_plain_torchs(
    scaled: bool, share: str, logit_step: str, device: torch.device
) -> None:
    ours, theirs = (Sites(device, logit_step=logit_step, share=share) for _ in range(2))
    for step, found_inf in enumerate((0.0, 1.0, 0.0)):
        infinite, scale = torch.tensor(found_inf, device=device), torch.tensor(1000.0, device=device)
        for sites in (ours, theirs):
            sites.step = Step(sites.router, (1, -1, 0, 1, -1))
            sites.optimizer = SimpleNamespace(found_inf=infinite, grad_scale=scale) if scaled else SimpleNamespace()
        one_step(ours, step)
        with plain_torch():
            one_step(theirs, step)
        assert_alike(ours.state(), theirs.state())
    assert ours.statistics.count.max() == (2 if scaled else 3)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 1000),
    changes=st.sampled_from(POLICIES),
    logit_step=st.sampled_from(["schedule", "optimizer"]),
    gradient=st.sampled_from([0.0, 1e-30, 1e-12, 1.0, 1e15, torch.inf, torch.nan]),
    statistics=st.sampled_from([0.0, 1e-30, 1.0, 1e6, torch.nan]),
    called=st.lists(st.integers(0, 1), max_size=5),
)
def test_the_policy_equals_plain_torchs_for_any_input(
    seed: int,
    changes: dict[str, Any],
    logit_step: str,
    gradient: float,
    statistics: float,
    called: list[int],
    device: torch.device,
) -> None:
    states = []
    for plain in (False, True):
        sites = Sites(device, seed, sizes=((4, 1), (3, 2)), logit_step=logit_step, **changes)
        with plain_torch() if plain else nullcontext():
            for step in range(2):
                sites.draw(step)
                sites.call(*called, scale=statistics)
                sites.differentiate(0, scale=gradient)
                sites.differentiate(1)
                sites.act()
        states.append(sites.state())
    assert_alike(*states)


@pytest.mark.parametrize("changes", [{}, {"correction": "none"}], ids=str)
def test_statistics_are_averaged_over_ranks_once_a_step(
    changes: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def add_another_rank(total: Tensor) -> None:
        asked.append(total)
        total.add_(torch.linspace(0, 1, total.numel(), device=total.device).view_as(total))

    monkeypatch.setattr(torch.distributed, "all_reduce", add_another_rank)
    for module in (gathering, policy):
        monkeypatch.setattr(module, "rank_count", lambda: 2)
    ours, theirs = Sites(device, **changes), Sites(device, **changes)
    for step in range(2):
        one_step(ours, step)
        averaged = len(asked)
        with plain_torch():
            one_step(theirs, step)
        assert_alike(ours.state(), theirs.state())
        assert averaged == len(asked) - averaged == (changes.get("correction") != "none")
        asked.clear()


def test_a_saved_running_gradient_resumes(device: torch.device) -> None:
    ours, resumed = Sites(device), Sites(device)
    for sites in (ours, resumed):
        one_step(sites, 1)
    resumed.statistics = RoundStatistics(resumed.router.rows, resumed.router.k, device)
    for name, tensor in resumed.statistics.state_dict().items():
        tensor.copy_(ours.statistics.state_dict()[name])
    for sites in (ours, resumed):
        one_step(sites, 2)
    assert all(torch.equal(own, other) for own, other in zip(ours.state(), resumed.state(), strict=True))


def test_a_whole_training_equals_plain_torchs(device: torch.device) -> None:
    states = []
    x, y = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(0)).to(device)
    for plain in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).to(device)
        # A small step size: in so few steps, the default one would amplify the last bits of each step.
        config = FlexConfig(
            candidates=("relu", "tanh", "identity"),
            init="original",
            commit_at=0.8,
            policy=Policy(noise=1.0, logit_step_size=1),
        )
        model = flexact.convert(model, config=config, share="site")
        optimizer = torch.optim.SGD(flexact.param_groups(model, lr=0.05))
        schedule = flexact.Schedule(model, total_steps=8, optimizer=optimizer)
        with plain_torch() if plain else nullcontext():
            for _ in range(8):
                ((model(x) - y).square().mean() + flexact.penalty(model)).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        assert schedule.committed
        states.append(list(model.state_dict().values()))
    off = 1e-4 if device.type == "cpu" else 1e-2  # rounding differences of each step reach the next
    for ours, theirs in zip(*states, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=off, atol=off, equal_nan=True)
