"""Cells that share one GPU in threads of this process, each on a CUDA stream.

The kernels of small networks fill a small part of a GPU. Processes take turns on it; streams of one process share it.
A study must be written for this: its cells may capture and allocate only one at a time (`picks.device_lock`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

from flexact.studies.grid.engine import Beat, Ended, Engine
from flexact.studies.grid.running import Task, run_task, without_step_ms
from flexact.studies.workers import Answer

USUAL = 16
"""Cells at once."""


def streams_engine(device: str, jobs: int | None) -> Engine:
    """An engine that runs `jobs` cells at once on one device."""

    def run(tasks: Sequence[Task], ended: Ended, beat: Beat) -> None:
        stop = threading.Event()

        def one(task: Task) -> Answer:
            if device.startswith("cuda"):
                torch.cuda.set_device(device)
            return run_task(task, device, stop.is_set)

        with ThreadPoolExecutor(jobs or USUAL) as pool:
            running: dict[Future[Answer], Task] = {pool.submit(one, task): task for task in tasks}
            try:
                while running:
                    done, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
                    for future in done:
                        answer = future.result()
                        ended(running.pop(future), without_step_ms(answer))
                        if answer.kind == "full":
                            stop.set()
                    if beat() or stop.is_set():
                        stop.set()
                        running = {future: task for future, task in running.items() if not future.cancel()}
            finally:
                stop.set()

    return run
