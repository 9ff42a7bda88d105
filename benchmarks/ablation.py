"""The default policy with one part changed at a time: right picks over conditions where that part matters.

Writes results/synthetic/ablation.csv; docs/policy.md shows it. About ten minutes on two cores.
"""

from __future__ import annotations

import csv
import multiprocessing
from dataclasses import replace
from pathlib import Path

import torch

from flexact import FlexConfig
from flexact.layer import FlexAct
from flexact.studies.provenance import provenance
from flexact.studies.replicas import Cell, Task, train

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "results" / "synthetic" / "ablation.csv"
DEFAULT = FlexConfig(granularity="channel")
SEEDS = 20
CONDITIONS = {"base": (Task(), 100), "epochs-50": (Task(), 50), "hidden-16": (Task(hidden=16), 100)}
VARIANTS = {
    "default": DEFAULT,
    "no KL": replace(DEFAULT, correction="none"),
    "α halved": replace(DEFAULT, alpha=0.65),
    "α doubled": replace(DEFAULT, alpha=2.6),
    "α not divided by the width": replace(DEFAULT, alpha=1.3 * 16),
    "no settling after a drop": replace(DEFAULT, settle=0.0),
    "no elimination, one pick at 70 %": replace(DEFAULT, eliminate=False),
    "logits left to Adam at 0.01": replace(DEFAULT, logit_step="optimizer"),
    "Gumbel noise on": replace(DEFAULT, noise=1.0),
    "advantages normalised": replace(DEFAULT, advantage="normalized"),
}


def right_picks(job: tuple[str, str]) -> dict[str, object]:
    variant, condition = job
    torch.set_num_threads(1)
    config, (task, epochs) = VARIANTS[variant], CONDITIONS[condition]
    cells = [Cell(truth, seed) for truth in config.candidates for seed in range(SEEDS)]
    activation = FlexAct(config=config, channels=len(cells))
    mse = max(train(task, cells, activation, epochs).mse)
    right = sum(pick == cell.truth for pick, cell in zip(activation.picks, cells, strict=True))
    return {"variant": variant, "condition": condition, "right": right, "of": len(cells), "largest_mse": f"{mse:.6f}"}


def main() -> None:
    # Undivided, α is what it is by default wherever a sample has one element.
    jobs = [(v, c) for v in VARIANTS for c in CONDITIONS if c == "hidden-16" or v != "α not divided by the width"]
    made = provenance()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        rows = []
        for row in pool.imap(right_picks, jobs):
            rows.append(row | made)
            print(row, flush=True)
    fresh = OUT.with_suffix(".new")
    with fresh.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    fresh.replace(OUT)


if __name__ == "__main__":
    main()
