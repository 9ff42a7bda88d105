"""Tasks run by workers: the loop that every engine shares, and worker processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

Stop = Callable[[], bool]
Report = Callable[[Any], None]
Work = Callable[[Any, str, Report, Stop], Any]
"""(task, device, report, stop) -> answer."""

_stop_requested, _running = threading.Event(), threading.Lock()
_report_pipe: Connection | None = None


@dataclass(frozen=True)
class Answer:
    """How a task ended. kind: done, failed, stopped (with a checkpoint) or full (the disk is full)."""

    kind: str
    figures: Any = None
    error: str = ""
    device: str = ""


class Workers(Protocol):
    """What runs tasks. `submit` is called while fewer than `size` tasks are running."""

    @property
    def size(self) -> int: ...
    def submit(self, task: Any) -> Future[Answer]: ...
    def stop(self) -> None:
        """Ask the running tasks to write a checkpoint and end."""

    def close(self) -> None: ...


def run_tasks(
    workers: Workers, tasks: Sequence[Any], ended: Callable[[Any, Any], None], beat: Stop = lambda: False
) -> None:
    """Run tasks and call `ended` with each task that started and its answer, in any order.

    beat: called about twice a second; once it returns True, the running tasks are stopped and no other one starts.
    """
    waiting, stopping = list(tasks), False
    running: dict[Future[Answer], Any] = {}
    try:
        while running or (waiting and not stopping):
            while waiting and not stopping and len(running) < workers.size:
                task = waiting.pop(0)
                running[workers.submit(task)] = task
            done, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            stop = beat()  # before the answers: a task that the same signal ended has not failed
            for future in done:
                answer = _answer(future, stop or stopping)
                ended(running.pop(future), answer)
                stop = stop or answer.kind == "full"
            if stop and not stopping:
                stopping = True
                workers.stop()
    finally:
        workers.stop()
        workers.close()


def _answer(future: Future[Answer], stopping: bool) -> Answer:
    """The answer of a task; a worker that died has failed, unless it was asked to stop."""
    try:
        answer = future.result()
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Answer("stopped" if stopping else "failed", error=f"the worker died, out of memory? ({words})")
    if answer.kind == "stopped" and not stopping:
        return Answer("failed", error="another process's signal stopped this cell; its checkpoint is kept")
    return answer


class Pool:
    """Worker processes, one per entry of `places`, which names their devices; they end with this process.

    ended: called with every task that started and its answer. reported: called with a task and what it reports.
    """

    def __init__(
        self,
        places: Sequence[str],
        work: Work,
        waiting: Sequence[Any],
        ended: Callable[[Any, Any], None],
        reported: Callable[[Any, Any], None] = lambda task, value: None,
    ) -> None:
        self._work, self._waiting, self._ended, self._reported = work, waiting, ended, reported
        self._slots = [_Slot(place, len(places)) for place in places]

    @property
    def size(self) -> int:
        return len(self._slots)

    def run(self, beat: Stop = lambda: False) -> None:
        """Run all tasks; see `run_tasks`."""

        def beat_and_reports() -> bool:
            for slot in self._slots:
                slot.forward_reports(self._reported)
            return beat()

        run_tasks(self, self._waiting, self._ended, beat_and_reports)

    def submit(self, task: Any) -> Future[Answer]:
        slot = next(slot for slot in self._slots if slot.future is None or slot.future.done())
        slot.forward_reports(self._reported)
        return slot.submit(self._work, task)

    def stop(self) -> None:
        for slot in self._slots:
            slot.stop()

    def close(self) -> None:
        for slot in self._slots:
            slot.close()


class _Slot:
    """One worker process. It is replaced after a task that did not succeed: CUDA errors leave a process unusable."""

    def __init__(self, device: str, workers: int) -> None:
        self.device, self.workers = device, workers
        self.task: Any = None
        self.future: Future[Answer] | None = None
        self._executor: ProcessPoolExecutor | None = None

    def submit(self, work: Work, task: Any) -> Future[Answer]:
        if self.future is None or self.future.exception() is not None or self.future.result().kind != "done":
            self._start()
        assert self._executor is not None
        self.task, self.future = task, self._executor.submit(_run, work, task, self.device)
        return self.future

    def _start(self) -> None:
        self.close()
        context = multiprocessing.get_context("spawn")
        self._reports, theirs = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(1, context, _begin, (self.device, self.workers, theirs))
        self._pid = self._executor.submit(os.getpid)

    def forward_reports(self, reported: Callable[[Any, Any], None]) -> None:
        while self._executor is not None and self._reports.poll():
            reported(self.task, self._reports.recv())

    def stop(self) -> None:
        """Ask the running task to stop, by SIGTERM."""
        if self.future is not None and not self.future.done():
            with suppress(Exception):  # the process has died, which its future reports
                os.kill(self._pid.result(), signal.SIGTERM)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
            self._reports.close()


def _begin(device: str, workers: int, pipe: Connection) -> None:
    """Prepare a worker process. Ctrl-C reaches the whole process group, and the parent decides what stops."""
    global _report_pipe
    _report_pipe = pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _stop_requested.set())
    threading.Thread(target=_watch_parent, daemon=True).start()
    if device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))
    else:
        torch.cuda.set_device(device)


def _run(work: Work, task: Any, device: str) -> Any:
    with _running:
        return work(task, device, _report, _stop_requested.is_set)


def _report(value: Any) -> None:
    if _stop_requested.is_set():
        raise InterruptedError("the worker was asked to stop")
    assert _report_pipe is not None
    _report_pipe.send(value)


def _watch_parent() -> None:
    """Stop the task, with a checkpoint, when the parent process has ended."""
    parent: Any = multiprocessing.parent_process()
    parent.join()
    _stop_requested.set()
    _running.acquire(timeout=120)  # a task that has not stopped by then must not hold its folder forever
    os._exit(1)


def cores() -> int:
    """The number of cores that this process may use."""
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
