"""Cells as tasks of a Ray cluster.

Ray retries the task of a worker that died, and the cell resumes from its last checkpoint; so all machines must see the
grid's folder and the data under the same paths.
"""

from __future__ import annotations

import logging
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from flexact.errors import FlexActError, missing_extra
from flexact.studies.grid.cell_task import Engine, Task, run_task
from flexact.studies.workers import Answer, run_tasks

RETRIES = 3
"""How often a cell is retried after its worker died."""
STOP = "stop"
"""A file in a cell's folder that asks its run to stop."""


def ray_engine(device: str | None, jobs: int | None, address: str | None) -> Engine:
    """One GPU per task if the cluster has GPUs (or `device` asks for them), and one CPU otherwise.

    jobs: the maximum number of tasks at a time; by default, as many as the cluster has room for.
    """
    try:
        import ray
    except ImportError:
        raise missing_extra("ray", "ray") from None
    if device not in (None, "cpu", "cuda"):
        raise FlexActError(f"on a Ray cluster --device is cpu or cuda: Ray chooses the GPU; got {device!r}.")

    def run(tasks: Sequence[Task], ended: Callable[[Task, Answer], None], beat: Callable[[], bool]) -> None:
        connected_here = not ray.is_initialized()
        if connected_here:
            _connect(ray, address)
        try:
            run_tasks(_Cluster(ray, device, jobs or len(tasks)), tasks, ended, beat)
        finally:
            if connected_here:
                ray.shutdown()

    return run


class _Cluster:
    """The `Workers` of the Ray engine."""

    def __init__(self, ray: Any, device: str | None, size: int) -> None:
        gpus = float(ray.cluster_resources().get("GPU", 0.0))
        if device == "cuda" and gpus < 1:
            raise FlexActError("the Ray cluster has no GPU; start a worker with one, or give --device cpu.")
        self.size = size
        self._device = device or ("cuda" if gpus >= 1 else "cpu")
        self._remote = ray.remote(num_cpus=1, num_gpus=int(self._device == "cuda"), max_retries=RETRIES)(_work)
        self._running: dict[Future[Answer], Path] = {}

    def submit(self, task: Task) -> Future[Answer]:
        (task.folder / STOP).unlink(missing_ok=True)
        future: Future[Answer] = self._remote.remote(task, self._device).future()
        self._running[future] = task.folder
        return future

    def stop(self) -> None:
        for future, folder in self._running.items():
            with suppress(OSError):  # on a full disk, the cell resumes from its last checkpoint
                if not future.done():
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / STOP).touch()

    def close(self) -> None:
        for folder in self._running.values():
            (folder / STOP).unlink(missing_ok=True)


def _work(task: Task, device: str) -> Answer:
    """Run a cell in a worker of the cluster."""
    if device == "cuda":
        torch.cuda.set_device(0)  # a task sees only its own GPU
        device = "cuda:0"
    return run_task(task, device, _StopFile(task.folder / STOP))


class _StopFile:
    """Whether a file exists; it is looked for once a second at most."""

    def __init__(self, path: Path) -> None:
        self._path, self._checked, self._found = path, -math.inf, False

    def __call__(self) -> bool:
        if not self._found and time.monotonic() - self._checked >= 1.0:
            self._checked, self._found = time.monotonic(), self._path.exists()
        return self._found


def _connect(ray: Any, address: str | None) -> None:
    """Connect to a cluster, or start one here if there is none and no address is given."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    try:
        if host and port.isdigit():  # Ray itself would wait for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        own = {} if address else {"include_dashboard": False}
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except Exception as error:  # Ray raises plain ones, such as "The current node timed out during startup"
        words = " ".join(str(error).split())[:300]
        raise FlexActError(
            (f"cannot reach the Ray cluster at {address}" if address else "cannot join or start a Ray cluster here")
            + f" ({words}); start one with `ray start --head`, or give --address HOST:PORT of a running one."
        ) from None
    if address is None:
        print(f"flexact: using the Ray cluster at {ray.get_runtime_context().gcs_address}", file=sys.stderr)
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)  # Ray's handlers end the program, and its cells, at once
