"""Tests that the README's figures match the committed results."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from flexact.studies.picks.tasks import TASKS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.split("## Results")[1].split("\n## ")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line.endswith("` |")][
    1:
]
NAMES = {"selu": "SELU", "elu": "ELU", "gelu": "GELU", "relu": "ReLU", "relu_squared": "ReLU²", "identity": "Identity"}
NAMES |= {"tanh": "Tanh", "silu": "SiLU"}


def finished(task: str) -> dict[str, dict[int, tuple[float, str]]]:
    """Returns method → seed → (score, the one pick)."""
    found: dict[str, dict[int, tuple[float, str]]] = {}
    with (ROOT / "results" / "picks" / "results.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["task"] == task and row["state"] == "done":
                picks = {pick.split("=")[1] for pick in row["picks"].split()}
                seeds = found.setdefault(row["method"], {})
                seeds[int(row["seed"])] = (float(row["score"]), picks.pop() if len(picks) == 1 else "")
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[-1])
def test_a_row_of_the_wins_matches_the_results(row: list[str]) -> None:
    _, original, ours, p, best, picked, name = row
    task = TASKS[name.strip("`")]
    runs = finished(task.name)
    seeds = sorted(runs["flexact"])
    assert seeds == [100, 101, 102, 103, 104]
    flexact, fixed = ([runs[name][seed][0] for seed in seeds] for name in ("flexact", f"fixed-{task.original}"))
    means = {
        method.removeprefix("fixed-"): np.mean([runs[method][seed][0] for seed in seeds])
        for method in runs
        if "fixed" in method
    }
    winner = max(means, key=means.__getitem__)
    assert f"({NAMES[winner]})" in best
    for documented, mean in ((original, np.mean(fixed)), (ours, np.mean(flexact)), (best.split()[0], means[winner])):
        assert documented == f"{mean:.{len(documented.partition('.')[2])}f}"
    expected = ttest_rel(flexact, fixed).pvalue if flexact != fixed else math.nan
    assert p == ("-" if math.isnan(expected) else "<0.001" if expected < 0.001 else f"{expected:.3f}")
    counts = Counter(runs["flexact"][seed][1] for seed in seeds)
    several = ", ".join(
        f"{NAMES[name]} ({count} seeds)" if place == 0 else f"{NAMES[name]} ({count})"
        for place, (name, count) in enumerate(counts.most_common())
    )
    assert picked == (NAMES[next(iter(counts))] if len(counts) == 1 else several)


def test_the_caption_has_the_mean_regrets_of_the_table() -> None:
    table = (ROOT / "results" / "picks" / "table.md").read_text(encoding="utf-8").split("\n## ")[1]
    mean = {line.split("|")[1].strip(): line.split("|")[3].strip() for line in table.splitlines() if "|" in line}
    caption = re.sub(r"\s+", " ", README)
    assert f"Means: original activation {mean['original']}, race {mean['race']}, Flex-Act {mean['flexact']}." in caption
    assert f"Its mean regret over ten tasks is {mean['flexact']}, where 0 is the best" in caption


def test_every_task_of_the_benchmark_has_a_row() -> None:
    assert {row[-1].strip("`") for row in ROWS} == set(TASKS)
