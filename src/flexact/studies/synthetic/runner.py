"""Runs a synthetic study: every model on every truth and seed. Each finished model is written immediately."""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

from flexact.errors import FlexActError
from flexact.io.atomic_files import write_whole
from flexact.io.result_folder import RESULTS, TABLE, check_same, enter, write_config
from flexact.observe.selection import selection
from flexact.routing.layer import FlexAct
from flexact.studies.grid.statistics import mean_and_deviation
from flexact.studies.progress import Progress
from flexact.studies.provenance import run_config
from flexact.studies.synthetic.options import Options, activation_of, check_models, policy
from flexact.studies.synthetic.replicas import GRID, Trained, train
from flexact.studies.synthetic.store import LINES, Part, Point, Result, read_parts, write_parts
from flexact.studies.synthetic.studies import Study
from flexact.studies.synthetic.tables import table
from flexact.studies.workers import Answer, Pool, Stop, cores, one_thread, run_tasks

CURVE_STEP = 125
"""A predicted curve has every n-th point of the grid, 81 in all."""


def run(
    study: Study,
    options: Options,
    folder: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Train the models that are not done yet, and write the tables. The results do not depend on `jobs`."""
    check_models(options)
    policies = {model: policy(model, options) for model in options.models}
    config = run_config(
        study.name,
        study.title,
        options=options.to_dict(),
        policies={model: found.to_dict() for model, found in policies.items() if found is not None},
        device=f"cpu ({platform.machine()}, {cores()} cores)",
    )
    before = enter(folder, study.name, resume=resume, overwrite=overwrite, writes=(RESULTS, LINES))
    parts: dict[str, Part] = {}
    if before is None:
        write_config(folder, config)
    else:
        check_same(folder, before, config, ("options", "policies", "versions"))
        parts = read_parts(folder, options)
    left = [model for model in options.models if model not in parts]
    work = functools.partial(train_model, study.name, options)
    progress = progress or Progress(quiet=True)

    def ended(model: str, answer: Answer) -> None:
        if answer.kind != "done":
            raise FlexActError(f"{model}: {answer.error}; the finished models are kept. Resume with --resume.")
        parts[model] = answer.figures
        write_parts(folder, parts, options.models)
        progress.finished(model)

    processes = min(jobs or cores(), len(left))
    with progress.over(len(left), done=len(parts)):
        if processes > 1:
            run_tasks(Pool(["cpu"] * processes, work), left, ended, has_to_stop=lambda: False)
        else:
            for model in left:
                ended(model, work(model, "cpu", stop=lambda: False))
    results = [row for model in options.models for row in parts[model].results]
    write_whole(folder / TABLE, table(study.title, options, results))


def train_model(study: str, options: Options, model: str, device: str, stop: Stop) -> Answer:
    """Train one model on all its cells, in one thread."""
    with one_thread():
        try:
            return Answer("done", _trained(study, options, model, stop))
        except Exception as error:
            return Answer("failed", error=f"{type(error).__name__}: {error}")


def _trained(study: str, options: Options, model: str, stop: Stop) -> Part:
    activation = activation_of(model, options)
    points: list[Point] = []

    def after_epoch(epoch: int) -> None:
        if stop():
            raise InterruptedError("the worker was asked to stop")
        if isinstance(activation, FlexAct):
            points.extend(_probabilities(model, options, epoch, activation))

    after_epoch(0)
    trained = train(options, activation, after_epoch)
    picks = [(model, 1.0)] * len(options.cells)
    if isinstance(activation, FlexAct):
        picks = [(row.pick or "undecided", row.probability) for row in selection(activation)]
    results = [
        Result(study, model, cell.truth, cell.seed, *pick, mse, spread, options.epochs)
        for cell, pick, mse, spread in zip(options.cells, picks, trained.mse, trained.spread, strict=True)
    ]
    return Part(results, points + _curves(model, options, trained))


def _probabilities(model: str, options: Options, epoch: int, activation: FlexAct) -> Iterator[Point]:
    """Yield the probability of each candidate after an epoch, with its deviation until all picks are made."""
    rows = list(zip(options.cells, selection(activation), strict=True))
    for truth in options.truths:
        own = [row for cell, row in rows if cell.truth == truth]
        picked = all(row.probability == 1.0 for row in own)
        for candidate in options.candidates:
            mean, deviation = mean_and_deviation([row.probabilities[candidate] for row in own])
            yield Point(model, truth, candidate, epoch, mean, 0.0 if picked else deviation)


def _curves(model: str, options: Options, trained: Trained) -> list[Point]:
    """Return the prediction, as the mean over seeds, and the truth over x₁ with the distractors at 0.

    Two-layer networks have no points: every seed has a teacher of its own, so a mean over seeds has no meaning.
    """
    points, x1 = [], torch.linspace(-1, 1, GRID)
    for truth in options.truths if options.hidden == 0 else ():
        own = [i for i, cell in enumerate(options.cells) if cell.truth == truth]
        for line, values in {"prediction": trained.predictions, "target": trained.targets}.items():
            xy = torch.stack([x1, values[:, own].mean(1)], 1)[::CURVE_STEP].tolist()
            points += [Point(model, truth, line, x, y) for x, y in xy]
    return points
