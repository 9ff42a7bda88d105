"""Trains one cell of the benchmark. A cell that was stopped restarts from the beginning."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from flexact.config import FlexConfig
from flexact.io.atomic_files import write_whole
from flexact.studies.cuda_graph import study_stream
from flexact.studies.device_lock import DEVICE
from flexact.studies.grid.study import candidate_of
from flexact.studies.picks.picking import Picked, flexact_run, further_steps, picked_at_random, picked_by_flexact
from flexact.studies.picks.protocol import ABLATED, Cell, Protocol
from flexact.studies.picks.setting import Picks, Setting
from flexact.studies.picks.tasks import TASKS
from flexact.studies.picks.training import Diverged, never

FOLDER = "plain"
"""The folder of the cache in the grid's folder."""


@dataclass(frozen=True)
class Plain:
    """The cached result of a plain run."""

    score: float
    steps: int
    seconds: float


def trained_alone(setting: Setting, picks: Picks) -> Plain:
    """Return the result of a network with these picks, which is trained once for all cells of a grid.

    The result depends on the network, the seed, the picks, the steps and the device, so it is cached in the grid's
    folder under a digest of these. Two cells that need it at the same time both train it.
    """
    path = setting.kept / f"{_digest(setting, picks)}.json"
    try:
        return Plain(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):  # missing, or from another version
        steps = setting.task.steps
    training = setting.plain(picks, steps)
    training.run(steps, setting.stop)
    result = Plain(training.evaluate(setting.problem.score), steps, training.seconds)
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_suffix(f".{setting.name}")  # another cell may write the same result
    write_whole(own, json.dumps(asdict(result)) + "\n")
    os.replace(own, path)
    return result


def _digest(setting: Setting, picks: Picks) -> str:
    task, on_gpu = setting.task, setting.device.type == "cuda"
    device = torch.cuda.get_device_name(setting.device) if on_gpu else setting.device.type
    what = [task.network or task.name, setting.seed, task.steps, sorted(picks.items()), device]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


def rungs_of(count: int, steps: int) -> list[tuple[int, int]]:
    """Return the number of networks per rung, and the steps of each network.

    Every rung has the same share of all steps, and half of its networks advance to the next.

    >>> rungs_of(7, 1200)
    [(7, 57), (4, 100), (2, 200)]
    """
    rungs = math.ceil(math.log2(count))
    found = []
    for _ in range(rungs):
        found.append((count, max(1, steps // rungs // count)))
        count = (count + 1) // 2
    return found


def picked_by_race(setting: Setting) -> Picked:
    """Return the winner as the pick of every site. Each network of a rung is a fresh run whose learning rate falls to
    0. The better half by held-out loss advances; diverged networks come last."""
    left = list(setting.task.candidates)
    spent, seconds = 0, 0.0
    for count, steps in rungs_of(len(left), further_steps(setting)):
        losses = {}
        for candidate in left[:count]:
            losses[candidate], took = _raced(setting, candidate, steps)
            spent += steps
            seconds += took
        left = sorted(losses, key=lambda candidate: losses[candidate])[: (count + 1) // 2]
    return Picked(setting.everywhere(left[0]), spent, seconds)


def _raced(setting: Setting, candidate: str, steps: int) -> tuple[float, float]:
    """Return the held-out loss of a short run (infinite if it diverged), and its seconds."""
    training = setting.plain(setting.everywhere(candidate), steps)
    training.run(steps, setting.stop)
    try:
        return training.evaluate(setting.problem.held_out_loss), training.seconds
    except Diverged:
        return math.inf, training.seconds


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
