"""One call of a site, and the policy's own work in a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

import flexact
from cost_rows.networks import BLEND
from cost_rows.row import Row
from flexact.routing.sites import sites_of
from flexact.studies.overhead.timing import interleaved, spread

CALL = ("one site, 16 elements", "call beyond that of a ReLU, us")
POLICY = "policy, 8 sites"
MOVING, STILL = "while the logits move, ms", "while they hold still, ms"
IN_A_TRIAL, COMMITTED = "in a trial, ms", "once committed, ms"
PHASES = (MOVING, STILL, IN_A_TRIAL, COMMITTED)
_STARTS = {"blend": {MOVING: 20, STILL: 355, COMMITTED: 1_055}, "trial": {IN_A_TRIAL: 20}}
"""The step from which a phase is measured: by then, a blend has dropped candidates at 350, and committed at 1,050."""
SITES = 8
STEPS = 40
"""Steps per phase and round."""


def call(repeats: int) -> Iterator[Row]:
    """Time forward and backward of a site, and of the ReLU in its place, on so few elements that the arithmetic of the
    candidates takes no time."""
    relu = nn.ReLU()
    network = flexact.convert(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)), config=BLEND)
    flexact.Schedule(network, network_steps=10**8)
    network(torch.randn(1, 16))  # draws the probabilities of this step, which all calls of a step share
    (site,) = sites_of(network)
    h, delta = torch.randn(1, 16, requires_grad=True), torch.randn(1, 16)

    def routed() -> None:
        site(h).backward(delta)
        site.router.call_statistics.clear()

    def plain() -> None:
        relu(h).backward(delta)

    times, errors = interleaved(
        {"routed": routed, "plain": plain}, repeats, torch.device("cpu"), clock=time.process_time
    )
    for error in errors.values():
        raise error
    beyond = [1e3 * (a - b) for a, b in zip(times["routed"], times["plain"], strict=True)]
    yield Row(*CALL, *spread(beyond), statistics.median(times["plain"]))


def policy(repeats: int) -> Iterator[Row]:
    """Time the policy's own work in a step: the hook before the optimizer's step, `schedule.step()`, and the
    probabilities of the next forward."""
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        for pick_by, starts in _STARTS.items():
            step, done = _training(pick_by), 0
            for phase, start in starts.items():
                for _ in range(start - done):
                    step()
                found.setdefault(phase, []).append(1e3 * statistics.median(step() for _ in range(STEPS)))
                done = start + STEPS
    for phase in PHASES:
        yield Row(POLICY, phase, *spread(found[phase]))


def _training(pick_by: str) -> Callable[[], float]:
    """Return a function that trains a narrow network for one step, and returns the seconds of the policy's work."""
    torch.manual_seed(0)
    layers = [layer for _ in range(SITES) for layer in (nn.Linear(4, 4), nn.GELU())]
    model = flexact.convert(nn.Sequential(*layers, nn.Linear(4, 1)), config=flexact.FlexConfig(pick_by=pick_by))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    schedule = flexact.Schedule(model, network_steps=8_000, optimizer=optimizer)
    router, x = sites_of(model)[0].router, torch.randn(8, 4)

    def step() -> float:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        start = time.process_time()
        action = schedule._action(optimizer)
        if action is not None:
            action(False)
        schedule.step(loss)
        router.refresh(training=True)
        return time.process_time() - start

    return step
