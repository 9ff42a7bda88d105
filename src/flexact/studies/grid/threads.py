"""Threads of this process that share one GPU, each on its own CUDA stream.

The kernels of small networks fill a small part of a GPU. Processes take turns on it; streams of one process share it.
A study must support this: only one of its cells may capture a graph or allocate at a time (`picks.device_lock`).
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from flexact.studies.grid.cell_task import Task, run_task
from flexact.studies.workers import Answer

DEFAULT_JOBS = 16


class Threads:
    """The `Workers` of the streams engine."""

    def __init__(self, device: str, size: int) -> None:
        self.size, self._device = size, device
        self._executor = ThreadPoolExecutor(size)
        self._stop = threading.Event()

    def submit(self, task: Task) -> Future[Answer]:
        return self._executor.submit(self._run, task)

    def stop(self) -> None:
        self._stop.set()

    def close(self) -> None:
        self._executor.shutdown()

    def _run(self, task: Task) -> Answer:
        if self._device.startswith("cuda"):
            torch.cuda.set_device(self._device)
        return run_task(task, self._device, self._stop.is_set)
