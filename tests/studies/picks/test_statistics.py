"""Tests of the benchmark's statistics, against numbers worked out by hand and against scipy."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean, median

import pytest
from scipy.stats import ttest_rel

from flexact.studies.picks.protocol import Protocol, Result
from flexact.studies.picks.table import reference, summaries, table
from flexact.studies.picks.tasks import TASKS

Make = Callable[..., list[Result]]
RECTIFIERS = TASKS["resnet-rectifiers"]


@pytest.fixture
def done(rows: Make) -> list[Result]:
    """Means over two seeds: relu 70, leaky_relu 68, gelu 74, silu 71; so the best is 74 and the median 70.5."""
    task = RECTIFIERS.name
    return [
        *rows(task, "fixed-relu", [69.0, 71.0]),
        *rows(task, "fixed-leaky_relu", [68.0, 68.0]),
        *rows(task, "fixed-gelu", [73.5, 74.5]),
        *rows(task, "fixed-silu", [70.0, 72.0]),
        *rows(task, "flexact", [73.0, 73.6], steps=115, seconds=14.0),
        *rows(task, "race", [75.0, 75.0], steps=112, seconds=11.0),
    ]


def test_regret_is_0_for_the_best_fixed_activation_and_1_for_the_median(done: list[Result]) -> None:
    known = reference(RECTIFIERS, done)
    assert known is not None
    assert (max(known.means({0, 1})), median(known.means({0, 1})), known.seeds) == (74.0, 70.5, {0, 1})
    assert tuple(known.scores) == ("gelu", "silu", "relu", "leaky_relu")
    found = {one.method: one.regret for one in summaries(done)}
    assert found["fixed-gelu"] == 0.0
    assert math.isclose(found["fixed-relu"], 4 / 3.5)
    assert math.isclose(found["flexact"], 0.7 / 3.5)
    assert math.isclose(found["race"], -1 / 3.5)


def test_differences_and_tests_are_paired_by_seed(done: list[Result]) -> None:
    (flexact,) = (one for one in summaries(done) if one.method == "flexact")
    assert flexact.against is not None
    assert math.isclose(flexact.against.gain, 3.3)
    assert math.isclose(flexact.against.p or 0.0, ttest_rel([73.0, 73.6], [69.0, 71.0]).pvalue)
    assert math.isclose(fmean(flexact.scores.values()), 73.3)
    (original,) = (one for one in summaries(done) if one.method == "fixed-relu")
    assert original.against is None


def test_costs_are_means_of_paired_ratios(rows: Make) -> None:
    found = summaries(
        [
            *rows("tabular", "fixed-relu", [1.0], seconds=10.0),
            *[row._replace(seed=1) for row in rows("tabular", "fixed-relu", [1.0], seconds=20.0)],
            *[row._replace(seed=2) for row in rows("tabular", "fixed-relu", [1.0], seconds=20.0, device="H200")],
            *rows("tabular", "flexact", [1.0, 1.0, 1.0, 1.0], seconds=30.0, steps=150),
        ]
    )
    (flexact,) = (one for one in found if one.method == "flexact")
    assert flexact.seconds_ratio == (3.0 + 1.5) / 2  # seed 2 ran on two devices, seed 3 has no original
    assert flexact.steps_ratio == 1.5


def test_the_reference_is_over_the_seeds_that_all_fixed_activations_have(rows: Make) -> None:
    task = RECTIFIERS.name
    some = [
        *rows(task, "fixed-relu", [1.0, 5.0, 100.0]),
        *rows(task, "fixed-gelu", [3.0, 7.0]),
        *rows(task, "fixed-silu", [2.0]),
        *rows(task, "flexact", [2.5, 0.0, 0.0]),
    ]
    known = reference(RECTIFIERS, some)
    assert known is not None
    assert (max(known.means({0})), median(known.means({0})), known.seeds) == (3.0, 2.0, {0})
    (flexact,) = (one for one in summaries(some) if one.method == "flexact")
    assert flexact.regret == 0.5


def test_missing_rows_have_no_figure_and_are_no_error(rows: Make) -> None:
    assert summaries([]) == []
    assert reference(RECTIFIERS, []) is None
    (alone,) = summaries(rows("tabular", "flexact", [1.0]))
    assert alone.against is None
    assert all(map(math.isnan, (alone.regret, alone.steps_ratio, alone.seconds_ratio)))
    assert "## All tasks" not in table(rows("tabular", "flexact", [1.0]), Protocol(), [])
    failed = [*rows("tabular", "fixed-relu", [math.nan], state="failed"), *rows("tabular", "fixed-gelu", [1.0])]
    assert [one.method for one in summaries(failed)] == ["fixed-gelu"]
    no_spread = [*rows("tabular", "fixed-relu", [1.0]), *rows("tabular", "fixed-gelu", [1.0])]
    assert all(math.isnan(one.regret) for one in summaries(no_spread))


def test_one_seed_has_no_p_value(rows: Make) -> None:
    found = summaries([*rows("tabular", "fixed-relu", [1.0]), *rows("tabular", "race", [2.0])])
    assert found[1].against is not None
    assert (found[1].against.gain, found[1].against.p) == (1.0, None)


def test_overall_counts_tasks(done: list[Result], rows: Make) -> None:
    worse = [
        *rows("tabular", "fixed-relu", [10.0, 11.0, 12.0]),
        *rows("tabular", "fixed-gelu", [11.0, 11.5, 13.5]),
        *rows("tabular", "fixed-tanh", [0.0, 0.0, 0.0]),
        *rows("tabular", "flexact", [7.9, 9.0, 10.1], steps=130, seconds=20.0),
    ]
    text = table([*done, *worse], Protocol(), []).partition("## All tasks")[2].partition("\n## ")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    # tabular: best 12, median 11, flexact 9: regret 3; rectifiers: 0.2.
    columns = {line[0]: line[1:7] for line in lines[2:]}
    assert columns == {
        "flexact": ["2", "1.60", "3.00", "tabular", "1", "1"],
        "race": ["1", "-0.29", "-0.29", "resnet-rectifiers", "1", "0"],
        "original": ["2", f"{(4 / 3.5 + 1) / 2:.2f}", f"{4 / 3.5:.2f}", "resnet-rectifiers", "-", "-"],
    }
