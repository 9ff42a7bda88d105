"""Make the pictures of the documentation: `python docs/assets/make.py`, some minutes on a CPU.

They come from the studies' own commands, from the committed results, and from the code of docs/start.md as it stands.
The screenshot of the report needs chromium, as the test of that page does.
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
"""What is run, and which of its figures goes where."""

COMMITTED = {"cifar/short/figures/selection-cifar100-resnet18-flexact-all": "depth"}
"""Figures that lie under results/."""


def main() -> None:
    os.environ.setdefault("MPLBACKEND", "agg")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for run, (arguments, figures) in STUDIES.items():
            flexact("reproduce", *arguments, "--quiet", "--out", str(folder / run), within=folder)
            for figure, target in figures.items():
                shutil.copyfile(folder / run / "figures" / f"{figure}.png", ASSETS / f"{target}.png")
        start_page(folder)
    for figure, target in COMMITTED.items():
        shutil.copyfile(ROOT / "results" / f"{figure}.png", ASSETS / f"{target}.png")


def flexact(*arguments: str, within: Path) -> None:
    subprocess.run([sys.executable, "-m", "flexact", *arguments], cwd=within, check=True)


def start_page(folder: Path) -> None:
    """Run the page's code, report on its run as the page says, and take the pictures of that report."""
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=folder, check=True)
    flexact("report", "run", within=folder)
    for figure in ("picks", "probabilities", "final", "numbers"):
        shutil.copyfile(folder / "run" / "figures" / f"history-{figure}.png", ASSETS / f"start-{figure}.png")
    screenshot(folder / "run" / "report.html", ASSETS / "report-page.png")


def screenshot(page: Path, target: Path) -> None:
    """The upper part of a page, as a browser shows it."""
    flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1100,1000 --virtual-time-budget=8000"
    command = ["chromium", *flags.split(), f"--screenshot={target}", page.as_uri()]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)  # where there is no desktop it complains at length


if __name__ == "__main__":
    main()
