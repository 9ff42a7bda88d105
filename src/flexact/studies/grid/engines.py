"""Engines, which run the cells of a grid: processes of this machine, threads that share a GPU, or a Ray cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from flexact.errors import FlexActError
from flexact.io.markdown_tables import counted
from flexact.io.value_checks import check_known
from flexact.studies.grid.cell_task import Engine, Task, run_task, without_step_ms
from flexact.studies.workers import Answer, Pool, Workers, run_tasks

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


ENGINES = ("local", "streams", "ray")


def engine(name: str, device: str | None, jobs: int | None, address: str | None) -> Engine:
    """An engine by its name."""
    check_known("engine", name, ENGINES)
    if name == "ray":
        from flexact.studies.grid.ray_engine import ray_engine

        return ray_engine(device, jobs, address)
    if address is not None:
        raise FlexActError("--address is the address of a Ray cluster; give it with --engine ray.")
    if name == "streams":
        return streams_engine(devices(device)[0], jobs)
    return local_engine(devices(device), jobs)


def local_engine(devices: Sequence[str], jobs: int | None) -> Engine:
    """One process per device, or `jobs` processes that share the devices."""
    assigned = [devices[i % len(devices)] for i in range(jobs or len(devices))]
    return _engine(lambda: Pool(assigned, run_task), shares=len(assigned) > len(set(assigned)))


def streams_engine(device: str, jobs: int | None) -> Engine:
    """`jobs` threads of this process, which share one device."""
    return _engine(lambda: Threads(device, jobs or DEFAULT_JOBS), shares=True)


def _engine(workers: Callable[[], Workers], shares: bool) -> Engine:
    """The engine of these workers. shares: whether several of them share a device."""

    def run(tasks: Sequence[Task], ended: Callable[[Task, Answer], None], beat: Callable[[], bool]) -> None:
        def kept(task: Task, answer: Answer) -> None:
            ended(task, without_step_ms(answer) if shares else answer)

        run_tasks(workers(), tasks, kept, beat)

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
