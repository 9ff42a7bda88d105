"""Runs a synthetic study: every model on every truth and seed. Each finished model is written immediately."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexact.errors import FlexActError
from flexact.io.atomic_files import write_whole
from flexact.io.result_folder import TABLE
from flexact.observe.selection import selection
from flexact.routing.layer import FlexAct
from flexact.studies.progress import Progress
from flexact.studies.provenance import run_config
from flexact.studies.synthetic import models as named
from flexact.studies.synthetic.options import Options, title
from flexact.studies.synthetic.replicas import BATCH, GRID, Trained, target, train
from flexact.studies.synthetic.store import Moment, Part, Point, Result, Store
from flexact.studies.synthetic.studies import Study
from flexact.studies.workers import Answer, Pool, Stop, cores, one_thread, run_tasks

HISTORY_POINTS = 100
"""Maximum number of epochs in history.csv, besides the start."""
CURVE_STEP = 125
"""curves.csv has every n-th point of the grid, 81 in all."""
_SMALL = 60
"""Total epochs up to which one process is faster than starting several."""


@dataclass(frozen=True)
class Group:
    """One model on all its cells: the unit of work and of resuming."""

    study: str
    model: str
    options: Options


def run(
    study: Study,
    options: Options,
    folder: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Store:
    """Train the models that are not done yet, and write the tables. The results do not depend on `jobs`."""
    named.check(options, study.models(options.candidates))
    store = Store(folder, configuration(study, options), options)
    store.open(resume, overwrite)
    left = [Group(study.name, model, options) for model in options.models if model not in store.done]
    progress = Progress(quiet=True) if progress is None else progress
    # Routing takes about three times as long as a fixed activation.
    costs = [1.0 if named.policy(group.model, options) is None else 3.0 for group in left]
    with progress.over(costs, done=len(store.done)):
        indexes = {group: index for index, group in enumerate(left)}

        def ended(group: Group, answer: Answer) -> None:
            if answer.kind != "done":
                raise FlexActError(
                    f"{group.model}: {answer.error}; the models that are done are kept. Continue with --resume, or "
                    "with --jobs 1."
                )
            store.add(group.model, answer.figures)
            progress.finished(indexes[group], title(group.model))

        processes = min(jobs or cores(), len(left))
        if processes > 1 and (jobs or len(left) * options.epochs > _SMALL):
            run_tasks(Pool(["cpu"] * processes, _train_in_worker), left, ended, beat=lambda: False)
        else:
            with one_thread():
                for index, group in enumerate(left):
                    ended(group, Answer("done", train_group(group, functools.partial(progress.at, index))))
    write_whole(folder / TABLE, study.table(options, store.results))
    return store


def _train_in_worker(group: Group, device: str, stop: Stop) -> Answer:
    """Train one model in a worker process, in one thread."""

    def after_epoch(share: float) -> None:
        if stop():
            raise InterruptedError("the worker was asked to stop")

    with one_thread():
        try:
            return Answer("done", train_group(group, after_epoch))
        except Exception as error:
            return Answer("failed", error=f"{type(error).__name__}: {error}")


def train_group(group: Group, after_epoch: Callable[[float], None]) -> Part:
    """Train one model on all its cells. after_epoch: called with the completed share."""
    options = group.options
    activation = named.activation(group.model, options)
    history: dict[int, list[dict[str, float]]] = {}
    stride = -(-options.epochs // HISTORY_POINTS)

    def note(epoch: int) -> None:
        if isinstance(activation, FlexAct) and (epoch % stride == 0 or epoch == options.epochs):
            history[epoch] = [row.probabilities for row in selection(activation)]

    def end_epoch(epoch: int) -> None:
        note(epoch)
        after_epoch(epoch / options.epochs)

    note(0)
    rate = named.rate(group.model, options)
    trained = train(options.task, options.cells, activation, options.epochs, end_epoch, rate)
    picks = [(group.model, 1.0)] * len(options.cells)
    if isinstance(activation, FlexAct):
        picks = [(row.pick or "undecided", row.probability) for row in selection(activation)]
    results = [
        Result(group.study, group.model, cell.truth, cell.seed, pick, probability, mse, spread, options.epochs)
        for cell, (pick, probability), mse, spread in zip(
            options.cells, picks, trained.mse, trained.spread, strict=True
        )
    ]
    moments = [
        Moment(group.model, cell.truth, cell.seed, epoch, candidate, probability)
        for i, cell in enumerate(options.cells)
        for epoch, rows in history.items()
        for candidate, probability in rows[i].items()
    ]
    return Part(results, moments, _points(group, trained))


def configuration(study: Study, options: Options) -> dict[str, Any]:
    """Return the content of config.json: the options, and everything else that the results depend on."""
    policies = {model: named.policy(model, options) for model in options.models}
    return run_config(
        study.name,
        study.title,
        options=options.to_dict(),
        policies={model: config.to_dict() for model, config in policies.items() if config is not None},
        training={
            "optimizer": "Adam",
            "batch": BATCH,
            "samples": options.task.samples,
            "learning_rate": {model: named.rate_text(model, options) for model in options.models},
        },
        device=f"cpu ({platform.machine()}, {cores()} cores)",
    )


def _points(group: Group, trained: Trained) -> list[Point]:
    """Return the prediction, as the mean over seeds, and the truth over x₁ with the distractors at 0.

    Two-layer networks have no points: every seed has a teacher of its own, so a mean over seeds has no meaning.
    """
    options = group.options
    if options.hidden:
        return []
    inputs = torch.zeros(GRID, 1 + options.distractors)
    inputs[:, 0] = trained.grid
    x1 = trained.grid[::CURVE_STEP].tolist()
    points = []
    for truth in options.truths:
        own = [i for i, cell in enumerate(options.cells) if cell.truth == truth]
        predicted = trained.predictions[:, own].mean(1)[::CURVE_STEP].tolist()
        wanted = target(options.task, options.cells[own[0]], inputs)[::CURVE_STEP].tolist()
        points += [Point(group.model, truth, *values) for values in zip(x1, predicted, wanted, strict=True)]
    return points
