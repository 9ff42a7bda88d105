"""Compare readings of the paper: which choices, where it leaves one open, come closest to its tables?

    python benchmarks/readings.py [--out results/paper_readings.csv] [--seeds 5]

Each reading runs at α = 0.3 and α = 0 on the five true functions, and at α = 0.1 on Sigmoid, which the paper's sweep
picks there. Its distance from the paper is the mean of |log₁₀((ours + 10⁻⁴)/(paper's + 10⁻⁴))| over these eleven cells:
0 means the paper's errors, 1 a factor of ten in every cell. Rows are sorted by distance. FlexConfig.paper() is among
the first, which differ only in whether a seed picks ReLU or LeakyReLU. The norm in ḡ could be taken per sample or per
element. This is not varied, because a single unit has one element per sample, so both are equal.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from flexact import FlexAct, FlexConfig
from flexact.config import PAPER_CANDIDATES
from flexact.io.atomic_files import write_rows
from flexact.studies.provenance import provenance
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.replicas import train
from flexact.studies.synthetic.tables import SYNTHETIC, VARIANTS
from flexact.studies.workers import cores


@dataclass(frozen=True)
class Reading:
    """One interpretation of the paper: values for the fields of FlexConfig that it leaves open."""

    fields: dict[str, Any]
    seeds: int


Outcome = dict[float, dict[str, tuple[float, int]]]
"""α → truth → mean error and number of right picks."""

CELLS = {0.3: PAPER_CANDIDATES, 0.0: PAPER_CANDIDATES, 0.1: ("sigmoid",)}


def readings(seeds: int) -> Iterator[Reading]:
    """Yield all readings, including the neighbours of FlexConfig.paper()."""
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


def outcome(reading: Reading) -> Outcome:
    """Train a reading on all cells of the comparison."""
    return {alpha: _trained(reading.seeds, truths, alpha=alpha, **reading.fields) for alpha, truths in CELLS.items()}


def _config(fields: dict[str, Any]) -> FlexConfig:
    """Return the paper's config with the fields of a reading. All fields except `commit_at` belong to the policy."""
    policy = {name: value for name, value in fields.items() if name != "commit_at"}
    return FlexConfig.paper(commit_at=fields["commit_at"], granularity="channel").with_policy(**policy)


def _trained(seeds: int, truths: tuple[str, ...], **fields: Any) -> dict[str, tuple[float, int]]:
    options = Options(truths=truths, seeds=seeds)
    site = FlexAct(config=_config(fields), channels=len(options.cells))
    found = list(zip(options.cells, train(options, site).mse, site.picks, strict=True))
    return {
        truth: (
            sum(mse for cell, mse, _ in found if cell.truth == truth) / seeds,
            sum(pick == truth for cell, _, pick in found if cell.truth == truth),
        )
        for truth in truths
    }


def _paper_error(alpha: float, truth: str) -> float:
    if alpha == 0.1:
        return float(VARIANTS[f"flexact-a{alpha:g}"][0])
    return float(SYNTHETIC[f"flexact-a{alpha:g}"][truth].split()[0])


def _row(reading: Reading, found: Outcome) -> dict[str, Any]:
    cells = [(alpha, truth, *found[alpha][truth]) for alpha, truths in CELLS.items() for truth in truths]
    apart = [abs(math.log10((error + 1e-4) / (_paper_error(alpha, truth) + 1e-4))) for alpha, truth, error, _ in cells]
    row = {**reading.fields, "distance": f"{sum(apart) / len(apart):.3f}"}
    for alpha, truths in CELLS.items():
        right = sum(count for _, count in found[alpha].values())
        row[f"right_a{alpha:g}"] = f"{right}/{len(truths) * reading.seeds}"
    row.update(
        {f"{truth}_a{alpha:g}": f"{error:.5f} ({right}/{reading.seeds})" for alpha, truth, error, right in cells}
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/paper_readings.csv"), help="the CSV file to write")
    parser.add_argument("--seeds", type=int, default=5, help="seeds per truth")
    arguments = parser.parse_args()

    tried = list(readings(arguments.seeds))
    outcomes: list[Outcome] = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(cores(), torch.set_num_threads, (1,)) as pool:
        for reading, found in zip(tried, pool.imap(outcome, tried), strict=True):
            outcomes.append(found)
            print(f"{len(outcomes)}/{len(tried)} {reading.fields}", flush=True)
    made = provenance()
    rows = [_row(reading, outcomes[index]) | made for index, reading in enumerate(tried)]
    rows.sort(key=lambda row: float(row["distance"]))
    write_rows(arguments.out, rows)
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
