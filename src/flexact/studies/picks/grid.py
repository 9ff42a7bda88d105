"""The grid of the benchmark, run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexact.errors import FlexActError
from flexact.studies.cifar_data.data import load
from flexact.studies.grid import run as shared
from flexact.studies.grid.engines import Engine
from flexact.studies.grid.running import Task
from flexact.studies.grid.store import PLACE
from flexact.studies.grid.study import Cell
from flexact.studies.picks.cells import Grid
from flexact.studies.picks.protocol import Protocol
from flexact.studies.picks.store import STUDY, Store, figures
from flexact.studies.picks.tasks import TASKS
from flexact.studies.picks.train import train_cell
from flexact.studies.progress import Progress


def run(
    grids: Sequence[Grid],
    protocol: Protocol,
    data: Path,
    folder: Path,
    engine: Engine,
    *,
    partial: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> Store:
    """Run the cells that are not done yet; what ends is kept at once, whatever comes after.

    grids: none for the cells that the folder was asked for before.
    data: the folder with CIFAR-100, for the tasks that need it. partial: take fewer images than the official set has.
    """
    store, place = Store(folder), Path(data).absolute()

    def task_of(cell: Cell, own: Path) -> Task:
        return Task(cell, protocol, own, place, train_cell, place_of, figures)

    def sha256_of(name: str) -> str | None:
        return None if name in TASKS else _read(name, Path(data), partial)

    shared.run(
        store,
        shared.configuration(STUDY, grids, protocol, {"partial": partial, PLACE: str(place)}),
        task_of,
        sha256_of,
        engine,
        resume=resume,
        overwrite=overwrite,
        retry_failed=retry_failed,
        progress=progress,
    )
    return store


def place_of(name: str, folder: Path) -> Path:
    """A worker hands a task the folder of the data; the task reads from it what it needs, once per process."""
    return folder


def _read(name: str, data: Path, partial: bool) -> str:
    """The SHA-256 of a data set, which is read for it; an error that says which tasks need it where it cannot be."""
    try:
        return load(name, data, complete=not partial).sha256
    except FlexActError as error:
        needing = ", ".join(task.name for task in TASKS.values() if task.dataset == name)
        raise FlexActError(
            f"{str(error).rstrip()} The tasks {needing} need it: give its folder with --data, or leave them out with "
            "--tasks."
        ) from None
