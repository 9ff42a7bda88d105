"""Running a grid's cells, each one a run that can be stopped and gone on with.

Cells that are done are skipped, cells that fail are recorded and the grid goes on; only the process of the grid writes
the results.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from flexact.errors import FlexActError
from flexact.io.markdown_tables import counted
from flexact.io.result_folder import VERSION
from flexact.studies.grid.choices import Choices
from flexact.studies.grid.curves import read_curve
from flexact.studies.grid.engine import Engine
from flexact.studies.grid.protocol import GridProtocol
from flexact.studies.grid.running import Task, disk_is_full
from flexact.studies.grid.store import DIGESTS, DONE, FAILED, PLACE, Store
from flexact.studies.grid.study import Cell, GridStudy
from flexact.studies.progress import Progress
from flexact.studies.provenance import provenance, versions
from flexact.studies.workers import Answer


class Stopped(FlexActError):
    """A signal stopped the grid. number: of the signal."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


def run(
    store: Store[Any],
    grids: Sequence[Choices],
    protocol: GridProtocol,
    data: Path,
    engine: Engine,
    *,
    partial: bool | None = None,
    resume: bool = False,
    overwrite: bool = False,
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> None:
    """Run the cells that are not done yet. The result of every cell is kept as soon as it ends.

    grids: none for the cells that the folder was asked for before.
    partial: whether data sets may have fewer rows than the official ones; None where a study has no such option.
    """
    continues, study, place = resume or retry_failed, store.study, Path(data).absolute()
    if continues:
        store.config()  # raises where there is no grid to resume, before a folder is created
    options = {PLACE: str(place)} if partial is None else {"partial": partial, PLACE: str(place)}
    config = configuration(study, grids, protocol, options)
    load = study.loader(bool(partial))
    with store.held():
        cells = study.asked(config if grids else store.config())
        before = store.results() if continues else {}
        left = [
            Task(cell, protocol, store.cell_folder(cell).absolute(), place, study.train, load, study.figures)
            for cell in cells
            if cell not in before or (retry_failed and before[cell].state == FAILED)
        ]
        # Before the folder is opened: data that cannot be read are no cell's fault, and the folder stays as it was.
        names = dict.fromkeys(task.cell.dataset for task in left)
        digests = {name: study.sha256_of(name, protocol, Path(data), bool(partial)) for name in names}
        known = {name: digest for name, digest in digests.items() if digest is not None}
        config = config | {"data": config["data"] | {DIGESTS: known}}
        store.open(config, continues, overwrite)
        if left:
            _Run(store, left, engine, progress or Progress(quiet=True)).go(len(cells) - len(left))


def configuration(
    study: GridStudy, grids: Sequence[Choices], protocol: GridProtocol, data: Mapping[str, Any]
) -> dict[str, Any]:
    """What config.json holds: the grids asked for, if any are, and what the answers depend on."""
    made = provenance()
    return {
        "flexact_study": VERSION,
        "study": study.name,
        "title": study.title,
        "grids": [grid.to_dict() for grid in grids],
        "protocol": protocol.to_dict(),
        "data": dict(data),
        "versions": versions(),
        "commit": made["commit"],
        "date": made["date"],
    }


class _Run:
    """The grid while its cells run."""

    def __init__(self, store: Store[Any], tasks: list[Task], engine: Engine, progress: Progress) -> None:
        self.store, self.tasks, self.engine, self.progress = store, tasks, engine, progress
        self.indexes = {task.cell: index for index, task in enumerate(tasks)}
        self.made = provenance()
        self.kept: set[Cell] = set()
        self.full = ""
        self.signal = 0
        self.looked = 0.0

    def go(self, done: int) -> None:
        with self._signals(), self.progress.over([1.0] * len(self.tasks), done=done):
            self.engine(self.tasks, self._ended, self._beat)
        kept = f"{len(self.kept)} of {counted(len(self.tasks), 'cell')} kept, others go on from their last checkpoints"
        if self.full:
            raise FlexActError(
                f"the disk of {self.store.folder} is full ({self.full}); the grid was stopped and what was written is "
                f"valid: {kept}. Make room, then go on with --resume."
            )
        if self.signal:
            raise Stopped(f"stopped by {signal.Signals(self.signal).name}; {kept}.", self.signal)

    def _ended(self, task: Task, answer: Answer) -> None:
        if answer.kind == "stopped":
            return
        if answer.kind == "full":
            self.full = self.full or answer.error
            return
        study, cell, made = self.store.study, task.cell, self.made
        row = study.row(
            **cell.to_dict(),
            **{**study.blank, "device": answer.device, **(answer.figures or {})},
            state=DONE if answer.kind == "done" else FAILED,
            error=answer.error,
            torch=made["torch"],
            commit=made["commit"],
            date=made["date"],
        )
        try:
            self.store.append(row)
        except OSError as error:
            if not disk_is_full(error):
                raise
            self.full = self.full or str(error)
            return
        self.kept.add(cell)
        told = f": {study.told(row)}" if row.state == DONE else f" failed: {answer.error}"
        self.progress.finished(self.indexes[cell], cell.name + told)

    def _beat(self) -> bool:
        now = time.monotonic()
        if now - self.looked >= 2.0:
            self.looked = now
            for task in (task for task in self.tasks if task.cell not in self.kept):
                curve = read_curve(task.folder)
                if curve.epochs:
                    total = task.protocol.epochs_of(task.cell.dataset)
                    self.progress.at(self.indexes[task.cell], min(0.999, curve.epochs[-1] / total))
        return bool(self.signal or self.full)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGTERM or Ctrl-C asks the cells to stop; the second ends the grid where it stands."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are the main thread's
            return

        def heard(number: int, _: FrameType | None) -> None:
            if self.signal:
                raise KeyboardInterrupt
            self.signal = number

        before = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
