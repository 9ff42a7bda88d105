"""Which reading of the paper comes nearest its first table: what it leaves open, tried.

    python benchmarks/readings.py [--out results/paper_readings.csv] [--seeds 5]

Each reading runs at α = 0.3 and at α = 0 on the five truths. Its distance from the paper is the mean over the ten cells
of |log₁₀((ours + 10⁻⁴)/(paper's + 10⁻⁴))|: 0 is the paper's table, 1 is ten times off in every cell. Rows are sorted by
it. FlexConfig.paper() is the nearest but for differences within the noise of five seeds.
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from flexact import FlexAct, FlexConfig
from flexact.config import PAPER_CANDIDATES
from flexact.studies.paper_tables import SYNTHETIC
from flexact.studies.replicas import Cell, Task, train
from flexact.studies.workers import cores, run_in_processes

EPOCHS = 100


@dataclass(frozen=True)
class Reading:
    """One way to read the paper: the fields of FlexConfig that it leaves open."""

    fields: dict[str, Any]
    seeds: int


Outcome = dict[float, list[tuple[float, int]]]
"""By α: mean error and right picks of each truth."""


def readings(seeds: int) -> Iterator[Reading]:
    """All that are tried, the nearest neighbours of FlexConfig.paper() among them."""
    for kl_on, lam, schedule, commit_at in product(
        ("pi", "p"), ("temperature", 1.0, 0.3), ("constant", "falling"), (None, 0.7, 0.5)
    ):
        fields = {"kl_on": kl_on, "lam": lam, "alpha_schedule": schedule, "commit_at": commit_at}
        yield Reading({**fields, "noise": 1.0, "final_temperature": 0.1, "forward": "soft"}, seeds)
    near = {"kl_on": "pi", "lam": 0.3, "alpha_schedule": "constant", "commit_at": 0.5}
    for noise, final_temperature, forward in (
        (0.0, 0.1, "soft"),
        (0.5, 0.1, "soft"),
        (1.0, 1.0, "soft"),
        (1.0, 0.01, "soft"),
        (1.0, 0.1, "hard"),
    ):
        yield Reading({**near, "noise": noise, "final_temperature": final_temperature, "forward": forward}, seeds)


def outcome(reading: Reading, report: Callable[[int], None]) -> Outcome:
    """Train a reading on everything it is judged by."""
    without = {name: reading.fields[name] for name in ("commit_at", "noise", "final_temperature", "forward")}
    return {
        0.3: _trained(reading.seeds, alpha=0.3, **reading.fields),
        0.0: _trained(reading.seeds, alpha=0.0, **without),
    }


@functools.cache  # at α = 0 what the KL acts on makes no difference
def _trained(seeds: int, **fields: Any) -> list[tuple[float, int]]:
    cells = [Cell(truth, seed) for truth in PAPER_CANDIDATES for seed in range(seeds)]
    site = FlexAct(config=FlexConfig.paper(**fields, granularity="channel"), channels=len(cells))
    found = list(zip(cells, train(Task(), cells, site, EPOCHS).mse, site.picks, strict=True))
    groups = [found[i : i + seeds] for i in range(0, len(cells), seeds)]
    return [(sum(mse for _, mse, _ in g) / seeds, sum(pick == cell.truth for cell, _, pick in g)) for g in groups]


def _distance(ours: list[float], papers: list[float]) -> float:
    return sum(abs(math.log10((a + 1e-4) / (b + 1e-4))) for a, b in zip(ours, papers, strict=True)) / len(ours)


def _paper(model: str) -> list[float]:
    return [float(SYNTHETIC[model][truth].split()[0]) for truth in PAPER_CANDIDATES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/paper_readings.csv"), help="where the CSV goes")
    parser.add_argument("--seeds", type=int, default=5, help="seeds a truth")
    arguments = parser.parse_args()

    tried = list(readings(arguments.seeds))
    outcomes: dict[int, Outcome] = {}

    def report(event: tuple[int, int | None, Any]) -> None:
        index, _, result = event
        outcomes[index] = result
        print(f"{len(outcomes)}/{len(tried)} {tried[index].fields}", flush=True)

    run_in_processes(outcome, tried, report, cores())
    rows = []
    for index, reading in enumerate(tried):
        found = outcomes[index]
        ours = [error for alpha in (0.3, 0.0) for error, _ in found[alpha]]
        distance = _distance(ours, _paper("flexact-a0.3") + _paper("flexact-a0"))
        row = {**reading.fields, "distance": f"{distance:.3f}"}
        for alpha in (0.3, 0.0):
            row[f"right_a{alpha:g}"] = f"{sum(right for _, right in found[alpha])}/{5 * arguments.seeds}"
            for truth, (error, right) in zip(PAPER_CANDIDATES, found[alpha], strict=True):
                row[f"{truth}_a{alpha:g}"] = f"{error:.5f} ({right}/{arguments.seeds})"
        rows.append(row)
    rows.sort(key=lambda row: float(row["distance"]))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
