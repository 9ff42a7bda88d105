"""Tests that the tables of docs/comparing.md match the committed results and that its p-values are scipy's."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import scipy.stats

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "comparing.md").read_text(encoding="utf-8")
RESULTS = ROOT / "results" / "compare"


def test_the_tables_match_the_results() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", (RESULTS / "table.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(tables) == 2
    assert all(table.strip() in PAGE for table in tables)


def test_the_p_values_match_scipy_on_the_csv() -> None:
    with (RESULTS / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["seed"]))
    scores: dict[str, list[float]] = {}
    for row in rows:
        scores.setdefault(row["method"], []).append(float(row["score"]))
    shown = dict(re.findall(r"^\| (\S+) +\| +5 \|.*\| (\d\.\d{3}) \|", PAGE, re.MULTILINE))
    assert shown.keys() == scores.keys() - {"original"}
    for method, p in shown.items():
        assert p == f"{scipy.stats.ttest_rel(scores[method], scores['original']).pvalue:.3f}"
