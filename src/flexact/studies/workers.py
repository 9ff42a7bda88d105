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
from typing import Any, Protocol

import torch

from flexact.errors import FlexActError

Stop = Callable[[], bool]
Work = Callable[[Any, str, Stop], Any]
"""(task, device, stop) -> answer."""

_stop_requested, _running = threading.Event(), threading.Lock()


@dataclass(frozen=True)
class Answer:
    """How a task ended. kind: done, failed, stopped (it was asked to stop) or full (the disk is full)."""

    kind: str
    figures: Any = None
    error: str = ""


class NotStarted(FlexActError):
    """A worker process failed to import the script of this process. Every other worker would fail, too."""


class Workers(Protocol):
    """What an engine has to provide. `submit` is called while fewer than `size` tasks are running."""

    size: int

    def submit(self, task: Any) -> Future[Answer]: ...
    def stop(self) -> None:
        """Ask the running tasks to stop."""

    def close(self) -> None: ...


def run_tasks(workers: Workers, tasks: Sequence[Any], ended: Callable[[Any, Answer], None], has_to_stop: Stop) -> None:
    """Run tasks and call `ended` with each task that started and its answer, in any order.

    has_to_stop: called about twice a second; once it returns True, the running tasks are stopped and no others start.
    """
    waiting, stopping = list(tasks), False
    running: dict[Future[Answer], Any] = {}
    try:
        while running or (waiting and not stopping):
            while waiting and not stopping and len(running) < workers.size:
                task = waiting.pop(0)
                running[workers.submit(task)] = task
            done, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            stop = has_to_stop()  # called first: a task that the same signal stopped has not failed
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
    """The answer of a task. A task whose worker died has failed, unless it was asked to stop. Raises `NotStarted`."""
    try:
        answer = future.result()
    except Exception as error:
        if isinstance(error, NotStarted) and not stopping:
            raise
        words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Answer("stopped" if stopping else "failed", error=f"the worker died, perhaps out of memory ({words})")
    if answer.kind == "stopped" and not stopping:
        return Answer("failed", error="a signal from another process stopped this cell; its checkpoint is kept")
    return answer


class Pool:
    """`Workers` as processes, which end when this process ends. devices: the device of each worker."""

    def __init__(self, devices: Sequence[str], work: Work) -> None:
        self.size, self._work = len(devices), work
        self._slots = [_Slot(device, len(devices)) for device in devices]

    def submit(self, task: Any) -> Future[Answer]:
        slot = next(slot for slot in self._slots if slot.future is None or slot.future.done())
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
        self.future: Future[Answer] | None = None
        self._executor: ProcessPoolExecutor | None = None

    def submit(self, work: Work, task: Any) -> Future[Answer]:
        if self.future is None or self.future.exception() is not None or self.future.result().kind != "done":
            self._start()
        assert self._executor is not None
        self.future = Future()
        self._executor.submit(_run, work, task, self.device).add_done_callback(self._ended)
        return self.future

    def _ended(self, future: Future[Answer]) -> None:
        """Pass on the answer of the task, or the reason why its process could not start."""
        assert self.future is not None
        error = future.exception()
        if error is None:
            self.future.set_result(future.result())
        elif self._pid.exception() is None:
            self.future.set_exception(error)
        else:
            script = getattr(sys.modules["__main__"], "__file__", "the main module")
            self.future.set_exception(
                NotStarted(
                    f"a worker process could not import {script}; its error is printed above. Put the call under "
                    "if __name__ == '__main__':, because each worker imports the script; or give engine='inline'."
                )
            )

    def _start(self) -> None:
        self.close()
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(1, context, _begin, (self.device, self.workers))
        self._pid = self._executor.submit(os.getpid)  # fails if the process cannot import the script

    def stop(self) -> None:
        """Ask the running task to stop, by SIGTERM."""
        if self.future is not None and not self.future.done():
            with suppress(Exception):  # the process has died, which its future reports
                os.kill(self._pid.result(), signal.SIGTERM)

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


def _begin(device: str, workers: int) -> None:
    """Prepare a worker process. It ignores Ctrl-C, which reaches all processes: the parent decides what stops."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: _stop_requested.set())
    threading.Thread(target=_watch_parent, daemon=True).start()
    if device == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def _run(work: Work, task: Any, device: str) -> Any:
    if device != "cpu":
        torch.cuda.set_device(device)
    with _running:
        return work(task, device, _stop_requested.is_set)


def _watch_parent() -> None:
    """Ask the task to stop when the parent process has ended, and end this process."""
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
    """Limit torch to one thread, and restore the number of threads at the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
