"""Trains one cell of the benchmark. A cell that was stopped restarts from the beginning."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flexact.config import FlexConfig
from flexact.studies.cuda_graph import study_stream
from flexact.studies.grid.fixed_methods import candidate_of
from flexact.studies.picks.cells import Cell
from flexact.studies.picks.device_lock import DEVICE
from flexact.studies.picks.methods import ABLATED
from flexact.studies.picks.picking import Picked, flexact_run, picked_at_random, picked_by_flexact
from flexact.studies.picks.plain import FOLDER, trained_alone
from flexact.studies.picks.protocol import Protocol
from flexact.studies.picks.race import picked_by_race
from flexact.studies.picks.setting import Setting
from flexact.studies.picks.tasks import TASKS
from flexact.studies.picks.training import never


@dataclass(frozen=True)
class Outcome:
    """The result of a cell."""

    score: float
    """Score on the test data; higher is better."""
    steps: int
    """Training steps, including those for picking."""
    seconds: float
    """Training time, without setup and evaluation."""
    picks: Mapping[str, str] = field(default_factory=dict)
    """Site → pick; empty for a fixed method."""


def train_cell(
    cell: Cell,
    protocol: Protocol,
    data: Path,
    folder: Path,
    device: torch.device,
    stop: Callable[[], bool] = never,
) -> Outcome:
    """Train a cell. Results that other cells can reuse are cached in the grid's folder.

    data: the folder of the data sets. folder: the cell's own folder in the grid's folder of cells.
    stop: called before each step.
    """
    task = protocol.shortened(TASKS[cell.task])
    kept = folder.parent.parent / FOLDER
    try:
        with DEVICE.held(), study_stream(device):
            setting = Setting(task, task.problem(cell.seed, device, data), cell.seed, device, kept, cell.name, stop)
            return _outcome(cell, setting, folder)
    finally:
        gc.collect()  # a CUDA graph is part of a reference cycle, which holds its memory


def _outcome(cell: Cell, setting: Setting, folder: Path) -> Outcome:
    candidate = candidate_of(cell.method)
    if candidate is not None:
        run = trained_alone(setting, setting.everywhere(candidate))
        return Outcome(run.score, run.steps, run.seconds)
    if cell.method == "flexact" or cell.method in ABLATED:
        return _flexact(setting, folder, ABLATED.get(cell.method, {}))
    flexact = folder.parent / Cell(cell.task, "flexact", cell.seed).name
    return _alone(setting, _picked(cell.method, setting, flexact))


def _flexact(setting: Setting, folder: Path, changes: Mapping[str, Any]) -> Outcome:
    """Train one run with a Schedule from the first step to the last."""
    training, picked = flexact_run(setting, **changes)
    picked.write(folder)
    schedule = training.schedule
    assert schedule is not None
    training.run(schedule.total_steps - schedule.steps_done, setting.stop)
    score = training.evaluate(setting.problem.score)
    return Outcome(score, schedule.total_steps, training.seconds, picked.picks)


def _picked(method: str, setting: Setting, flexact: Path) -> Picked:
    """Return the picks of a method. flexact: the folder of the flexact cell of the same seed."""
    if method == "flexact-alone":
        return picked_by_flexact(setting, flexact)
    if method == "flexact-one":
        shared = FlexConfig().share == "model"  # then flexact itself has one pick for the whole network
        return picked_by_flexact(setting, flexact) if shared else flexact_run(setting, share="model")[1]
    return {"random": picked_at_random, "race": picked_by_race}[method](setting)


def _alone(setting: Setting, picked: Picked) -> Outcome:
    """Train a fresh network with these picks."""
    run = trained_alone(setting, picked.picks)
    return Outcome(run.score, picked.steps + run.steps, picked.seconds + run.seconds, picked.picks)
