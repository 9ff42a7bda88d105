"""Ablation of the default policy: the number of right picks with one part changed at a time.

    python benchmarks/ablation.py [--out results/synthetic/ablation.csv]

docs/policy.md shows the results. Takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from flexact import FlexConfig
from flexact.config import PAPER_CANDIDATES
from flexact.io.atomic_files import write_rows
from flexact.policy.evidence import RoundStatistics
from flexact.routing.layer import FlexAct
from flexact.studies.provenance import provenance
from flexact.studies.synthetic.options import Options
from flexact.studies.synthetic.replicas import train

OUT = Path(__file__).resolve().parents[1] / "results" / "synthetic" / "ablation.csv"
DEFAULT = FlexConfig(candidates=PAPER_CANDIDATES, granularity="channel")
SEEDS = 20
CONDITIONS = {
    "base": Options(seeds=SEEDS),
    "epochs-50": Options(seeds=SEEDS, epochs=50),
    "hidden-16": Options(seeds=SEEDS, hidden=16),
    "hidden-16-first-seed-1000": Options(seeds=SEEDS, hidden=16, first_seed=1000),
}
NO_RESET = "m and s not reset each round"
UNDIVIDED = "α not divided by the width"
VARIANTS = {
    "default": DEFAULT,
    "no KL": DEFAULT.with_policy(correction="none"),
    "α halved": DEFAULT.with_policy(alpha=0.65),
    "α doubled": DEFAULT.with_policy(alpha=2.6),
    UNDIVIDED: DEFAULT.with_policy(alpha=1.3 * 16),
    "no settling after a drop": DEFAULT.with_policy(settle=0.0),
    "settling for 75 % of a round": DEFAULT.with_policy(settle=0.75),
    NO_RESET: DEFAULT,
    "step size halved": DEFAULT.with_policy(logit_step_size=5.0),
    "step size doubled": DEFAULT.with_policy(logit_step_size=20.0),
    "rounds of any length": replace(DEFAULT, round_steps="fill"),
    "rounds of 200 steps at most": replace(DEFAULT, round_steps=200),
    "commitment at 50 %": replace(DEFAULT, commit_at=0.5),
    "no elimination, one pick at 70 %": replace(DEFAULT, eliminate="none"),
    "logits left to Adam at 0.01": DEFAULT.with_policy(logit_step="optimizer"),
    "half of the candidates dropped per round": replace(DEFAULT, eliminate="half"),
    "no rewind": replace(DEFAULT, rewind=False),
    "Gumbel noise on": DEFAULT.with_policy(noise=1.0),
}


def right_picks(job: tuple[str, str]) -> dict[str, object]:
    variant, condition = job
    torch.set_num_threads(1)
    config, options = VARIANTS[variant], CONDITIONS[condition]
    cells = options.cells
    activation = FlexAct(config=config, channels=len(cells))
    no_reset = patch.object(RoundStatistics, "reset", lambda self: [tensor.zero_() for tensor in self.evidence])
    with no_reset if variant == NO_RESET else nullcontext():
        mse = max(train(options, activation).mse)
    missed = Counter(
        f"{cell.truth} as {pick}" for pick, cell in zip(activation.picks, cells, strict=True) if pick != cell.truth
    )
    return {
        "variant": variant,
        "condition": condition,
        "right": len(cells) - missed.total(),
        "of": len(cells),
        "largest_mse": f"{mse:.6f}",
        "missed": ", ".join(f"{what} {count}" for what, count in missed.most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="the CSV file to write")
    out = parser.parse_args().out
    # Without a hidden layer the width is 1, so dividing by it changes nothing.
    jobs = [(v, c) for v in VARIANTS for c in CONDITIONS if CONDITIONS[c].hidden or v != UNDIVIDED]
    made = provenance()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        rows = []
        for row in pool.imap(right_picks, jobs):
            rows.append(row | made)
            print(row, flush=True)
    write_rows(out, rows)


if __name__ == "__main__":
    main()
