"""Runs `train` for one cell. A cell that was stopped starts from the beginning."""

from __future__ import annotations

import ctypes
import json
import math
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flexact.candidates.registry import ORIGINAL
from flexact.errors import FlexActError
from flexact.io.atomic_files import write_rows, write_whole
from flexact.policy.schedule import Schedule
from flexact.routing.sites import sites_of
from flexact.studies.compare.functions import Functions
from flexact.studies.compare.protocol import FLEXACT, Cell, Protocol, Result
from flexact.studies.compare.setup import digest, network, seeded
from flexact.studies.grid.cell_task import CURVE, OUTCOME
from flexact.studies.grid.study import DONE, candidate_of, picked, picks_column
from flexact.surgery.convert import convert
from flexact.surgery.picks_file import load_picks


class Interrupted(BaseException):
    """Raised inside the training. It is not an Exception, so `except Exception` in a training does not catch it."""


@contextmanager
def interruptible(stop: Callable[[], bool]) -> Iterator[None]:
    """Raise `Interrupted` in the body within about a second after `stop()` returns True; it becomes a FlexActError."""
    thread, over = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            if stop():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Interrupted))
                return

    watcher = threading.Thread(target=watch, name="flexact-stop", daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            over.set()
            watcher.join()
            for _ in range(10):
                time.sleep(0)  # a pending exception is raised here rather than later
    except Interrupted:
        raise FlexActError("the training was stopped; it starts again when the comparison is resumed.") from None


TRACEBACK = "traceback.txt"
"""A file in a cell's folder: the traceback of a `train` that raised."""


class ScheduleMaker:
    """The third argument of `train` for the network that picks. `train` calls it once it has an optimizer and knows its
    number of steps, with the arguments of `Schedule` after the model. Returns the Schedule."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._sites = model, sites_of(model)  # `train` may extract the plain network
        self._made: Schedule | None = None
        self._warnings: list[str] = []

    def __call__(self, *args: Any, **options: Any) -> Schedule:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            self._made = Schedule(self._model, *args, **options)
        self._warnings = [str(one.message).removesuffix(".") for one in caught]
        for one in caught:
            warnings.warn(one.message, stacklevel=2)  # points at the line of `train`
        return self._made

    def picks_and_notes(self) -> tuple[dict[str, str], list[str]]:
        """The picks of the trained network by site, or by site and channel, empty if the policy never commits; and what
        a reader of the results has to know. Raises if `train` has not followed the schedule to its commitment."""
        made, uncommitted = self._made, sum(not site.committed for site in self._sites)
        ended = made is not None and made.steps_done >= made.total_steps
        times = "0 times" if made is None else f"{made.steps_done:,} of {made.total_steps:,} times"
        if uncommitted and not ended:
            raise FlexActError(
                f"{uncommitted} of {len(self._sites)} sites are not committed: schedule.step() was called {times}. "
                "Make the schedule from the third argument, make_schedule(network_steps=..., optimizer=...), "
                "train for schedule.total_steps, and call schedule.step(loss) after each step."
            )
        if uncommitted:
            return {}, ["the sites are not committed: this policy never commits", *self._warnings]
        picks = {
            site.name if len(site.picks) == 1 else f"{site.name}:{channel}": pick
            for site in self._sites
            for channel, pick in enumerate(site.picks)
        }
        early = [] if made is None or ended else [f"schedule.step() was called {times}"]
        return picks, [*self._warnings, *early]


def train_cell(
    functions: Functions,
    cell: Cell,
    protocol: Protocol,
    data: None,
    folder: Path,
    device: torch.device,
    stop: Callable[[], bool],
) -> Result:
    """Train a cell with the user's functions."""
    for name in (TRACEBACK, CURVE):  # of an earlier attempt
        (folder / name).unlink(missing_ok=True)
    model = network(functions.build, cell.seed)
    if digest(model) != protocol.architecture:
        raise FlexActError(
            "build() made another architecture than when the comparison began. It may depend on the machine or on "
            "a file; a comparison needs the same network in every run."
        )
    picks, schedule = _fixed_picks(cell, protocol, folder), None
    if picks:
        model = load_picks(model, picks)
    if cell.method == FLEXACT:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shown when the comparison began
            model = convert(model, functions.where, replace(protocol.flexact, seed=cell.seed))
        schedule = ScheduleMaker(model)
    _warm_up()
    with interruptible(stop), seeded(cell.seed):
        curve, seconds = _trained(functions.train, model, cell.seed, schedule, folder)
    if len(curve) > 1:
        write_rows(folder / CURVE, [{"epoch": i, "score": score} for i, score in enumerate(curve, start=1)])
    if schedule is None:
        shown = {} if candidate_of(cell.method) else picks  # the name of a fixed method has them
        return Result(cell.method, cell.seed, DONE, curve[-1], seconds, picks_column(shown))
    picks, notes = schedule.picks_and_notes()
    return Result(cell.method, cell.seed, DONE, curve[-1], seconds, picks_column(picks), "; ".join(notes))


@cache
def _warm_up() -> None:
    """Take one step of an optimizer, which imports much of torch for the first time, outside of what is timed."""
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.zeros(1, 1)).sum().backward()
    optimizer.step()


def _fixed_picks(cell: Cell, protocol: Protocol, folder: Path) -> dict[str, str]:
    """The activations of a plain network by site; empty for the original network and for the one that picks."""
    candidate = candidate_of(cell.method)
    if candidate is not None:
        return dict.fromkeys(protocol.sites, candidate)
    if cell.method in (ORIGINAL, FLEXACT):
        return {}
    flexact = Cell(FLEXACT, cell.seed)
    outcome = folder.parent / flexact.name / OUTCOME
    found = picked(json.loads(outcome.read_bytes())["picks"]) if outcome.is_file() else {}
    if not found:
        raise FlexActError(
            f"there are no picks to train: {flexact.name} failed or did not commit. Its row of results.csv has the "
            "error; fix its cause, then give --retry-failed or retry_failed=True."
        )
    return found


def _trained(
    train: Callable[..., Any], model: nn.Module, seed: int, schedule: ScheduleMaker | None, folder: Path
) -> tuple[list[float], float]:
    """The scores that `train` yielded, or the one that it returned; and its seconds."""
    start = time.perf_counter()
    try:
        answer = train(model, seed, schedule)
        given = list(answer) if isinstance(answer, types.GeneratorType) else [answer]
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except (Exception, SystemExit) as error:  # sys.exit() in a training must not end the comparison
        path = folder / TRACEBACK
        write_whole(path, traceback.format_exc())
        raise FlexActError(
            f"train raised {type(error).__name__}: {' '.join(str(error).split())[:300]}. The traceback is in "
            f"{'/'.join(path.parts[-3:])}."
        ) from error
    seconds = time.perf_counter() - start
    if not given:
        raise FlexActError("train yielded no score. Yield one after each evaluation; the last one counts.")
    return [_number(score, seed, last=i == len(given)) for i, score in enumerate(given, start=1)], seconds


def _number(score: Any, seed: int, last: bool) -> float:
    """A score as a float; raises if it is not a number, or if the last one is not finite."""
    try:
        value = float("no number" if isinstance(score, (str, bytes, bool)) else score)
    except (TypeError, ValueError, RuntimeError):
        raise FlexActError(
            f"train returned {score!r:.80} for seed {seed}. It must return the score as a number, or yield scores."
        ) from None
    if last and not math.isfinite(value):
        raise FlexActError(f"train returned {value} for seed {seed}: the training diverged, or the score is undefined.")
    return value
