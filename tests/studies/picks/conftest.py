"""Fixtures of the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexact.studies.picks.protocol import Result
from flexact.studies.picks.tasks import TASKS
from flexact.studies.picks.train import FOLDER, RunContext

CPU = torch.device("cpu")


@pytest.fixture
def make_context(tmp_path: Path) -> Callable[..., RunContext]:
    """Returns a function that sets up a task for a number of steps, in a grid's folder."""

    def set_up(
        name: str = "tabular", steps: int = 20, seed: int = 0, device: torch.device = CPU, **changes: Any
    ) -> RunContext:
        task = replace(TASKS[name], steps=steps, **changes)
        return RunContext(
            task, task.problem(seed, device, None), seed, device, tmp_path / FOLDER, f"{name}-test-{seed}"
        )

    return set_up


@pytest.fixture(scope="session")
def rows() -> Callable[..., list[Result]]:
    """Returns a function that makes up rows of results.csv: one finished row for each seed from 0 on."""

    def make(task: str, method: str, scores: Sequence[float], **changes: Any) -> list[Result]:
        fields = {"state": "done", "steps": 100, "seconds": 10.0, "picks": "", "error": "", "device": "cpu"}
        made = {**fields, "torch": "2", "commit": "c", "date": "d", **changes}
        return [Result(task=task, method=method, seed=seed, score=score, **made) for seed, score in enumerate(scores)]

    return make
