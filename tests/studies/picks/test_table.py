"""Tests of table.md and the figures, of complete and incomplete grids."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from flexact.studies.picks.protocol import Cell, Protocol, Result
from flexact.studies.picks.study import regrets
from flexact.studies.picks.table import summaries, table

Make = Callable[..., list[Result]]


def some(rows: Make) -> list[Result]:
    return [
        *rows("tabular", "fixed-relu", [10.0, 11.0]),
        *rows("tabular", "fixed-gelu", [12.0, 13.0]),
        *rows("tabular", "fixed-tanh", [8.0, 9.0]),
        *rows("tabular", "flexact", [11.0, 12.5], steps=115, seconds=13.0, picks="1=relu 3=gelu 5=tanh"),
    ]


def cells_of(text: str, first: str) -> list[str]:
    """A line of a table, by its first cell."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return next(line for line in lines if line[0] == first)


def test_a_tasks_table_has_score_difference_p_regret_and_cost(rows: Make) -> None:
    text = table(some(rows), Protocol(), [])
    task = text[text.index("(`tabular`)") :]
    assert cells_of(task, "flexact") == [
        "flexact", "2", "11.750 ± 1.061", "+1.250", "0.126", "0.38", "1.15×", "1.30×",
    ]  # fmt: skip
    assert cells_of(task, "fixed-relu (original)")[1:] == ["2", "10.500 ± 0.707", "-", "-", "1.00", "1.00×", "1.00×"]
    assert "Best fixed: gelu, 12.500; median 10.500; over seeds" in task
    assert "for lack of a finished run: silu, elu, sigmoid, identity." in task


def test_the_summary_has_a_row_for_each_method(rows: Make) -> None:
    text = table(some(rows), Protocol(), [])
    assert cells_of(text, "flexact") == ["flexact", "1", "0.38", "0.38", "tabular", "1", "0", "1.15×", "1.30×"]
    assert cells_of(text, "original") == ["original", "1", "1.00", "1.00", "tabular", "-", "-", "1.00×", "1.00×"]
    assert "A quick test" not in text
    assert "A quick test: every plain run has 40 steps" in table(some(rows), Protocol(steps=40), [])


def test_an_incomplete_grid_lists_what_is_missing(rows: Make) -> None:
    asked = [Cell("tabular", "flexact", 0), Cell("tabular", "race", 0)]
    failed = rows("tabular", "fixed-relu", [math.nan], state="failed", error="the network diverged.")
    text = table([*rows("tabular", "flexact", [1.0]), *failed], Protocol(), asked)
    assert cells_of(text, "flexact") == ["flexact", "1", "1.000", "-", "-", "-", "-", "-"]
    assert "No regrets: they need at least two fixed activations that share a seed." in text
    assert "- tabular-fixed-relu-0: the network diverged." in text
    assert "Not done yet, 1 of 2: tabular-race-0." in text
    assert "# The benchmark of picks" in table([], Protocol(), asked)


def test_the_regret_chart_has_a_mark_for_each_task_and_method(rows: Make) -> None:
    physics = [*rows("physics", "fixed-tanh", [1.0]), *rows("physics", "fixed-relu", [0.0])]
    picture = regrets(summaries([*some(rows), *physics]))
    assert picture is not None
    (ax,) = picture.figure.axes
    assert [text.get_text() for text in ax.get_yticklabels()] == ["physics", "tabular"]
    values = {line.get_label(): list(line.get_xdata()) for line in ax.get_lines()[:2]}
    assert list(values) == ["flexact", "original"]
    assert math.isnan(values["flexact"][0])
    assert values["flexact"][1] == pytest.approx(0.375)
    assert values["original"] == [0.0, 1.0]
    assert regrets([]) is None
