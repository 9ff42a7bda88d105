"""Work spread over processes that report as they go, and that end with the process that started them.

Each worker has one pipe of its own. A worker whose parent is gone, killed or not, finds its pipe closed at the next
report and ends; a parent whose worker is gone finds the same.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from flexact.errors import FlexActError

Task = TypeVar("Task")
Report = Callable[[int], None]
Event = tuple[int, int | None, Any]
"""(index of the task, epochs done, None) while it runs; (index, None, its result) at its end."""


def cores() -> int:
    """How many this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_here(function: Callable[[Task, Report], Any], tasks: Sequence[Task], report: Callable[[Event], None]) -> None:
    """One after another in this process, on one thread: what `run_in_processes` gives, without its start."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for index, task in enumerate(tasks):
            report((index, None, function(task, lambda epoch, index=index: report((index, epoch, None)))))  # type: ignore[misc]
    finally:
        torch.set_num_threads(threads)


def run_in_processes(
    function: Callable[[Task, Report], Any], tasks: Sequence[Task], report: Callable[[Event], None], processes: int
) -> None:
    """In several processes, one thread each; the results come in any order."""
    context = multiprocessing.get_context("spawn")
    waiting = iter(enumerate(tasks))
    running: dict[Connection, int] = {}
    started: list[BaseProcess] = []
    try:
        for _ in range(min(processes, len(tasks))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, function), daemon=True)
            with deaf_to_interrupts():
                process.start()
            started.append(process)
            theirs.close()  # so that a worker's end is seen as the end of its pipe
            _give_next(ours, waiting, running)
        while running:
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                for event in _received(connection, running):
                    report(event)
                    if event[1] is None:
                        _give_next(connection, waiting, running)
    finally:
        for one in started:
            one.terminate()
        for one in started:
            one.join()


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Start a process that does not hear Ctrl-C, which reaches the whole group: the parent decides."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _received(connection: Connection, running: dict[Connection, int]) -> Iterator[Event]:
    index = running[connection]
    try:
        kind, value = connection.recv()
    except (EOFError, OSError):
        raise FlexActError(
            "a worker process ended before its work was done (out of memory?); what is done is kept, go on with "
            "--resume, or with --jobs 1."
        ) from None
    if kind == "error":
        raise value
    yield (index, value, None) if kind == "epoch" else (index, None, value)


def _give_next(connection: Connection, waiting: Iterator[tuple[int, Any]], running: dict[Connection, int]) -> None:
    running.pop(connection, None)
    following = next(waiting, None)
    if following is None:
        connection.close()
    else:
        running[connection], task = following
        connection.send(task)


def _work(connection: Connection, function: Callable[[Any, Report], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        while True:
            task = connection.recv()
            try:
                answer = ("done", function(task, lambda epoch: connection.send(("epoch", epoch))))
            except OSError:
                raise
            except Exception as error:
                answer = ("error", error)
            connection.send(answer)
    except (EOFError, OSError):
        return  # the parent is gone, or has no more work
