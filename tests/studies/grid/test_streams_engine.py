"""Cells in threads of this process: the results of one after another, and an end soon after a stop is asked for."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexact import FlexActError
from flexact.studies.device_lock import DeviceLock
from flexact.studies.grid.cell_task import Task, run_task
from flexact.studies.grid.engines import engine
from flexact.studies.grid.run import run
from flexact.studies.picks.protocol import Cell, Grid, Protocol
from flexact.studies.picks.study import Store
from flexact.studies.workers import Answer

TIMED = ("seconds", "date")
pytestmark = pytest.mark.filterwarnings("ignore:.*steps are few for a pick")


def results(folder: Path, own: Any) -> dict[Cell, dict[str, object]]:
    grid = Grid(("tabular",), ("fixed-relu", "fixed-tanh", "flexact", "flexact-alone", "random"), seeds=1)
    run(Store(folder / "out"), [grid], Protocol(steps=20), folder / "data", own, partial=False)
    rows = Store(folder / "out").results()
    return {cell: {k: v for k, v in row._asdict().items() if k not in TIMED} for cell, row in rows.items()}


def test_cells_in_threads_have_the_results_of_cells_one_after_another(tmp_path: Path) -> None:
    def one_by_one(tasks: Any, ended: Any, beat: Any) -> None:
        for task in tasks:
            ended(task, run_task(task, "cpu", beat))

    expected = results(tmp_path / "one", one_by_one)
    assert len(expected) == 5
    assert all(row["state"] == "done" for row in expected.values())
    assert results(tmp_path / "threads", engine("streams", "cpu", 3, None)) == expected


def tasks_of(train: Callable[..., Any], folder: Path, count: int) -> list[Task]:
    return [
        Task(Cell("tabular", "fixed-relu", seed), None, folder / str(seed), folder, train, lambda *_: None, vars)
        for seed in range(count)
    ]


class Grown:
    """What the engine told of its tasks."""

    def __init__(self) -> None:
        self.answers: dict[int, Answer] = {}

    def __call__(self, task: Task, answer: Answer) -> None:
        assert task.cell.seed not in self.answers
        self.answers[task.cell.seed] = answer


def test_a_stop_ends_what_runs_and_begins_nothing(tmp_path: Path) -> None:
    begun: list[int] = []

    def train(cell: Cell, *_: Any, stop: Callable[[], bool], **__: Any) -> None:
        begun.append(cell.seed)
        while not stop():
            time.sleep(0.01)
        raise FlexActError("stopped after 3 of 9 steps.")

    told = Grown()
    start = time.monotonic()
    engine("streams", "cpu", 2, None)(tasks_of(train, tmp_path, 6), told, lambda: len(begun) == 2)
    assert time.monotonic() - start < 10
    assert sorted(begun) == sorted(told.answers) == [0, 1]
    assert {answer.kind for answer in told.answers.values()} == {"stopped"}


def test_a_cell_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    def train(cell: Cell, *_: Any, **__: Any) -> Any:
        if cell.seed == 1:
            raise FlexActError("a network of tabular diverged")
        return SimpleNamespace(score=1.0)

    told = Grown()
    engine("streams", "cpu", 2, None)(tasks_of(train, tmp_path, 4), told, lambda: False)
    assert {seed: answer.kind for seed, answer in told.answers.items()} == {
        0: "done",
        1: "failed",
        2: "done",
        3: "done",
    }
    assert told.answers[1].error == "a network of tabular diverged"


def test_a_full_disk_stops_the_grid(tmp_path: Path) -> None:
    def train(cell: Cell, *_: Any, stop: Callable[[], bool], **__: Any) -> Any:
        raise FlexActError("cannot write") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told = Grown()
    engine("streams", "cpu", 1, None)(tasks_of(train, tmp_path, 200), told, lambda: False)
    assert 1 <= len(told.answers) < 200
    assert {answer.kind for answer in told.answers.values()} <= {"full", "stopped"}


def test_the_holder_of_the_device_lets_others_in_while_it_waits() -> None:
    lock, order = DeviceLock(), []
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait()
        with lock.held():
            order.append("other")
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with lock.held():
        inside.set()
        time.sleep(0.05)
        order.append("first")
        with lock.released():
            done.wait(5)
        order.append("again")
    thread.join()
    assert order == ["first", "other", "again"]
    with lock.released():  # held by nobody
        assert torch.ones(1).item() == 1
