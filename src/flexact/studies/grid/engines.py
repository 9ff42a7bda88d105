"""Engines, which run the cells of a grid: processes of this machine, threads that share a GPU, or a Ray cluster."""

from __future__ import annotations

import logging
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flexact.errors import FlexActError, missing_extra
from flexact.io.markdown_tables import counted
from flexact.io.value_checks import check_known
from flexact.studies.grid.cell_task import CellTask, Ended, Engine, run_task, without_step_ms
from flexact.studies.workers import Answer, Pool, Workers, run_tasks

DEFAULT_JOBS = 16


class Threads:
    """The `Workers` of the streams engine: threads of this process that share one GPU, each on its own CUDA stream.

    The kernels of small networks fill a small part of a GPU. Processes take turns on it; streams of one process share
    it. A study must support this: only one of its cells may capture a graph or allocate at a time
    (`DEVICE` in `studies.cuda_graph`).
    """

    def __init__(self, device: str, size: int) -> None:
        self.size, self._device = size, device
        self._executor = ThreadPoolExecutor(size)
        self._stop = threading.Event()

    def submit(self, task: CellTask) -> Future[Answer]:
        return self._executor.submit(self._run, task)

    def stop(self) -> None:
        self._stop.set()

    def close(self) -> None:
        self._executor.shutdown()

    def _run(self, task: CellTask) -> Answer:
        if self._device.startswith("cuda"):
            torch.cuda.set_device(self._device)
        return run_task(task, self._device, self._stop.is_set)


ENGINES = ("local", "streams", "ray")


def engine(name: str, device: str | None, jobs: int | None, address: str | None = None) -> Engine:
    """An engine by its name: one process per device, or `jobs` processes that share the devices ("local"); `jobs`
    threads that share one device ("streams"); or a Ray cluster ("ray")."""
    check_known("engine", name, ENGINES)
    if name == "ray":
        if find_spec("ray") is None:
            raise missing_extra("ray", "ray")
        if device not in (None, "cpu", "cuda"):
            raise FlexActError(f"on a Ray cluster --device is cpu or cuda: Ray chooses the GPU; got {device!r}.")
        return _engine(lambda tasks: Cluster(device, jobs or len(tasks), address))
    if address is not None:
        raise FlexActError("--address is the address of a Ray cluster; give it with --engine ray.")
    found = devices(device)
    if name == "streams":
        return _engine(lambda tasks: Threads(found[0], jobs or DEFAULT_JOBS), shares=True)
    assigned = [found[i % len(found)] for i in range(jobs or len(found))]
    return _engine(lambda tasks: Pool(assigned, run_task), shares=len(assigned) > len(set(assigned)))


def _engine(workers: Callable[[Sequence[CellTask]], Workers], shares: bool = False) -> Engine:
    """An engine from a function that starts its workers. shares: whether cells share a device."""

    def run(tasks: Sequence[CellTask], ended: Ended, has_to_stop: Callable[[], bool]) -> None:
        def kept(task: CellTask, answer: Answer) -> None:
            ended(task, without_step_ms(answer) if shares else answer)

        run_tasks(workers(tasks), tasks, kept, has_to_stop)

    return run


def devices(device: str | None) -> list[str]:
    """The devices that --device selects on this machine: "cuda" is all GPUs, and None is all GPUs or the CPU.

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


RETRIES = 3
"""How often Ray retries a cell whose worker died. The other engines do not retry."""
STOP = "stop"
"""A file in a cell's folder that asks its run to stop."""


class Cluster:
    """The `Workers` of the Ray engine. Each task has a GPU if `device` is "cuda", or None and the cluster has GPUs.

    Ray retries the task of a worker that died, and the cell resumes from its last checkpoint; so all machines must see
    the grid's folder and the data under the same paths.

    size: the maximum number of tasks at a time. The cluster may have room for fewer.
    """

    def __init__(self, device: str | None, size: int, address: str | None) -> None:
        import ray

        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            _connect(ray, address)
        self._ray: Any = ray
        self._running: dict[Future[Answer], Path] = {}
        gpus = float(ray.cluster_resources().get("GPU", 0.0))
        if device == "cuda" and gpus < 1:
            self.close()
            raise FlexActError("the Ray cluster has no GPU; start a worker with one, or give --device cpu.")
        self.size = size
        self._device = device or ("cuda" if gpus >= 1 else "cpu")
        self._remote: Any = ray.remote(num_cpus=1, num_gpus=int(self._device == "cuda"), max_retries=RETRIES)(_work)

    def submit(self, task: CellTask) -> Future[Answer]:
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
        if self._connected_here:
            self._ray.shutdown()


def _work(task: CellTask, device: str) -> Answer:
    """Run a cell in a worker of the cluster."""
    if device == "cuda":
        torch.cuda.set_device(0)  # a task sees only its own GPU
        device = "cuda:0"
    return run_task(task, device, _StopFile(task.folder / STOP))


class _StopFile:
    """Whether a file exists, checked at most once a second."""

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
    except Exception as error:  # Ray raises a plain Exception, such as "The current node timed out during startup"
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
