"""How often the default policy picks the truth, over the conditions of docs/policy.md.

Runs `flexact reproduce synthetic --models flexact-default` once a condition and writes, under results/synthetic/, each
run's results.csv as CONDITION.csv and a summary picks.csv with the command that made each line.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from flexact.studies.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "results" / "synthetic"
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
}


def main() -> None:
    wanted = sys.argv[1:] or list(CONDITIONS)
    OUT.mkdir(parents=True, exist_ok=True)
    made = provenance()
    summary = OUT / "picks.csv"
    lines = {row["condition"]: row for row in csv.DictReader(summary.open())} if summary.exists() else {}
    for name in wanted:
        arguments = f"reproduce synthetic --models flexact-default --seeds 20 {CONDITIONS[name]}".split()
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "flexact", *arguments, "--out", f"{folder}/run", "--quiet"]
            subprocess.run(command, check=True)
            shutil.copy(f"{folder}/run/results.csv", OUT / f"{name}.csv")
        rows = list(csv.DictReader((OUT / f"{name}.csv").open()))
        lines[name] = {
            "condition": name,
            "right": sum(row["pick"] == row["truth"] for row in rows),
            "of": len(rows),
            "largest_mse": f"{max(float(row['mse']) for row in rows):.6f}",
            "command": "flexact " + " ".join(arguments),
            **made,
        }
        print(
            name, lines[name]["right"], "of", lines[name]["of"], "largest error", lines[name]["largest_mse"], flush=True
        )
        fresh = summary.with_suffix(".new")
        with fresh.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(lines[name]))
            writer.writeheader()
            writer.writerows(lines[key] for key in CONDITIONS if key in lines)
        fresh.replace(summary)


if __name__ == "__main__":
    main()
