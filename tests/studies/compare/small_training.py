"""A network and trainings that take a fraction of a second, which worker processes and the command can import.

FLEXACT_TEST_LOG: a file to which each training appends a line, so that tests see what was trained.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import flexact

CANDIDATES = ("relu", "tanh", "gelu")
STEPS = 30


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def scores(model: nn.Module, seed: int, make_schedule: Callable[..., flexact.Schedule] | None) -> Iterator[float]:
    """Regression of a smooth function; the score is the negative error."""
    if path := os.environ.get("FLEXACT_TEST_LOG"):
        with Path(path).open("a") as file:
            file.write(f"{seed} {type(model[1]).__name__}\n")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 2, generator=generator)
    y = torch.sin(2 * x[:, :1]) * x[:, 1:]
    optimizer = torch.optim.AdamW(flexact.param_groups(model), lr=0.02)
    schedule = make_schedule and make_schedule(total_steps=3 * STEPS, optimizer=optimizer)
    for step in range(1, (3 if schedule else 1) * STEPS + 1):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule:
            schedule.step(loss)
        if step % 10 == 0:
            yield -loss.item()


def train(model: nn.Module, seed: int, make_schedule: Callable[..., flexact.Schedule] | None) -> float:
    return list(scores(model, seed, make_schedule))[-1]


def slowly(model: nn.Module, seed: int, make_schedule: Callable[..., flexact.Schedule] | None) -> float:
    time.sleep(0.3)
    return train(model, seed, make_schedule)


def endless(model: nn.Module, seed: int, make_schedule: Callable[..., flexact.Schedule] | None) -> float:
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


def fails_on_seed_1(model: nn.Module, seed: int, make_schedule: Callable[..., flexact.Schedule] | None) -> float:
    if seed == 1 and not Path("corrected").exists():
        raise RuntimeError("the disk of the\nuser is missing")
    return train(model, seed, make_schedule)
