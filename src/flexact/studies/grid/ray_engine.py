"""Cells as tasks of a Ray cluster. A worker that dies has its task retried by Ray, and the cell goes on from its last
checkpoint; so the grid's folder and the data lie where all machines see them under one path."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flexact.errors import FlexActError, missing_extra
from flexact.studies.grid.engine import Beat, Ended, Engine
from flexact.studies.grid.running import Asked, Task, run_task
from flexact.studies.workers import Answer

RETRIES = 3
"""How often a cell is tried again after its worker died."""
STOP = "stop"
"""A file in a cell's folder that asks its run to stop."""
_GRACE = 120
"""Seconds for the running cells to write a checkpoint."""


def ray_engine(device: str | None, jobs: int | None, address: str | None) -> Engine:
    """Tasks with one GPU each where the cluster has GPUs (or device says so), with one CPU each otherwise.

    jobs: how many at once, at most; all that the cluster has room for unless said.
    """
    try:
        import ray
    except ImportError:
        raise missing_extra("ray", "ray") from None
    if device not in (None, "cpu", "cuda"):
        raise FlexActError(f"on a Ray cluster --device is cpu or cuda: Ray says which GPU; got {device!r}.")

    def run(tasks: Sequence[Task], ended: Ended, beat: Beat) -> None:
        mine = not ray.is_initialized()
        if mine:
            _connect(ray, address)
        try:
            _run(ray, list(tasks), ended, beat, device, jobs)
        finally:
            if mine:
                ray.shutdown()

    return run


def _connect(ray: Any, address: str | None) -> None:
    _check_reachable(address)
    own = {} if address else {"include_dashboard": False}  # where no cluster runs, Ray starts one of its own
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise _unreachable(address, error) from None
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray's own end the program at once, and with it the cells


def _check_reachable(address: str | None) -> None:
    """Ray itself waits for minutes where nobody listens."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except (OSError, OverflowError) as error:
            raise _unreachable(address, error) from None


def _unreachable(address: str | None, error: Exception) -> FlexActError:
    words = " ".join(str(error).split())[:300]
    return FlexActError(
        f"cannot reach the Ray cluster at {address or 'its usual place'} ({words}); start one with `ray start --head`, "
        "or give --address HOST:PORT of one that runs."
    )


def _run(ray: Any, waiting: list[Task], ended: Ended, beat: Beat, device: str | None, jobs: int | None) -> None:
    gpus = float(ray.cluster_resources().get("GPU", 0.0))
    if device == "cuda" and gpus < 1:
        raise FlexActError("the Ray cluster has no GPU; start a worker with one, or give --device cpu.")
    place = device or ("cuda" if gpus >= 1 else "cpu")
    remote = ray.remote(num_cpus=1, num_gpus=1 if place == "cuda" else 0, max_retries=RETRIES)(_work)
    running: dict[Any, Task] = {}
    stopping, left = False, _GRACE
    while running or (waiting and not stopping):
        if beat() and not stopping:
            stopping = True
            waiting.clear()
            for task in running.values():
                with suppress(OSError):  # a full disk: the last checkpoint has to do
                    task.folder.mkdir(parents=True, exist_ok=True)
                    (task.folder / STOP).touch()
        while waiting and (jobs is None or len(running) < jobs):
            task = waiting.pop(0)
            (task.folder / STOP).unlink(missing_ok=True)
            running[remote.remote(task, place)] = task
        ready, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
        for reference in ready:
            task = running.pop(reference)
            ended(task, _answer(ray, reference, stopping))
            (task.folder / STOP).unlink(missing_ok=True)
        if stopping and not ready:
            left -= 1
            if left <= 0:
                for reference in running:
                    ray.cancel(reference, force=True)


def _answer(ray: Any, reference: Any, stopping: bool) -> Answer:
    try:
        answer: Answer = ray.get(reference)
        return answer
    except ray.exceptions.RayError as error:
        words = " ".join(str(error).split())[:300]
        return Answer("stopped" if stopping else "failed", error=f"{type(error).__name__}: {words}")


def _work(task: Task, device: str) -> Answer:
    """In a worker of the cluster."""
    if device == "cuda":
        torch.cuda.set_device(0)  # Ray shows a task its own GPU only
        device = "cuda:0"
    return run_task(task, device, Asked((Path(task.folder) / STOP).exists))
