"""Make the figures of the documentation: `python docs/assets/make.py`, or some of them: `make.py start siren_image`.

The figures come from the commands of the studies, from committed results, from the code blocks of docs/start.md, and
from the worked examples, whose results go to results/examples/ as well. All of them take half an hour on a CPU. The
screenshot of the report needs Chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from flexact.io.atomic_files import write_rows
from flexact.studies.provenance import provenance

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

EXAMPLES = {"siren_image": "siren", "byte_gpt": "gpt", "physics_informed": "physics"}
"""The worked examples, and the names of their pages."""
_RESULT = re.compile(r"(.*?)^seed (\d+): (.*?) ([^\d\n]+)$", re.DOTALL | re.MULTILINE)
"""A selection, the seed, its scores, and what they measure."""


def main(asked: list[str]) -> None:
    os.environ.setdefault("MPLBACKEND", "agg")
    makers: dict[str, Callable[[Path], None]] = {"studies": studies, "start": start_page, "benchmark": benchmark}
    makers |= {name: partial(worked_example, name) for name in EXAMPLES}
    if unknown := set(asked) - set(makers):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(makers)}")
    for name in asked or makers:
        with tempfile.TemporaryDirectory() as folder:
            makers[name](Path(folder))


def studies(folder: Path) -> None:
    """Run the commands of the studies, and copy their figures and the committed ones."""
    for run, (arguments, figures) in STUDIES.items():
        flexact("reproduce", *arguments, "--quiet", "--out", str(folder / run), within=folder)
        for figure, target in figures.items():
            shutil.copyfile(folder / run / "figures" / f"{figure}.png", ASSETS / f"{target}.png")
    for figure, target in COMMITTED.items():
        shutil.copyfile(ROOT / "results" / f"{figure}.png", ASSETS / f"{target}.png")


def flexact(*arguments: str, within: Path) -> None:
    subprocess.run([sys.executable, "-m", "flexact", *arguments], cwd=within, check=True)


def benchmark(folder: Path) -> None:
    """Draw the regret chart of the committed benchmark."""
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


def worked_example(name: str, folder: Path) -> None:
    """Run a worked example, and write the figures that it prints to a CSV: a row per seed and network."""
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--picture", str(folder / "picture.png")]
    ran = subprocess.run(command, env=os.environ | {"COLUMNS": "200"}, check=True, stdout=subprocess.PIPE, text=True)
    write_rows(ROOT / "results" / "examples" / f"{name}.csv", example_rows(ran.stdout))
    shutil.copyfile(folder / "picture.png", ASSETS / f"example-{EXAMPLES[name]}.png")


def example_rows(printed: str) -> list[dict[str, str]]:
    """The figures of a worked example from what it printed: for each seed a selection, in which all sites have the same
    pick, and then a line such as "seed 0: ReLU 20.68, Flex-Act 23.06 dB on unseen pixels"."""
    rows = []
    for table, seed, scores, measure in _RESULT.findall(printed):
        titles, first = (re.split(r"  +", table.strip().splitlines()[line]) for line in (0, 2))
        site = dict(zip(titles, first, strict=True))
        for network, score in (one.rsplit(" ", 1) for one in scores.split(", ")):
            row = {"seed": seed, "network": network, "score": score, "measure": measure, "pick": "", "z_original": ""}
            if network == "Flex-Act":
                row |= {"pick": site["pick"], "z_original": site.get("z (original)", "")}
            rows.append(row | provenance())
    return rows


def screenshot(page: Path, target: Path) -> None:
    """Save a screenshot of the top of a page."""
    flags = "--headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1100,1000 --virtual-time-budget=8000"
    command = ["chromium", *flags.split(), f"--screenshot={target}", page.as_uri()]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)  # without a desktop, Chromium prints many warnings


if __name__ == "__main__":
    main(sys.argv[1:])
