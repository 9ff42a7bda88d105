"""Work spread over processes that report as they go, and that end with the process that started them.

Every worker has a pipe of its own. A worker that ended, or whose task failed, is replaced by a fresh one: after a
failure in CUDA a process is of no more use.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

Stop = Callable[[], bool]
Report = Callable[[Any], None]
Work = Callable[[Any, str, Report, Stop], Any]
"""(task, device, report, stop) -> answer. The answer's `kind` is "done", "failed", "stopped" or "full"."""


@dataclass(frozen=True)
class Answer:
    """How a task ended. kind: done, failed, stopped (with a checkpoint) or full (the disk is)."""

    kind: str
    figures: Any = None
    error: str = ""
    device: str = ""


def cores() -> int:
    """How many cores this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread, as every worker on a CPU does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class _Worker:
    device: str
    process: BaseProcess
    pipe: Connection
    task: Any = None


@dataclass
class Pool:
    """The workers of one call, one for each place.

    places: the device of each worker. ended: called with every task that began and its answer, in any order.
    reported: called with a task and what its work reports.
    """

    places: Sequence[str]
    work: Work
    waiting: list[Any]
    ended: Callable[[Any, Any], None]
    reported: Callable[[Any, Any], None] = lambda task, value: None
    workers: list[_Worker] = field(default_factory=list)
    stopping: bool = False

    def run(self, beat: Stop = lambda: False) -> None:
        """Run all tasks. beat: called about once a second; True stops what runs, and nothing more begins."""
        try:
            for device in self.places[: len(self.waiting)]:
                self._start(device)
            while any(worker.task is not None for worker in self.workers):
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
        process = context.Process(target=_serve, args=(theirs, self.work, device, len(self.places)), daemon=True)
        with _deaf_to_interrupts():
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
            is_report, answer = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(timeout=10)
            error = _died(worker.process.exitcode)
            is_report, answer = False, Answer("stopped" if self.stopping else "failed", error=error)
        if is_report:
            self.reported(task, answer)
            return
        if answer.kind == "stopped" and not self.stopping:
            answer = Answer("failed", error="a signal that was not the grid's stopped it; its checkpoint is kept")
        worker.task = None
        if task is not None:
            self.ended(task, answer)
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


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Start a process that ignores Ctrl-C, which reaches the whole group: the parent decides."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set signal handlers
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(pipe: Connection, work: Work, device: str, workers: int) -> None:
    """A worker: SIGTERM, or the end of the parent process, stops its task with a checkpoint."""
    asked = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
            answer = work(pipe.recv(), device, lambda value: pipe.send((True, value)), asked.is_set)
            pipe.send((False, answer))
            if answer.kind != "done":
                return
    except (EOFError, OSError):
        return  # the parent is gone


def _watch(asked: threading.Event) -> None:
    parent: Any = multiprocessing.parent_process()
    wait([parent.sentinel])
    asked.set()
    time.sleep(120)  # for the checkpoint; a task that does not stop by then must not hold its folder for ever
    os._exit(1)
