"""Time and memory of the routed activation on a CPU, compared with plain torch operations.

    python benchmarks/op_cpu.py [--out results/op_cpu.csv] [--repeats 15]

The input has shape (128, 64, 32, 32) in float32, and there are the paper's five candidates. Both sides run in turns in
one process, so a busy machine slows both down and the ratios stay valid. Times are medians. OMP_NUM_THREADS sets the
number of threads.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import flexact
from flexact.candidates.registry import lookup
from flexact.config import PAPER_CANDIDATES
from flexact.io.atomic_files import write_rows
from flexact.ops import reference, routed_activation
from flexact.studies.provenance import processor, provenance

SHAPE = (128, 64, 32, 32)


@dataclass(frozen=True)
class Row:
    """One comparison. `target` bounds the ratio or the value."""

    measurement: str
    value: float
    baseline: float
    target: str

    @property
    def ratio(self) -> float:
        return self.value / self.baseline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/op_cpu.csv"), help="the CSV file to write")
    parser.add_argument("--repeats", type=int, default=15, help="timings of each side; the median counts")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    h = torch.randn(SHAPE, requires_grad=True)
    delta = torch.randn(SHAPE)
    rows = [
        _time("forward and backward, s", h, delta, arguments.repeats, with_statistics=False),
        _time("forward and backward with mean |derivative|, s", h, delta, arguments.repeats, with_statistics=True),
        _saved("saved for backward, bytes", h),
        _committed("committed to relu, forward and backward, s", h, delta, 4 * arguments.repeats),
        _import_time("import flexact after torch, s", repeats=5),
    ]
    _print(rows)
    _write(arguments.out, rows)


def _time(name: str, h: Tensor, delta: Tensor, repeats: int, with_statistics: bool) -> Row:
    def plain() -> None:
        x, logits = _plain(h)
        if with_statistics:
            _plain_statistics(h)
        torch.autograd.grad(x, (h, logits), delta)

    def closed_form() -> None:
        x, logits = _closed_form(h, with_statistics)
        torch.autograd.grad(x, (h, logits), delta)

    value, baseline = _medians(closed_form, plain, repeats)
    return Row(name, value, baseline, "ratio <= 0.6")


def _plain(h: Tensor) -> tuple[Tensor, Tensor]:
    logits = torch.zeros(1, len(PAPER_CANDIDATES), requires_grad=True)
    alive = torch.ones(logits.shape, dtype=torch.bool)
    return reference.routed_activation(h, logits, torch.zeros_like(logits), 1.0, PAPER_CANDIDATES, alive), logits


def _plain_statistics(h: Tensor) -> list[Tensor]:
    with torch.no_grad():
        candidates = [lookup(name) for name in PAPER_CANDIDATES]
        return [candidate.derivative(h, candidate.function(h)).abs().mean() for candidate in candidates]


def _closed_form(h: Tensor, statistics: bool) -> tuple[Tensor, Tensor]:
    k = len(PAPER_CANDIDATES)
    logits = torch.zeros(k, requires_grad=True)
    p = torch.softmax(logits.detach(), 0).view(1, k)
    x, _ = routed_activation(h, logits, p, p, torch.ones(()), PAPER_CANDIDATES, range(k), statistics=statistics)
    return x, logits


def _saved(name: str, h: Tensor) -> Row:
    value, baseline = _saved_bytes(lambda: _closed_form(h, True)), _saved_bytes(lambda: _plain(h))
    return Row(name, value, baseline, "ratio <= 0.25")


def _saved_bytes(forward: Callable[[], object]) -> int:
    """Return the bytes that a forward pass saves for its backward pass; shared storage counts once."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    del result
    return sum(storage.nbytes() for storage in kept.values())


def _committed(name: str, h: Tensor, delta: Tensor, repeats: int) -> Row:
    site = flexact.FlexAct(candidates=PAPER_CANDIDATES)
    with torch.no_grad():
        site.logits[PAPER_CANDIDATES.index("relu")] = 1.0
    flexact.commit(site)
    relu = torch.nn.ReLU()
    value, baseline = _medians(
        lambda: torch.autograd.grad(site(h), h, delta), lambda: torch.autograd.grad(relu(h), h, delta), repeats
    )
    return Row(name, value, baseline, "ratio <= 1.02")


def _medians(first: Callable[[], object], second: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return the median times of two calls that run in turns and alternate in going first."""
    times: dict[Callable[[], object], list[float]] = {first: [], second: []}
    first(), second()  # warm up
    for repeat in range(repeats):
        for call in (first, second) if repeat % 2 == 0 else (second, first):
            start = time.perf_counter()
            call()
            times[call].append(time.perf_counter() - start)
    return statistics.median(times[first]), statistics.median(times[second])


def _import_time(name: str, repeats: int) -> Row:
    code = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); import flexact; "
        "print(time.perf_counter() - b, b - a)"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(repeats)]
    value, baseline = (statistics.median(float(run[i]) for run in runs) for i in (0, 1))
    return Row(name, value, baseline, "value <= 0.5")


def _print(rows: list[Row]) -> None:
    print(f"{'measurement':<48}{'flexact':>12}{'baseline':>12}{'ratio':>8}  target")
    for row in rows:
        print(f"{row.measurement:<48}{row.value:>12.5g}{row.baseline:>12.5g}{row.ratio:>8.3f}  {row.target}")


def _write(path: Path, rows: list[Row]) -> None:
    made = provenance()
    machine = {
        "device": f"{processor()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "torch": made["torch"],
        "python": platform.python_version(),
        "commit": made["commit"],
        "date": made["date"],
    }
    figures = [
        {
            "measurement": row.measurement,
            "value": f"{row.value:.6g}",
            "baseline": f"{row.baseline:.6g}",
            "ratio": f"{row.ratio:.6g}",
            "target": row.target,
        }
        for row in rows
    ]
    write_rows(path, [row | machine for row in figures])
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
