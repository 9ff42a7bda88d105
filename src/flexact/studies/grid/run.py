"""Runs the cells of a grid that are not done yet, and writes the result of each as soon as it ends.

A failed cell is recorded, and the grid continues. Only the process of the grid writes the results.
"""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from flexact.errors import FlexActError
from flexact.io.atomic_files import write_whole
from flexact.io.markdown_tables import counted
from flexact.io.result_folder import REPORT, TABLE
from flexact.report.build import build, missing_packages
from flexact.studies.grid.cell_task import CellTask, Engine, disk_is_full, loaded
from flexact.studies.grid.store import DIGESTS, PLACE, Store
from flexact.studies.grid.study import DONE, FAILED, Choices, GridProtocol
from flexact.studies.progress import Progress
from flexact.studies.provenance import provenance, run_config
from flexact.studies.workers import Answer


class GridStopped(FlexActError):
    """A signal stopped the grid. number: the number of the signal."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


def run(
    store: Store,
    grids: Sequence[Choices],
    protocol: GridProtocol,
    data: Path,
    engine: Engine,
    *,
    resume: bool = False,
    overwrite: bool = False,
    retry_failed: bool = False,
    progress: Progress | None = None,
) -> None:
    """Run the cells that are not done yet.

    grids: the grids to add; if empty, the cells that the folder already asks for are run.
    data: the folder of all data sets.
    """
    resume, study, place = resume or retry_failed, store.study, Path(data).absolute()
    if resume:
        store.config()  # raises if there is no grid to resume, before a folder is created
    made = provenance()
    config = run_config(
        study.name,
        study.title,
        grids=[dataclasses.asdict(grid) for grid in grids],
        protocol=protocol.to_dict(),
        data={PLACE: str(place)},
    )
    with store.held():
        cells = study.asked(config if grids else store.config())
        before = store.results() if resume else {}
        left = [
            CellTask(cell, protocol, store.cell_folder(cell).absolute(), place, study.train, study.load)
            for cell in cells
            if cell not in before or (retry_failed and before[cell].state == FAILED)
        ]
        # The data is read before the folder is opened: if that fails, the folder is unchanged.
        loaded.cache_clear()  # the files may have changed since an earlier grid of this process
        names = dict.fromkeys(task.cell.data_name for task in left if task.cell.data_name)
        config["data"][DIGESTS] = {name: loaded(study.load, name, place, protocol).sha256 for name in names}
        store.open(config, resume, overwrite)
        if left:
            _Run(store, left, made, progress or Progress(quiet=True)).go(engine, len(cells) - len(left))


def run_and_report(store: Store, progress: Progress, **options: Any) -> None:
    """Run a grid, write its table and build its page.

    Training does not need the packages that build the page; without them, the page can be built on another machine.
    """
    run(store, progress=progress, **options)
    write_whole(store.folder / TABLE, store.table())
    if not missing_packages():
        build(store.folder)


def page_of(folder: Path) -> str:
    """The path of a grid's page, or why it is not built."""
    if missing := ", ".join(missing_packages()):
        return f"not built, because {missing} is missing. Install 'flexact[report]', then: flexact report {folder}"
    return str(folder / REPORT)


class _Run:
    """A grid while its cells run."""

    def __init__(self, store: Store, tasks: list[CellTask], made: dict[str, str], progress: Progress) -> None:
        self.store, self.tasks, self.made, self.progress = store, tasks, made, progress
        self.counts: Counter[str] = Counter()
        """The number of results that are written, by state."""
        self.full = ""
        self.signal = 0

    def go(self, engine: Engine, done: int) -> None:
        """Run all tasks. done: the number of cells that earlier runs finished."""
        with self._signals(), self.progress.over(len(self.tasks), done=done):
            engine(self.tasks, self._ended, self._has_to_stop)
        kept = f"{self.counts[DONE]} of {counted(len(self.tasks), 'cell')} kept"
        kept += f", {self.counts[FAILED]} failed" if self.counts[FAILED] else ""
        kept += "; the others resume from their last checkpoints, or start again if they have none"
        if self.full:
            raise FlexActError(
                f"the disk with {self.store.folder} is full ({self.full}); the grid was stopped, and its files are "
                f"valid: {kept}. Free some space, then resume with --resume."
            )
        if self.signal:
            raise GridStopped(f"stopped by {signal.Signals(self.signal).name}; {kept}.", self.signal)

    def _ended(self, task: CellTask, answer: Answer) -> None:
        """Write the result of a cell."""
        if answer.kind == "full":
            self.full = self.full or answer.error
        if answer.kind not in ("done", "failed"):
            return
        study, cell = self.store.study, task.cell
        columns = cell.to_dict() | (answer.figures or {})
        columns |= {"state": DONE if answer.kind == "done" else FAILED, "error": answer.error}
        row = study.row(**columns | {name: self.made[name] for name in ("torch", "commit", "date")})
        try:
            self.store.add(row)
        except OSError as error:
            if not disk_is_full(error):
                raise
            self.full = self.full or str(error)
            return
        self.counts[row.state] += 1
        result = f": {study.summary(row)}" if row.state == DONE else f" failed: {answer.error}"
        self.progress.finished(cell.name + result)

    def _has_to_stop(self) -> bool:
        return bool(self.signal or self.full)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first SIGTERM or Ctrl-C asks the running cells to stop; the second raises KeyboardInterrupt."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can handle signals
            return

        def handle(number: int, _: FrameType | None) -> None:
            if self.signal:
                raise KeyboardInterrupt
            self.signal = number

        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
