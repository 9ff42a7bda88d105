"""Time the training of replicas in one network against training them one after another.

    python benchmarks/replicas.py [--out results/replicas.csv] [--epochs 4] [--seeds 5] [--repeats 3]

Trains the cells of the first table (5 truths, 5 seeds) for each kind of model. Both ways run in turns in one thread, so
a busy machine slows both down and the ratio stays valid. Times are medians.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flexact.io.atomic_files import write_rows
from flexact.studies.provenance import processor, provenance
from flexact.studies.synthetic.options import Options, activation_of
from flexact.studies.synthetic.replicas import train
from flexact.studies.workers import cores

MODELS = ("flexact-default", "flexact-a0.3", "relu", "splash")
TARGET = 10.0


@dataclass(frozen=True)
class Row:
    """Seconds for all replicas of one model, together and one after another."""

    model: str
    replicas: int
    together: float
    one_by_one: float

    @property
    def times_faster(self) -> float:
        return self.one_by_one / self.together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/replicas.csv"), help="the CSV file to write")
    parser.add_argument("--epochs", type=int, default=4, help="training epochs of each replica")
    parser.add_argument("--seeds", type=int, default=5, help="seeds per truth")
    parser.add_argument("--repeats", type=int, default=3, help="timings of each side; the median counts")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    options = Options(seeds=arguments.seeds, epochs=arguments.epochs)
    _together("flexact-default", replace(options, epochs=1))  # the first call includes torch's lazy initialisation
    rows = [_row(model, options, arguments.repeats) for model in MODELS]
    for row in rows:
        print(
            f"{row.model:16} {row.replicas} replicas: together {row.together:.2f} s, one by one {row.one_by_one:.2f} s "
            f"- {row.times_faster:.1f} times faster (target {TARGET:g})"
        )
    _write(arguments.out, rows, arguments.epochs)


def _row(model: str, options: Options, repeats: int) -> Row:
    together, one_by_one = [], []
    for _ in range(repeats):
        together.append(_together(model, options))
        one_by_one.append(sum(_together(model, alone) for alone in _each(options)))
    return Row(model, len(options.cells), statistics.median(together), statistics.median(one_by_one))


def _each(options: Options) -> list[Options]:
    return [replace(options, truths=(cell.truth,), first_seed=cell.seed, seeds=1) for cell in options.cells]


def _together(model: str, options: Options) -> float:
    start = time.perf_counter()
    train(options, activation_of(model, options))
    return time.perf_counter() - start


def _write(path: Path, rows: list[Row], epochs: int) -> None:
    made = provenance()
    machine = {
        "device": f"{processor()}, {cores()} cores",
        "torch": made["torch"],
        "python": platform.python_version(),
        "commit": made["commit"],
        "date": made["date"],
    }
    figures = [
        {
            "model": row.model,
            "replicas": row.replicas,
            "epochs": epochs,
            "together_s": f"{row.together:.3f}",
            "one_by_one_s": f"{row.one_by_one:.3f}",
            "times_faster": f"{row.times_faster:.1f}",
            "target": f">= {TARGET:g}",
        }
        for row in rows
    ]
    write_rows(path, [row | machine for row in figures])
    print(f"written: {path}")


if __name__ == "__main__":
    main()
