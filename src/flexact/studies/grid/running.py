"""One cell, run in a process of its own: what a worker of any engine does, and how it answers."""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from flexact.errors import FlexActError
from flexact.studies.grid.locks import Taken, locked
from flexact.studies.grid.study import Cell, Load, Train
from flexact.studies.workers import Answer

LOCK = "run.lock"
"""In a cell's folder: held while the cell runs."""
PATIENCE = 60.0
"""Seconds to wait for a worker whose grid was killed to leave the cell's folder."""


@dataclass(frozen=True)
class Task:
    """A cell and what its run needs; it travels to other processes and machines."""

    cell: Cell
    protocol: Any
    folder: Path
    """The cell's own; on a cluster it lies where every machine sees it."""
    data: Path
    train: Train
    load: Load
    figures: Callable[[Any], dict[str, Any]]
    """What results.csv keeps of an outcome, by column."""


def without_step_ms(answer: Answer) -> Answer:
    """The same answer, with nothing said about the time of a step."""
    figures = answer.figures or {}
    return replace(answer, figures=figures | dict.fromkeys(figures.keys() & {"step_ms"}, math.nan))


def run_in_worker(task: Task, device: str, report: Callable[[Any], None], stop: Callable[[], bool]) -> Answer:
    """`run_task` as a worker of a pool calls it. The grid reads a cell's progress from its curve.csv instead."""
    return run_task(task, device, stop)


def run_task(task: Task, device: str, stop: Callable[[], bool]) -> Answer:
    """Run a cell, or go on with it, and say how it ended; no error of the cell's gets out."""
    told = _device_name(device)
    try:
        task.folder.mkdir(parents=True, exist_ok=True)
        with locked(task.folder / LOCK, PATIENCE):
            data = loaded(task.load, task.cell.dataset, task.data)
            outcome = task.train(
                task.cell, task.protocol, data, task.folder, torch.device(device), report=_unheard, stop=stop
            )
    except Taken as taken:
        return Answer("failed", error=f"{taken} is still at work in {task.folder}; stop it.", device=told)
    except Exception as error:
        if disk_is_full(error):
            return Answer("full", error=_told(error), device=told)
        if stop():
            return Answer("stopped", error=_told(error), device=told)
        return Answer("failed", error=_told(error), device=told)
    return Answer("done", task.figures(outcome), device=told)


class Asked:
    """A `stop` that looks at something slow, such as a file, once a second at most."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask, self._last, self._answer = ask, -math.inf, False

    def __call__(self) -> bool:
        now = time.monotonic()
        if not self._answer and now - self._last >= 1.0:
            self._last, self._answer = now, self._ask()
        return self._answer


def disk_is_full(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, says that there is no space left (or no quota)."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if "os error 28" in str(error) or "os error 122" in str(error):  # safetensors writes with Rust's errors
            return True
        error = error.__cause__ or error.__context__
    return False


@lru_cache(maxsize=2)
def loaded(load: Load, name: str, folder: Path) -> Any:
    """A worker's cells share what was read."""
    return load(name, folder)


def _unheard(*_: Any) -> None:
    """The grid reads how far a cell is from its curve.csv, which works on a cluster too."""


def _told(error: BaseException) -> str:
    words = " ".join(str(error).split())
    if isinstance(error, FlexActError):
        return words
    return f"{type(error).__name__}: {words}"[:500]


def _device_name(device: str) -> str:
    if device.startswith("cuda") and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(device))
    return device
