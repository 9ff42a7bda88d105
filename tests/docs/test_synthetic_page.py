"""Tests that the figures in docs/synthetic.md match the studies that made them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from flexact import FlexConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "synthetic.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("study", ["synthetic", "alpha", "corrections"])
def test_each_table_is_the_one_its_study_wrote(study: str) -> None:
    written = (ROOT / "results" / "synthetic" / f"study-{study}" / "table.md").read_text(encoding="utf-8")
    first = written[written.index("|") :].partition("\n\n")[0]
    assert first in PAGE


def test_the_distances_of_the_readings_of_the_paper() -> None:
    with (ROOT / "results" / "paper_readings.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    paper = FlexConfig.paper()
    fields = {"commit_at": paper.commit_at}
    for name in ("kl_on", "lam", "alpha_schedule", "noise", "final_temperature", "forward"):
        fields[name] = getattr(paper.policy, name)
    at = [all(row[name] == str(value) for name, value in fields.items()) for row in rows].index(True)
    words = " ".join(PAGE.split())
    assert f"tries {len(rows)} interpretations" in words
    assert f"Its distance is {rows[at]['distance']}," in words
    assert at == 4
    assert f"the four interpretations before it have {rows[0]['distance']} to {rows[at - 1]['distance']}" in words
