"""Time of the policy's own work per training step on a CPU: the hook before the optimizer's step, `schedule.step()`,
and the table of probabilities of the next forward.

    python benchmarks/policy_step.py [--sites 8] [--repeats 15]

It prints the medians in milliseconds in the phases of a run: while the logits move, while they hold still after a drop,
in a trial, and after the commitment.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch
from torch import nn

import flexact
from flexact.routing.sites import sites_of

STEPS = 40
"""Steps per repeat."""


def build(sites: int, pick_by: str) -> tuple[nn.Module, torch.optim.Optimizer, flexact.Schedule]:
    layers = [layer for _ in range(sites) for layer in (nn.Linear(4, 4), nn.GELU())]
    config = flexact.FlexConfig(pick_by=pick_by)
    model = flexact.convert(nn.Sequential(*layers, nn.Linear(4, 1)), config=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, flexact.Schedule(model, network_steps=8_000, optimizer=optimizer)


def timed(sites: int, phase: str, repeats: int) -> dict[str, float]:
    """Return the milliseconds per step of each part in one phase."""
    model, optimizer, schedule = build(sites, "trial" if phase == "trial" else "blend")
    router, x = sites_of(model)[0].router, torch.randn(8, 4)
    spent: dict[str, list[float]] = {"before the step": [], "schedule.step": [], "probabilities": []}

    def step() -> tuple[float, float, float]:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        start = time.perf_counter()
        action = schedule._action(optimizer)
        if action is not None:
            action(False)
        acted = time.perf_counter()
        schedule.step(loss)
        stepped = time.perf_counter()
        router.refresh(training=True)
        return acted - start, stepped - acted, time.perf_counter() - stepped

    until = {"moving": 20, "still": 355, "trial": 20, "committed": schedule.commit_step + 5}[phase]
    while schedule.steps_done < until:
        step()
    for _ in range(repeats):
        state = (model.state_dict(), schedule.state_dict()) if phase == "still" else None
        found = [step() for _ in range(STEPS)]
        for part, times in zip(spent.values(), zip(*found, strict=True), strict=True):
            part.append(1e3 * statistics.median(times))
        if state is not None:  # stay in the phase
            schedule.load_state_dict(state[1])
    return {name: statistics.median(own) for name, own in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    for phase in ("moving", "still", "trial", "committed"):
        found = timed(given.sites, phase, given.repeats)
        parts = ", ".join(f"{name} {own:.3f}" for name, own in found.items())
        print(f"{phase:10} {sum(found.values()):.3f} ms: {parts}", flush=True)


if __name__ == "__main__":
    main()
