"""Count how often the default policy picks the true function, under the conditions of docs/policy.md.

    python benchmarks/picks.py [CONDITION ...] [--out results/synthetic]

Runs `flexact reproduce synthetic --models flexact-default` once per condition. Writes the results.csv of each run as
CONDITION.csv, and a summary, picks.csv, with the command of each line. Under the last five conditions, not every pick
is right. Takes about four minutes on two cores.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from flexact.io import csv_rows
from flexact.io.atomic_files import write_rows
from flexact.studies.provenance import provenance
from flexact.studies.synthetic.store import Result

OUT = Path(__file__).resolve().parents[1] / "results" / "synthetic"
HOMOGENEOUS = "--truths relu,leaky_relu,identity"
NINE = "relu,sigmoid,tanh,leaky_relu,identity,gelu,silu,elu,softplus"
CONDITIONS = {
    "base": "",
    "first-seed-1000": "--first-seed 1000",
    "distractors-10": "--distractors 10",
    "slope-3": "--slope 3",
    "slope-8": "--slope 8",
    "label-noise-0.05": "--label-noise 0.05",
    "epochs-50": "--epochs 50",
    "epochs-300": "--epochs 300",
    "target-scale-0.5": f"{HOMOGENEOUS} --target-scale 0.5",
    "target-scale-10": f"{HOMOGENEOUS} --target-scale 10",
    "nine-candidates": f"--truths {NINE} --candidates {NINE}",
    "hidden-16": "--hidden 16",
    "hidden-16-first-seed-1000": "--hidden 16 --first-seed 1000",
    "target-scale-0.1": f"{HOMOGENEOUS} --target-scale 0.1",
    "epochs-20": "--epochs 20",
    "label-noise-0.3": "--label-noise 0.3",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("conditions", nargs="*", metavar="CONDITION", help=f"{', '.join(CONDITIONS)}; all by default")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder for the CSV files")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.conditions if name not in CONDITIONS]
    if unknown:
        parser.error(f"unknown condition {unknown[0]!r}; known: {', '.join(CONDITIONS)}")
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    made = provenance()
    summary = out / "picks.csv"
    lines: dict[str, dict[str, object]] = {}
    if summary.exists():
        with summary.open(newline="") as file:
            lines = {row["condition"]: dict(row) for row in csv.DictReader(file)}
    for name in arguments.conditions or CONDITIONS:
        words = f"reproduce synthetic --models flexact-default --seeds 20 {CONDITIONS[name]}".split()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "flexact", *words, "--out", f"{folder}/run", "--quiet"]
            subprocess.run(command, check=True)
            shutil.copy(f"{folder}/run/results.csv", out / f"{name}.csv")
        rows = csv_rows.read(out / f"{name}.csv", Result)
        lines[name] = {
            "condition": name,
            "right": sum(row.pick == row.truth for row in rows),
            "of": len(rows),
            "largest_mse": f"{max(row.mse for row in rows):.6f}",
            "command": "flexact " + " ".join(words),
            **made,
        }
        print(
            name, lines[name]["right"], "of", lines[name]["of"], "largest error", lines[name]["largest_mse"], flush=True
        )
        write_rows(summary, [lines[key] for key in CONDITIONS if key in lines])


if __name__ == "__main__":
    main()
