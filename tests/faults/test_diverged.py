"""Tests of runs that diverge: they end with a network of finite numbers, or with a warning."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import flexact
from flexact import FlexConfig, Policy, Schedule

STEPS = 60
POLICIES = {
    "blend": FlexConfig(pick_by="blend"),
    "blend that rewinds": FlexConfig(pick_by="blend", rewind=True, commit_at=0.5),
    "trial": FlexConfig(pick_by="trial"),
    "optimizer": FlexConfig(pick_by="blend", policy=Policy(logit_step="optimizer")),
    "paper": FlexConfig.paper(),
    "warm-up": FlexConfig(pick_by="blend", init="original", warmup=0.3),
    "hard": FlexConfig(pick_by="blend", policy=Policy(forward="hard")),
}
TIMES: dict[str, Callable[[int], bool]] = {
    "always": lambda step: True,
    "from step 10 on": lambda step: step >= 10,
    "once": lambda step: step == 10,
    "after the commitment": lambda step: step >= STEPS - 5,
    "at the last step": lambda step: step == STEPS - 1,
}
SCALERS = ("none", "scaler", "fused")


def train(config: FlexConfig, is_nan: Callable[[int], bool], scaling: str) -> tuple[nn.Module, Schedule, list[str]]:
    """Returns the plain network of a run, its schedule, and the warnings."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    model = flexact.convert(network, config=config)
    optimizer = torch.optim.SGD(flexact.param_groups(model), lr=0.01, fused=scaling == "fused")
    scaler = torch.amp.GradScaler("cpu", enabled=scaling != "none")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule = Schedule(model, STEPS)
        for step in range(STEPS):
            loss = model(torch.randn(8, 3)).square().mean() * (math.nan if is_nan(step) else 1.0)
            scaler.scale(loss + flexact.penalty(model)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            schedule.step(loss)
        plain = flexact.extract(model)
    return plain, schedule, [str(one.message) for one in caught if "steps are few" not in str(one.message)]


@pytest.mark.parametrize("scaling", SCALERS)
@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_run_ends_in_nan_or_in_an_arbitrary_pick_without_a_warning(policy: str, when: str, scaling: str) -> None:
    plain, schedule, shown = train(POLICIES[policy], TIMES[when], scaling)
    assert schedule.committed
    is_finite = all(bool(parameter.isfinite().all()) for parameter in plain.parameters())
    assert is_finite or any("parameters are NaN or infinite" in one for one in shown)
    assert is_finite or scaling == "none"  # the gradient scaler skips these steps
    if when == "always":  # nothing could be compared
        undecided = ("picking stops, and every site keeps", "has stepped the logits", "have received no gradient")
        assert any(words in one for words in undecided for one in shown)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_finite_run_does_not_warn(policy: str) -> None:
    plain, _, shown = train(POLICIES[policy], lambda step: False, "none")
    assert all(bool(parameter.isfinite().all()) for parameter in plain.parameters())
    assert shown == []
