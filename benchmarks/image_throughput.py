"""Measure how many cells of the image study one GPU trains per hour, by the number of cells that run at a time.

    python benchmarks/image_throughput.py [--out results/cifar/throughput.csv] [--method relu] [--jobs 1,2,4,8]

Each cell is a training of the image study on random images of CIFAR-100's shape, in a thread with its own CUDA
stream, as with `flexact reproduce cifar --engine streams`. The graphs of all cells are captured before the time is
measured. `cells_per_hour` is for runs of 30 epochs, and `ratio` is relative to the first row: one cell at a time with
the study's own setting of cuDNN. The settings are "deterministic" (the study's), "any" (algorithms that are not
deterministic are allowed), and both with cuDNN's benchmark, which times all algorithms and keeps the fastest one.
"""

from __future__ import annotations

import argparse
import functools
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from flexact.io.atomic_files import write_rows
from flexact.studies.cifar import training
from flexact.studies.cifar.methods import build
from flexact.studies.cifar.protocol import Protocol
from flexact.studies.cifar_data.data import Images, random_images
from flexact.studies.cifar_resnets import BLOCKS
from flexact.studies.cuda_graph import DEVICE, EAGER_STEPS, study_stream, wait
from flexact.studies.provenance import provenance

EPOCHS, IMAGES = 30, 50_000
SETTINGS = {
    "deterministic": {"deterministic": True},
    "any": {"deterministic": False},
    "deterministic, benchmark": {"deterministic": True, "benchmark": True},
    "any, benchmark": {"deterministic": False, "benchmark": True},
}
"""Arguments of torch.backends.cudnn.flags."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/cifar/throughput.csv"), help="the CSV file to write")
    parser.add_argument("--method", default="relu")
    parser.add_argument("--model", default="resnet18", choices=list(BLOCKS))
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--jobs", default="1,2,4,8", help="numbers of cells at a time, separated by commas")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each measurement")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = random_images(8 * given.batch if device.type == "cpu" else IMAGES).to(device)
    own, rows = provenance(), []
    for setting, arguments in SETTINGS.items():
        training.deterministic = functools.partial(_flags, arguments)
        for jobs in map(int, given.jobs.split(",")):
            rate = sum(_steps_per_second(given, images, device, jobs))
            cells = rate * 3600 / (EPOCHS * (IMAGES // given.batch))
            row = {"model": given.model, "batch": given.batch, "method": given.method, "cudnn": setting, "jobs": jobs}
            first = rows[0]["cells_per_hour"] if rows else cells
            rows.append(row | {"cells_per_hour": cells, "ratio": cells / first} | own)
            write_rows(given.out, rows)  # after each row, so that an interrupted run keeps its rows
            print(f"{setting:26}{jobs:3} jobs {cells:8.1f} cells per hour, {rows[-1]['ratio']:.2f}", flush=True)


def _flags(arguments: dict[str, bool], device: torch.device, benchmark: bool) -> AbstractContextManager[Any]:
    return torch.backends.cudnn.flags(enabled=True, **arguments)


def _steps_per_second(given: argparse.Namespace, images: Images, device: torch.device, jobs: int) -> Iterator[float]:
    """Train `jobs` cells at the same time, and yield the rate of each."""
    start, rates = threading.Barrier(jobs), [0.0] * jobs

    def train(number: int) -> None:
        with study_stream(device):
            with DEVICE:
                torch.manual_seed(number)
                protocol = Protocol(epochs=200, batch=given.batch, width=given.width)
                network = build(given.model, given.method, images.classes, protocol.config(number), given.width)
                if device.type == "cuda":
                    network = network.to(device, memory_format=torch.channels_last)
                run = training.Training(network, images, protocol, number, device)
                for _ in range(2 * EAGER_STEPS):
                    run.step()
                wait(device)
            start.wait()
            begun, steps = time.perf_counter(), 0
            while time.perf_counter() - begun < given.seconds:
                for _ in range(20 if device.type == "cuda" else 1):
                    run.step()
                    steps += 1
                wait(device)
            rates[number] = steps / (time.perf_counter() - begun)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield from rates


if __name__ == "__main__":
    main()
