"""Tests that the costs in docs/overhead.md and in the README are those of results/cost."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = re.sub(r"\s+", " ", (ROOT / "README.md").read_text(encoding="utf-8"))


def on_a_cpu() -> dict[tuple[str, str], float]:
    """Returns the values of results/cost/cpu.csv by case and kind of quantity."""
    with (ROOT / "results" / "cost" / "cpu.csv").open(encoding="utf-8", newline="") as file:
        return {(row["case"], row["quantity"].partition(",")[0]): float(row["value"]) for row in csv.DictReader(file)}


def test_the_table_is_what_the_script_prints() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "cost_table.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": "src"}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"\n\n{done.stdout}\n" in (ROOT / "docs" / "overhead.md").read_text(encoding="utf-8")


def test_the_readme_has_the_costs_on_a_cpu() -> None:
    values = on_a_cpu()
    steps = ", ".join(f"{values[case, 'step while picking']:.2f}" for case in ("gpt", "unet", "mixer"))
    assert f"| training step on a CPU: small GPT, U-Net, MLP-Mixer | {steps} |" in README
    physics, mlp = (values[case, "whole run of 8"] for case in ("physics-trial", "mlp"))
    assert f"On a CPU a whole run takes {physics:.2f} (physics) to {mlp:.2f} (MLP) times as long" in README
