"""What the tests of the benchmark share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flexact
from flexact.candidates import known_names
from flexact.studies.picks.plain import FOLDER
from flexact.studies.picks.setting import Setting
from flexact.studies.picks.tasks import TASKS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="session")
def candidates() -> None:
    """The candidates of all tasks, also where this version of the library does not have them built in."""
    if "sine" not in known_names():
        flexact.register_candidate("sine", torch.sin, derivative=torch.cos)
    if "relu_squared" not in known_names():
        flexact.register_candidate("relu_squared", lambda h: F.relu(h).square(), derivative=lambda h: 2 * F.relu(h))


@pytest.fixture
def setting(tmp_path: Path) -> Callable[..., Setting]:
    """A function that sets up a task for some steps, in a grid's folder."""

    def set_up(name: str = "tabular", steps: int = 20, seed: int = 0, **changes: Any) -> Setting:
        task = replace(TASKS[name], steps=steps, **changes)
        return Setting(task, task.set_up(seed, CPU, None), seed, CPU, tmp_path / FOLDER, f"{name}-test-{seed}")

    return set_up
