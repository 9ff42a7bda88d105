"""Trains one cell of the benchmark: its method picks, and the network with the picks is trained and scored. A stopped
cell starts again from the beginning."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexact import Schedule, convert, load_picks
from flexact.candidates.registry import lookup
from flexact.errors import FlexActError
from flexact.io.atomic_files import write_whole
from flexact.routing.sites import sites_of
from flexact.studies.cifar_data.data import Images
from flexact.studies.cuda_graph import DEVICE, study_stream
from flexact.studies.grid.study import DONE, candidate_of, picks_column
from flexact.studies.picks.protocol import ABLATED, Cell, Protocol, Result, policy
from flexact.studies.picks.task import Problem, Task
from flexact.studies.picks.tasks import TASKS
from flexact.studies.picks.training import Diverged, Training, never, seed_for

FOLDER = "plain"
"""The folder of cached plain runs, in the grid's folder."""
FILE = "picks.json"
"""The file in the folder of a flexact cell to which its picks are written at the commitment."""

Picks = Mapping[str, str]
"""Site → candidate."""


@dataclass(frozen=True)
class Outcome:
    """The result of a cell, of a plain run, or of picking alone, which has no score."""

    picks: Picks
    """Empty for a fixed method."""
    steps: int
    """Training steps, including those for picking."""
    seconds: float
    """Training time, without setup and evaluation."""
    score: float = math.nan
    """Score on the test data; higher is better."""


@dataclass(frozen=True)
class RunContext:
    """What the run of a cell needs: a task's problem for one seed on a device, and where results are cached."""

    task: Task
    problem: Problem
    seed: int
    device: torch.device
    kept: Path
    """The folder of cached plain runs."""
    name: str
    """The name of the cell."""
    stop: Callable[[], bool] = never

    @cached_property
    def sites(self) -> list[str]:
        """The names of the network's activations, in the order of definition."""
        kind = type(lookup(self.task.original).module())
        found = [name for name, module in self.network().named_modules() if type(module) is kind]
        if not found:
            raise FlexActError(
                f"the network of the task {self.task.name} has no {kind.__name__} module. Its first candidate, here "
                f"{self.task.original}, must be the network's original activation: put that one first."
            )
        return found

    def network(self) -> nn.Module:
        """Return the network with its original activation, with the same weights for every method of a seed."""
        torch.manual_seed(seed_for("weights", self.seed))
        return self.problem.network()

    def everywhere(self, candidate: str) -> dict[str, str]:
        """Return picks with one candidate at every site."""
        return dict.fromkeys(self.sites, candidate)

    def plain(self, picks: Picks, steps: int) -> Training:
        """Return the training of a network with these picks."""
        return self.training(load_picks(self.network(), picks), steps)

    def training(self, network: nn.Module, steps: int) -> Training:
        """Return the training of a network of this task."""
        return Training(self.task, self.problem, network, self.seed, self.device, steps)


def train_cell(
    cell: Cell,
    protocol: Protocol,
    data: Images | None,
    folder: Path,
    device: torch.device,
    stop: Callable[[], bool] = never,
) -> Result:
    """Train a cell. Results that other cells can reuse are cached in the grid's folder.

    folder: the cell's own folder in the grid's folder of cells. stop: called before each step.
    """
    task = protocol.shortened(TASKS[cell.task])
    kept = folder.parent.parent / FOLDER
    try:
        with DEVICE, study_stream(device):
            context = RunContext(task, task.problem(cell.seed, device, data), cell.seed, device, kept, cell.name, stop)
            found = _outcome(cell, context, folder)
    finally:
        gc.collect()  # a CUDA graph is part of a reference cycle, which holds its memory
    return Result(**cell.to_dict(), state=DONE, **{**vars(found), "picks": picks_column(found.picks)})


def _outcome(cell: Cell, context: RunContext, folder: Path) -> Outcome:
    candidate = candidate_of(cell.method)
    if candidate is not None:
        return trained_alone(context, context.everywhere(candidate))
    if cell.method == "flexact" or cell.method in ABLATED:
        return _flexact(context, folder, ABLATED.get(cell.method, {}))
    if cell.method == "random":
        picked = picked_at_random(context)
    elif cell.method == "race":
        picked = picked_by_race(context)
    else:  # reuse the picks of the flexact cell; if it has not picked yet, pick here, with the same result
        flexact = folder.parent / Cell(cell.task, "flexact", cell.seed).name
        picked = _read(flexact / FILE) or flexact_run(context)[1]
    run = trained_alone(context, picked.picks)
    return Outcome(picked.picks, picked.steps + run.steps, picked.seconds + run.seconds, run.score)


