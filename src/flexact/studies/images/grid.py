"""The grid: data sets × models × methods × seeds, each cell one run that can be stopped and gone on with.

Cells that are done are skipped, cells that fail are recorded and the grid goes on; only the process of the grid writes
the results.
"""

from __future__ import annotations

import platform
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from flexact.errors import FlexActError, suggestion
from flexact.studies.images.curves import read_curve
from flexact.studies.images.data import NAMES, Images
from flexact.studies.images.data import load as load_whole
from flexact.studies.images.engines import Engine
from flexact.studies.images.methods import METHODS, MODELS
from flexact.studies.images.protocol import Cell, Protocol
from flexact.studies.images.running import Answer, Load, Task, Train, disk_is_full
from flexact.studies.images.store import DONE, FAILED, STUDY, Result, Store
from flexact.studies.progress import Progress
from flexact.studies.provenance import provenance
from flexact.studies.store import VERSION

MOST_SEEDS = 1000
TITLE = "CIFAR with ResNets: accuracy by activation"


class Stopped(FlexActError):
    """A signal stopped the grid. number: of the signal."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


@dataclass(frozen=True)
class Grid:
    """Which cells; checked.

    >>> [cell.name for cell in Grid(("cifar10",), ("resnet18",), ("relu",), seeds=2, first_seed=3).cells]
    ['cifar10-resnet18-relu-3', 'cifar10-resnet18-relu-4']
    """

    datasets: tuple[str, ...] = NAMES
    models: tuple[str, ...] = ("resnet18",)
    methods: tuple[str, ...] = METHODS
    seeds: int = 3
    first_seed: int = 0

    def __post_init__(self) -> None:
        kinds: Sequence[tuple[str, Sequence[str]]] = (("dataset", NAMES), ("model", tuple(MODELS)), ("method", METHODS))
        for kind, known in kinds:
            given: tuple[str, ...] = getattr(self, kind + "s")
            if not given:
                raise FlexActError(f"--{kind}s names nothing; give at least one of {', '.join(known)}.")
            for name in given:
                if name not in known:
                    raise FlexActError(f"unknown {kind} {name!r};{suggestion(name, known)} Known: {', '.join(known)}.")
            repeated = sorted({name for name in given if given.count(name) > 1})
            if repeated:
                raise FlexActError(f"--{kind}s may name each once; repeated: {', '.join(repeated)}.")
        for name, low, high in (("seeds", 1, MOST_SEEDS), ("first_seed", 0, 2**40)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                flag = name.replace("_", "-")
                raise FlexActError(f"--{flag} must be a whole number from {low} to {high}; got {value!r}.")

    @property
    def cells(self) -> list[Cell]:
        """Seed by seed, so that a grid that is cut short has all methods on the first seeds."""
        return [
            Cell(dataset, model, method, seed)
            for dataset in self.datasets
            for model in self.models
            for seed in range(self.first_seed, self.first_seed + self.seeds)
            for method in self.methods
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        names = {kind: list(getattr(self, kind)) for kind in ("datasets", "models", "methods")}
        return {**names, "seeds": self.seeds, "first_seed": self.first_seed}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Grid:
        """The inverse of `to_dict`."""
        try:
            names = {kind: tuple(data[kind]) for kind in ("datasets", "models", "methods")}
            return cls(**names, seeds=data["seeds"], first_seed=data["first_seed"])
        except (KeyError, TypeError):
            raise FlexActError(f"not a grid of cells: {data!r:.80}.") from None


def run(
    grid: Grid,
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

    partial: take data sets with fewer images than the official ones.
    train, load: in the place of `train_cell` and `data.load`, for tests.
    """
    if train is None:
        from flexact.studies.images.train import train_cell

        train = train_cell
    if load is None:
        load = load_part if partial else load_whole
    store = Store(folder)
    with store.held():
        store.open(configuration(grid, protocol, partial), resume or retry_failed, overwrite)
        before = store.results()
        left = [
            Task(cell, protocol, store.cell_folder(cell).absolute(), Path(data).absolute(), train, load)
            for cell in grid.cells
            if cell not in before or (retry_failed and before[cell].state == FAILED)
        ]
        if left:
            for name in dict.fromkeys(task.cell.dataset for task in left):
                load(name, Path(data))  # data that cannot be read are no cell's fault
            _Run(store, left, engine, progress or Progress(quiet=True)).go(len(grid.cells) - len(left))
    return store


def load_part(name: str, folder: Path) -> Images:
    """A data set that may have fewer images than the official one."""
    return load_whole(name, folder, complete=False)


def configuration(grid: Grid, protocol: Protocol, partial: bool = False) -> dict[str, Any]:
    """What config.json holds: the grids asked for, and what the answers depend on."""
    made = provenance()
    return {
        "flexact_study": VERSION,
        "study": STUDY,
        "title": TITLE,
        "grids": [grid.to_dict()],
        "protocol": protocol.to_dict(),
        "data": {"partial": partial},
        "versions": {"flexact": version("flexact"), "torch": torch.__version__, "python": platform.python_version()},
        "commit": made["commit"],
        "date": made["date"],
    }


def asked(config: dict[str, Any]) -> list[Cell]:
    """All cells that a folder's grids were asked for, each once."""
    grids = [Grid.from_dict(one) for one in config.get("grids", [])]
    return list(dict.fromkeys(cell for grid in grids for cell in grid.cells))


class _Run:
    """The grid while its cells run."""

    def __init__(self, store: Store, tasks: list[Task], engine: Engine, progress: Progress) -> None:
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
        kept = f"{len(self.kept)} of {len(self.tasks)} cells are kept, the others go on from their last checkpoints"
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
        cell, made = task.cell, self.made
        row = Result(
            cell.dataset,
            cell.model,
            cell.method,
            cell.seed,
            DONE if answer.kind == "done" else FAILED,
            answer.accuracy,
            answer.loss,
            answer.epochs,
            answer.seconds,
            answer.step_ms,
            answer.picks,
            answer.error,
            answer.device,
            made["torch"],
            made["commit"],
            made["date"],
        )
        try:
            self.store.append(row)
        except OSError as error:
            if not disk_is_full(error):
                raise
            self.full = self.full or str(error)
            return
        self.kept.add(cell)
        told = f"{cell.name}: {answer.accuracy:.2f} %" if row.state == DONE else f"{cell.name} failed: {answer.error}"
        self.progress.finished(self.indexes[cell], told)

    def _beat(self) -> bool:
        now = time.monotonic()
        if now - self.looked >= 2.0:
            self.looked = now
            for task in (task for task in self.tasks if task.cell not in self.kept):
                curve = read_curve(task.folder)
                if curve.epochs:
                    self.progress.at(self.indexes[task.cell], min(0.999, curve.epochs[-1] / task.protocol.epochs))
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
