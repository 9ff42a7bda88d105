"""One cell: its folder, and the task that a worker of any engine runs."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from flexact.errors import FlexActError
from flexact.io.atomic_files import write_whole
from flexact.studies.grid.study import LOCK, Load, Train
from flexact.studies.workers import Answer

CURVE = "curve.csv"
OUTCOME = "outcome.json"
"""The columns of results.csv of a finished cell."""

Curve = list[dict[str, Any]]
"""One dictionary per epoch, with its number and its values; a missing value is NaN."""


def read_curve(folder: Path) -> Curve:
    """A cell's curve; empty if there is none yet."""
    path = folder / CURVE
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [
        {name: float(cell or "nan") for name, cell in row.items()} | {"epoch": int(row["epoch"])}
        for row in csv.DictReader(lines)
    ]


def epochs_in(folder: Path) -> int:
    """The number of epochs that a cell has completed."""
    curve = read_curve(folder)
    return int(curve[-1]["epoch"]) if curve else 0


def evaluated(curve: Curve, measure: str) -> dict[int, float]:
    """One column by epoch, for the epochs after which it was measured."""
    return {line["epoch"]: line[measure] for line in curve if not math.isnan(line.get(measure, math.nan))}


@contextmanager
def locked(path: Path, busy: str, seconds: float = 0.0) -> Iterator[None]:
    """Hold a lock file. If another process still holds it after this many seconds, raise an error with the text `busy`,
    in which "HOLDER" is replaced by the name of that process."""
    try:
        with FileLock(path).acquire(timeout=seconds, poll_interval=0.1):
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
            yield
    except Timeout:
        raise FlexActError(busy.replace("HOLDER", path.read_text(encoding="utf-8") or "another process")) from None


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock now."""
    if not path.exists():
        return False
    try:
        FileLock(path).acquire(timeout=0).lock.release()
    except Timeout:
        return True
    return False


LOCK_SECONDS = 60.0
"""Maximum seconds to wait until the orphaned worker of a killed grid releases the folder of its cell."""


class Stopped(FlexActError):
    """A cell was asked to stop. If its study has checkpoints, the cell resumes from its last one."""


@dataclass(frozen=True)
class CellTask:
    """A cell and what its run needs. It is sent to other processes and machines."""

    cell: Any
    protocol: Any
    folder: Path
    """The cell's folder; on a cluster, every machine must see it under this path."""
    data: Path
    """The folder of all data sets."""
    train: Train
    load: Load | None


Ended = Callable[[CellTask, Answer], None]
"""Receives a task that has ended and its answer."""
Engine = Callable[[Sequence[CellTask], Ended, Callable[[], bool]], None]
"""(tasks, ended, has_to_stop): runs tasks as `workers.run_tasks` does."""


def run_task(task: CellTask, device: str, stop: Callable[[], bool]) -> Answer:
    """Run or resume a cell, and return how it ended; errors of the cell become part of the answer."""
    name = str(torch.cuda.get_device_name(device)) if device.startswith("cuda") else device
    try:
        task.folder.mkdir(parents=True, exist_ok=True)
        with locked(task.folder / LOCK, f"HOLDER is still running in {task.folder}; stop it.", LOCK_SECONDS):
            if (task.folder / OUTCOME).is_file():  # the grid was killed before it could write the result
                return Answer("done", json.loads((task.folder / OUTCOME).read_bytes()))
            data = loaded(task.load, task.cell.data_name, task.data, task.protocol)
            row = task.train(task.cell, task.protocol, data, task.folder, torch.device(device), stop=stop)
            columns = row._asdict() | {"device": row.device or name}
            write_whole(task.folder / OUTCOME, json.dumps(columns) + "\n")
            return Answer("done", columns)
    except Exception as error:
        kind = "full" if disk_is_full(error) else "stopped" if stop() else "failed"
        words = " ".join(str(error).split())
        words = words if isinstance(error, FlexActError) else f"{type(error).__name__}: {words}"[:500]
        return Answer(kind, {"device": name}, words)


def without_step_ms(answer: Answer) -> Answer:
    """The same answer with NaN for `step_ms`, because step times are meaningless for cells that share a device."""
    figures = answer.figures or {}
    return replace(answer, figures=figures | dict.fromkeys(figures.keys() & {"step_ms"}, math.nan))


def disk_is_full(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, reports a full disk or an exceeded quota."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__ or error.__context__
    return False


@lru_cache(maxsize=2)
def loaded(load: Load | None, name: str, folder: Path, protocol: Any) -> Any:
    """Load a data set; None if it has no name. It is cached, because the cells of a worker share it."""
    return load(name, folder, protocol) if load and name else None
