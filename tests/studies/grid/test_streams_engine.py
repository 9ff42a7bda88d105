"""Tests of cells in threads of this process: results equal sequential ones, and a stop takes effect soon."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexact import FlexActError
from flexact.studies.cuda_graph import DEVICE, released
from flexact.studies.grid.cell_task import CellTask, run_task
from flexact.studies.grid.engines import engine
from flexact.studies.grid.run import run
from flexact.studies.picks.protocol import Cell, Grid, Protocol, Result
from flexact.studies.picks.study import Store
from flexact.studies.workers import Answer

TIMED = ("seconds", "date")
pytestmark = pytest.mark.filterwarnings("ignore:.*steps are few for a pick")


def results(folder: Path, own: Any) -> dict[Cell, dict[str, object]]:
    grid = Grid(("tabular",), ("fixed-relu", "fixed-tanh", "flexact", "flexact-alone", "random"), seeds=1)
    run(Store(folder / "out"), [grid], Protocol(steps=20), folder / "data", own)
    rows = Store(folder / "out").results()
    return {cell: {k: v for k, v in row._asdict().items() if k not in TIMED} for cell, row in rows.items()}


def test_cells_in_threads_have_the_results_of_sequential_cells(tmp_path: Path) -> None:
    def one_by_one(tasks: Any, ended: Any, beat: Any) -> None:
        for task in tasks:
            ended(task, run_task(task, "cpu", beat))

    expected = results(tmp_path / "one", one_by_one)
    assert len(expected) == 5
    assert all(row["state"] == "done" for row in expected.values())
    assert results(tmp_path / "threads", engine("streams", "cpu", 3, None)) == expected


def tasks_of(train: Callable[..., Any], folder: Path, count: int) -> list[CellTask]:
    return [
        CellTask(Cell("tabular", "fixed-relu", seed), None, folder / str(seed), folder, train, load=None)
        for seed in range(count)
    ]


class Grown:
    """Collects the engine's reports on its tasks."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}

    def __call__(self, task: CellTask, answer: Answer) -> None:
        assert task.cell.seed not in self.answers
        self.answers[task.cell.seed] = answer


def test_a_stop_ends_running_cells_and_starts_none(tmp_path: Path) -> None:
    begun: list[int] = []

    def train(cell: Cell, *_: Any, stop: Callable[[], bool], **__: Any) -> None:
        begun.append(cell.seed)
        while not stop():
            time.sleep(0.01)
        raise FlexActError("stopped after 3 of 9 steps.")

    reports = Grown()
    start = time.monotonic()
    engine("streams", "cpu", 2, None)(tasks_of(train, tmp_path, 6), reports, lambda: len(begun) == 2)
    assert time.monotonic() - start < 10
    assert sorted(begun) == sorted(reports.answers) == [0, 1]
    assert {answer.kind for answer in reports.answers.values()} == {"stopped"}


def test_a_failing_cell_does_not_affect_the_others(tmp_path: Path) -> None:
    def train(cell: Cell, *_: Any, **__: Any) -> Any:
        if cell.seed == 1:
            raise FlexActError("a network of tabular diverged")
        return Result(**cell.to_dict(), state="done", score=1.0)

    reports = Grown()
    engine("streams", "cpu", 2, None)(tasks_of(train, tmp_path, 4), reports, lambda: False)
    assert {seed: answer.kind for seed, answer in reports.answers.items()} == {
        0: "done",
        1: "failed",
        2: "done",
        3: "done",
    }
    assert reports.answers[1].error == "a network of tabular diverged"


def test_a_full_disk_stops_the_grid(tmp_path: Path) -> None:
    def train(cell: Cell, *_: Any, stop: Callable[[], bool], **__: Any) -> Any:
        raise FlexActError("cannot write") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    reports = Grown()
    engine("streams", "cpu", 1, None)(tasks_of(train, tmp_path, 200), reports, lambda: False)
    assert 1 <= len(reports.answers) < 200
    assert {answer.kind for answer in reports.answers.values()} <= {"full", "stopped"}


def test_the_holder_of_the_device_releases_it_while_it_waits() -> None:
    order = []
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait()
        with DEVICE:
            order.append("other")
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with DEVICE:
        inside.set()
        time.sleep(0.05)
        order.append("first")
        with released():
            done.wait(5)
        order.append("again")
    thread.join()
    assert order == ["first", "other", "again"]
    with released():  # held by nobody
        assert torch.ones(1).item() == 1