def _flexact(context: RunContext, folder: Path, changes: Mapping[str, Any]) -> Outcome:
    """Train one run with a Schedule from the first step to the last."""
    training, picked = flexact_run(context, **changes)
    write_whole(folder / FILE, json.dumps(asdict(picked)) + "\n")  # for cells that reuse the picks
    schedule = training.schedule
    assert schedule is not None
    training.run(schedule.total_steps - schedule.steps_done, context.stop)
    score = training.evaluate(context.problem.score)
    return Outcome(picked.picks, schedule.total_steps, training.seconds, score)


def flexact_run(context: RunContext, **changes: Any) -> tuple[Training, Outcome]:
    """Run Flex-Act up to its commitment. changes: overrides of its policy."""
    network = convert(context.network(), config=policy(context.task, context.seed, **changes))
    training = context.training(network, context.task.steps)
    schedule = Schedule(network, optimizer=training.optimizer, network_steps=context.task.steps)
    training.schedule = schedule
    training.run(schedule.commit_step, context.stop)
    picks = {site.name: site.picks[0] for site in sites_of(network)}
    further = schedule.total_steps - context.task.steps  # a trial's steps with its winner belong to the plain run
    return training, Outcome(picks, further, training.seconds * further / schedule.commit_step)


def further_steps(context: RunContext) -> int:
    """Return the number of steps that Flex-Act takes in addition to a plain run."""
    network = convert(context.network(), config=policy(context.task, context.seed))
    return Schedule(network, network_steps=context.task.steps).total_steps - context.task.steps


def picked_at_random(context: RunContext) -> Outcome:
    """Return a random candidate for each site."""
    generator = torch.Generator().manual_seed(seed_for(f"random picks, {context.task.name}", context.seed))
    candidates, sites = context.task.candidates, context.sites
    chosen = torch.randint(len(candidates), (len(sites),), generator=generator).tolist()
    return Outcome({site: candidates[i] for site, i in zip(sites, chosen, strict=True)}, 0, 0.0)


def trained_alone(context: RunContext, picks: Picks) -> Outcome:
    """Return the result of a network with these picks, which is trained once for all cells of a grid.

    The result depends on the network, the seed, the picks, the steps and the device, so it is cached in the grid's
    folder under a digest of these. Two cells that need it at the same time both train it.
    """
    path = context.kept / f"{_digest(context, picks)}.json"
    if (known := _read(path)) is not None:
        return known
    steps = context.task.steps
    training = context.plain(picks, steps)
    training.run(steps, context.stop)
    result = Outcome({}, steps, training.seconds, training.evaluate(context.problem.score))
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_suffix(f".{context.name}")  # another cell may write the same result
    write_whole(own, json.dumps(asdict(result)) + "\n")
    os.replace(own, path)
    return result


def _read(path: Path) -> Outcome | None:
    """Return a cached result; None if it is missing, or from another version."""
    try:
        return Outcome(**json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _digest(context: RunContext, picks: Picks) -> str:
    task, on_gpu = context.task, context.device.type == "cuda"
    device = torch.cuda.get_device_name(context.device) if on_gpu else context.device.type
    what = [task.network or task.name, context.seed, task.steps, sorted(picks.items()), device]
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


def picked_by_race(context: RunContext) -> Outcome:
    """Return the winner as the pick of every site. Each network of a rung is a fresh run whose learning rate falls to
    0. The better half by held-out loss advances; diverged networks come last."""
    left = list(context.task.candidates)
    spent, seconds = 0, 0.0
    for count, steps in rungs_of(len(left), further_steps(context)):
        losses = {}
        for candidate in left[:count]:
            losses[candidate], took = _raced(context, candidate, steps)
            spent += steps
            seconds += took
        left = sorted(losses, key=lambda candidate: losses[candidate])[: (count + 1) // 2]
    return Outcome(context.everywhere(left[0]), spent, seconds)


def _raced(context: RunContext, candidate: str, steps: int) -> tuple[float, float]:
    """Return the held-out loss of a short run (infinite if it diverged), and its seconds."""
    training = context.plain(context.everywhere(candidate), steps)
    training.run(steps, context.stop)
    try:
        return training.evaluate(context.problem.held_out_loss), training.seconds
    except Diverged:
        return math.inf, training.seconds
