"""Who runs the cells: processes of this machine, or a Ray cluster. Results come back to the grid, which keeps them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexact.errors import FlexActError
from flexact.io.markdown_tables import counted
from flexact.io.option_checks import check_known
from flexact.studies.grid.engine import Beat, Ended, Engine
from flexact.studies.grid.running import Task, run_in_worker, without_step_ms
from flexact.studies.workers import Answer, Pool

ENGINES = ("local", "streams", "ray")


def engine(name: str, device: str | None, jobs: int | None, address: str | None) -> Engine:
    """An engine by its name, its options checked."""
    check_known("engine", name, ENGINES)
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
    share = len(places) > len(set(places))

    def run(tasks: Sequence[Task], ended: Ended, beat: Beat) -> None:
        def told(task: Task, answer: Answer) -> None:
            ended(task, without_step_ms(answer) if share else answer)

        Pool(places, run_in_worker, list(tasks), told).run(beat)

    return run
