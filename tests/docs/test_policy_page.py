"""The figures in docs/policy.md: its tables against their CSVs, and one that comes from no study."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")


def rows_of(name: str) -> list[dict[str, str]]:
    with (ROOT / "results" / "synthetic" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table_under(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its header."""
    lines = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]


def test_the_counts_of_right_picks_are_those_of_picks_csv() -> None:
    told = [row[1:] for row in (*table_under("Right picks"), *table_under("Where it fails"))]
    measured = rows_of("picks.csv")
    assert told == [[f"{row['right']} of {row['of']}", f"{float(row['largest_mse']):.4f}"] for row in measured]


def test_every_line_of_picks_csv_has_its_rows() -> None:
    for line in rows_of("picks.csv"):
        rows = rows_of(f"{line['condition']}.csv")
        assert len(rows) == int(line["of"])
        assert sum(row["pick"] == row["truth"] for row in rows) == int(line["right"])


def test_the_ablation_is_that_of_ablation_csv() -> None:
    measured = {(row["variant"], row["condition"]): row["right"] for row in rows_of("ablation.csv")}
    conditions = ("base", "epochs-50", "hidden-16", "hidden-16-first-seed-1000")
    told = {row[0]: row[1:] for row in table_under("The ablation")}
    assert list(told) == list(dict.fromkeys(variant for variant, _ in measured))
    for variant, cells in told.items():
        assert cells == [measured.get((variant, condition), "as default") for condition in conditions], variant


@pytest.mark.parametrize(("share", "told"), [(0.0, 0.0059), (0.5, 0.0124), (0.6, 0.0136), (1.0, 0.0)])
def test_least_error_of_a_blend_of_sigmoid_and_relu_on_a_sigmoid(share: float, told: float) -> None:
    x = np.linspace(-1, 1, 401)
    truth = 1 / (1 + np.exp(-5 * x))

    def error(weights: np.ndarray) -> float:
        h = weights[0] * x + weights[1]
        blend = share / (1 + np.exp(-h)) + (1 - share) * np.maximum(h, 0)
        return float(np.mean((blend - truth) ** 2))

    starts = [[w, b] for w in (0.5, 2, 5) for b in (-0.5, 0.5)]
    least = min(minimize(error, start, method="Nelder-Mead", options={"maxiter": 4000}).fun for start in starts)
    assert least == pytest.approx(told, abs=6e-5)
