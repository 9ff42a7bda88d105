"""Make the figures of the documentation: `python docs/assets/make.py`. Takes some minutes on a CPU.

The figures come from the commands of the studies, from committed results, and from the code blocks of docs/start.md.
The screenshot of the report needs Chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ASSETS = Path(__file__).resolve().parent
ROOT = ASSETS.parents[1]

STUDIES = {
    "synthetic": (
        ["synthetic", "--models", "flexact-default", "--seeds", "5"],
        {"selection-flexact-default": "rounds"},
    ),
    "regularisation": (
        ["synthetic", "--models", "flexact-a0,flexact-a0.3", "--truths", "sigmoid", "--seeds", "5"],
        {"regularisation": "regularisation"},
    ),
    "alpha": (["alpha"], {"error": "alpha-error"}),
}
"""The arguments of each run, and the names of the figures to copy."""

COMMITTED = {"cifar/short/figures/selection-cifar100-resnet18-flexact-all": "depth"}
"""Committed figures under results/ to copy."""


def main() -> None:
    os.environ.setdefault("MPLBACKEND", "agg")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for run, (arguments, figures) in STUDIES.items():
            flexact("reproduce", *arguments, "--quiet", "--out", str(folder / run), within=folder)
            for figure, target in figures.items():
                shutil.copyfile(folder / run / "figures" / f"{figure}.png", ASSETS / f"{target}.png")
        start_page(folder)
        benchmark(folder / "picks")
    for figure, target in COMMITTED.items():
        shutil.copyfile(ROOT / "results" / f"{figure}.png", ASSETS / f"{target}.png")


def flexact(*arguments: str, within: Path) -> None:
    subprocess.run([sys.executable, "-m", "flexact", *arguments], cwd=within, check=True)


def benchmark(folder: Path) -> None:
    """Draw the regret chart of the committed benchmark."""
    folder.mkdir()
    for name in ("config.json", "results.csv"):
        shutil.copyfile(ROOT / "results" / "picks" / name, folder / name)
    flexact("report", str(folder), within=folder)
    shutil.copyfile(folder / "figures" / "regret.png", ASSETS / "regret.png")


def start_page(folder: Path) -> None:
    """Run the code blocks of docs/start.md, build the report of that run, and copy its figures."""
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=folder, check=True)
    flexact("report", "run", within=folder)
    for figure in ("network", "numbers", "curves", "margins", "picks", "probabilities"):
        shutil.copyfile(folder / "run" / "figures" / f"history-{figure}.png", ASSETS / f"start-{figure}.png")
    screenshot(folder / "run" / "report.html", ASSETS / "report-page.png")


def screenshot(page: Path, target: Path) -> None:
    """Save a screenshot of the top of a page."""
    flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1100,1000 --virtual-time-budget=8000"
    command = ["chromium", *flags.split(), f"--screenshot={target}", page.as_uri()]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)  # without a desktop, Chromium prints many warnings


if __name__ == "__main__":
    main()
