"""Tests of the table of evidence in a grid's report."""

from __future__ import annotations

from typing import Any

from flexact.studies.cifar.protocol import Cell
from flexact.studies.grid.report import evidence

CELLS = [Cell("cifar10", "resnet18", "flexact-all", seed) for seed in (0, 1)]
DROP = {"step": 9, "margin": 0.5, "standard_error": 0.2, "steps": 40}


def record(sites: tuple[str, ...], decided: bool) -> dict[str, Any]:
    return {
        "step": 10,
        "sites": {site: {"relu": 0.0, "tanh": 1.0} for site in sites},
        "drops": {site: {"relu": DROP} for site in sites},
        "decisions": {site: {"runner_up": "relu", "decided": decided} for site in sites},
    }


def row(*cells: object) -> str:
    return "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def test_sites_that_picked_together_share_a_row_and_undecided_ones_are_muted() -> None:
    found = evidence({CELLS[0]: [record(("a", "b"), True)], CELLS[1]: [record(("a",), False)]}, lambda _: "All layers")
    assert "<h3>Evidence: All layers</h3>" in found
    assert "<tr>" + row(0, "2 sites", "tanh", "0.50 ± 0.20", "2.5", 40, "relu", "relu (9)") in found
    assert '<tr class="muted">' + row(1, "a", "tanh (undecided)", "0.50 ± 0.20", "2.5", 40, "relu", "relu (9)") in found


def test_runs_without_decisions_have_no_table() -> None:
    assert evidence({CELLS[0]: [{"step": 0, "sites": {"a": {"relu": 0.5, "tanh": 0.5}}}]}, lambda _: "All") == ""
