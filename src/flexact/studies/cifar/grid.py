"""The grid of the image study, run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flexact.errors import FlexActError
from flexact.studies.cifar.cells import Grid
from flexact.studies.cifar.protocol import Protocol
from flexact.studies.cifar.store import STUDY, Store, figures
from flexact.studies.cifar_data.data import Images
from flexact.studies.cifar_data.data import load as load_whole
from flexact.studies.grid import run as shared
from flexact.studies.grid.engines import Engine
from flexact.studies.grid.running import Load, Task, Train
from flexact.studies.grid.store import PLACE
from flexact.studies.grid.study import Cell
from flexact.studies.progress import Progress
from flexact.studies.tables import counted


def run(
    grids: Sequence[Grid],
    protocol: Protocol,
    data: Path,
    folder: Path,
    engine: Engine,
    *,
    partial: bool = False,
    train: Train | None = None,
    load: Load | None = None,
    resume: bool = False,
    overwrite: bool = False,
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> Store:
    """Run the cells that are not done yet; what ends is kept at once, whatever comes after.

    grids: none for the cells that the folder was asked for before.
    partial: take data sets with fewer images than the official ones.
    train, load: in the place of `train_cell` and `data.load`, for tests.
    """
    if train is None:
        from flexact.studies.cifar.train import train_cell

        train = train_cell
    if load is None:
        load = load_part if partial else load_whole
    trained, loaded, store = train, load, Store(folder)

    def task_of(cell: Cell, own: Path) -> Task:
        return Task(cell, protocol, own, Path(data).absolute(), trained, loaded, figures)

    def sha256_of(name: str) -> str:
        images = loaded(name, Path(data))
        count = len(images.train_y)
        if count < protocol.batch:
            raise FlexActError(
                f"{name} in {data} has {counted(count, 'training image')}, less than one --batch {protocol.batch}."
            )
        return str(images.sha256)

    shared.run(
        store,
        shared.configuration(STUDY, grids, protocol, {"partial": partial, PLACE: str(Path(data).absolute())}),
        task_of,
        sha256_of,
        engine,
        resume=resume,
        overwrite=overwrite,
        retry_failed=retry_failed,
        progress=progress,
    )
    return store


def load_part(name: str, folder: Path) -> Images:
    """A data set that may have fewer images than the official one."""
    return load_whole(name, folder, complete=False)
