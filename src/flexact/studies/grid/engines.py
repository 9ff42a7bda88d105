"""Who runs the cells: processes of this machine, or a Ray cluster. Results come back to the grid, which keeps them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from flexact.errors import FlexActError, suggestion
from flexact.studies.grid.running import Answer, Task, run_task
from flexact.studies.tables import counted
from flexact.studies.workers import deaf_to_interrupts

Ended = Callable[[Task, Answer], None]
Beat = Callable[[], bool]
"""Called about once a second; True: stop what is running, with a checkpoint, and begin nothing."""
Engine = Callable[[Sequence[Task], Ended, Beat], None]
"""Runs tasks: calls `ended` once for each one that it began, in any order."""

ENGINES = ("local", "streams", "ray")


def engine(name: str, device: str | None, jobs: int | None, address: str | None) -> Engine:
    """An engine by its name, its options checked."""
    if name not in ENGINES:
        raise FlexActError(f"unknown engine {name!r}{suggestion(name, ENGINES)} Known: {', '.join(ENGINES)}.")
    if name == "ray":
        from flexact.studies.grid.ray_engine import ray_engine

        return ray_engine(device, jobs, address)
    if address is not None:
        raise FlexActError("--address is where a Ray cluster is; give it with --engine ray.")
    if name == "streams":
        from flexact.studies.grid.streams_engine import streams_engine

        return streams_engine(devices(device)[0], jobs)
    return local_engine(devices(device), jobs)


def devices(device: str | None) -> list[str]:
    """What a device's name stands for here: "cuda" (or nothing, where there are GPUs) is all GPUs.

    >>> devices("cpu")
    ['cpu']
    """
    count = torch.cuda.device_count()
    if device is None:
        return [f"cuda:{index}" for index in range(count)] or ["cpu"]
    if device == "cpu":
        return ["cpu"]
    kind, _, index = device.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise FlexActError(f"unknown device {device!r}; give cpu, cuda (all GPUs) or cuda:N.")
    if count == 0 or (index and int(index) >= count):
        raise FlexActError(
            f"there is no {device} here: this machine has {counted(count, 'GPU')}; see `flexact doctor`."
        )
    return [device] if index else [f"cuda:{one}" for one in range(count)]


def local_engine(devices: Sequence[str], jobs: int | None) -> Engine:
    """One process a device, or `jobs` processes that share the devices; on a CPU they share its cores.

    Cells that share a device say nothing about what a step costs: `step_ms` is left out of their results.
    """
    places = [devices[i % len(devices)] for i in range(jobs or len(devices))]

    def run(tasks: Sequence[Task], ended: Ended, beat: Beat) -> None:
        _Local(places, list(tasks), ended).run(beat)

    return run


@dataclass
class _Worker:
    device: str
    process: BaseProcess
    pipe: Connection
    task: Task | None = None


@dataclass
class _Local:
    """The workers of one call. A worker that ended, or whose cell failed, is replaced by a fresh one: after a failure
    in CUDA a process is of no more use."""

    places: list[str]
    waiting: list[Task]
    ended: Ended
    workers: list[_Worker] = field(default_factory=list)
    stopping: bool = False

    @property
    def _shares(self) -> bool:
        return len(self.places) > len(set(self.places))

    def run(self, beat: Beat) -> None:
        try:
            for device in self.places[: len(self.waiting)]:
                self._start(device)
            while any(worker.task for worker in self.workers):
                ready = wait([worker.pipe for worker in self.workers], timeout=0.5)
                if beat() and not self.stopping:  # first: what a signal to the whole group ended did not fail
                    self._stop()
                for pipe in ready:
                    self._hear(next(worker for worker in self.workers if worker.pipe is pipe))
        finally:
            for worker in self.workers:
                worker.pipe.close()
                worker.process.terminate()
            for worker in self.workers:
                worker.process.join(timeout=10)
                if worker.process.is_alive():
                    worker.process.kill()

    def _start(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, device, len(self.places)), daemon=True)
        with deaf_to_interrupts():
            process.start()
        theirs.close()  # so that a worker's end is seen as the end of its pipe
        worker = _Worker(device, process, ours)
        self.workers.append(worker)
        self._give(worker)

    def _give(self, worker: _Worker) -> None:
        worker.task = self.waiting.pop(0) if self.waiting else None
        if worker.task is not None:
            with suppress(OSError):  # a worker that is gone is heard of as the end of its pipe
                worker.pipe.send(worker.task)

    def _hear(self, worker: _Worker) -> None:
        task = worker.task
        try:
            answer: Answer = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(timeout=10)
            answer = Answer("stopped" if self.stopping else "failed", error=_died(worker.process.exitcode))
        if answer.kind == "stopped" and not self.stopping:
            answer = Answer("failed", error="a signal that was not the grid's stopped it; its checkpoint is kept")
        worker.task = None
        if task is not None:
            self.ended(task, answer.without_step_ms() if self._shares else answer)
        if answer.kind == "full":
            self._stop()
        if answer.kind == "done" and not self.stopping:
            self._give(worker)
            return
        self.workers.remove(worker)
        worker.pipe.close()
        worker.process.join(timeout=10)
        if self.waiting and not self.stopping:
            self._start(worker.device)

    def _stop(self) -> None:
        self.stopping = True
        self.waiting.clear()
        for worker in self.workers:
            worker.process.terminate()


def _died(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name} (out of memory?)"
    return f"its process ended with status {code}"


def _work(pipe: Connection, device: str, workers: int) -> None:
    """A worker: SIGTERM, or the end of the grid's process, stops the cell with a checkpoint."""
    asked = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the grid decides
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    threading.Thread(target=_watch, args=(asked,), daemon=True).start()
    if device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    else:
        torch.cuda.set_device(device)
    try:
        while True:
            while not pipe.poll(0.2):
                if asked.is_set():
                    return
            answer = run_task(pipe.recv(), device, asked.is_set)
            pipe.send(answer)
            if answer.kind != "done":
                return
    except (EOFError, OSError):
        return  # the grid is gone


def _watch(asked: threading.Event) -> None:
    parent: Any = multiprocessing.parent_process()
    wait([parent.sentinel])
    asked.set()
    time.sleep(120)  # for the checkpoint; a cell that does not stop by then must not hold its folder for ever
    os._exit(1)
