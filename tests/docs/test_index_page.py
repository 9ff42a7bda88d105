"""Tests that the figures of docs/index.md match the README, and that the worked examples match their CSVs."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {"siren": "siren_image", "gpt": "byte_gpt", "physics": "physics_informed"}


def rows(text: str, columns: int) -> list[list[str]]:
    """Returns the rows of Markdown tables with this number of columns."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in found if len(row) == columns]


def test_the_wins_of_the_index_are_rows_of_the_readme() -> None:
    readme = {row[0]: row for row in rows((ROOT / "README.md").read_text(encoding="utf-8"), 7)}
    shown = rows((ROOT / "docs" / "index.md").read_text(encoding="utf-8"), 5)[2:]
    assert len(shown) >= 3
    for task, original, ours, best, picked in shown:
        assert [original, ours, best, picked] == [readme[task][i] for i in (1, 2, 4, 5)]


def measured(name: str) -> list[tuple[dict[str, str], dict[str, str]]]:
    """Returns the rows of a worked example by seed: with its own activation, and with Flex-Act."""
    with (ROOT / "results" / "examples" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    assert all(row[made] for row in found for made in ("device", "torch", "commit", "date"))
    return list(zip(found[::2], found[1::2], strict=True))


@pytest.mark.parametrize("page", EXAMPLES)
def test_the_table_of_a_worked_example_is_its_csv(page: str) -> None:
    shown = rows((ROOT / "docs" / "examples" / f"{page}.md").read_text(encoding="utf-8"), 5)
    expected = [
        [own["seed"], own["score"], picked["score"], picked["pick"], picked["z_original"]]
        for own, picked in measured(EXAMPLES[page])
    ]
    assert [[*row[:4], row[4].removesuffix(" standard errors")] for row in shown[2:]] == expected


@pytest.mark.parametrize("path", ["README.md", "docs/index.md"])
def test_the_range_of_the_siren_matches_its_csv(path: str) -> None:
    text = " ".join((ROOT / path).read_text(encoding="utf-8").split())
    ranges = [
        sorted(f"{float(row['score']):.1f}" for row in rows) for rows in zip(*measured("siren_image"), strict=True)
    ]
    (own, picked) = [f"{values[0]} to {values[-1]}" for values in ranges]
    assert re.search(rf"{picked} dB against {own} with ReLU", text)
