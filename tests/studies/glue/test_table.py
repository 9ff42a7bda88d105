"""Tests of the table of the text study: averages as in the paper, paired gains, and the paper's own figures."""

from __future__ import annotations

import math
import re
from pathlib import Path
from statistics import fmean

import pytest

from flexact.studies.glue.data import TASKS, load, read
from flexact.studies.glue.protocol import Grid, Protocol, Result
from flexact.studies.glue.study import STUDY
from flexact.studies.glue.table import GLUE, averages, majority, table


def row(task: str, method: str, seed: int, **figures: object) -> Result:
    fields = {"state": "done", "split": "official", "device": "card", "step_ms": 10.0}
    fields |= {"task": task, "method": method, "seed": seed, "torch": "2", "commit": "c", "date": "d", **figures}
    return Result(**fields)  # type: ignore[arg-type]


RESULTS = [
    row("mrpc", "fixed", 0, f1=80.0, accuracy=70.0),
    row("mrpc", "fixed", 1, f1=82.0, accuracy=72.0),
    row("rte", "fixed", 0, accuracy=60.0),
    row("rte", "fixed", 1, accuracy=62.0),
    row("mrpc", "flexact-all", 0, f1=83.0, accuracy=73.0, step_ms=11.0),
    row("rte", "flexact-all", 0, accuracy=63.0, step_ms=11.0),
    row("rte", "flexact-all", 1, accuracy=64.0, step_ms=11.0),
]


def test_the_average_is_over_metrics_and_over_seeds_that_have_every_task() -> None:
    assert averages(RESULTS, "fixed") == {0: 70.0, 1: 72.0}
    assert averages(RESULTS, "flexact-all") == {0: 73.0}  # the second seed lacks MRPC
    split = [*RESULTS, row("qnli", "fixed", 0, accuracy=0.0, split="of dev.tsv")]
    assert averages(split, "fixed") == {0: 70.0, 1: 72.0}  # splits that are not official are excluded


def test_the_table_has_our_and_the_papers_scores_gains_and_costs() -> None:
    grid = Grid(("mrpc", "rte"), ("fixed", "flexact-all"), seeds=2)
    text = " ".join(table(RESULTS, Protocol(model="tiny"), grid.cells).split())
    assert "# GLUE with tiny" in text
    assert "| method | seeds | MRPC F1 | MRPC Acc | RTE Acc | average |" in text
    assert "| fixed activation | 2 | 81.00 ± 1.41 | 71.00 ± 1.41 | 61.00 ± 1.41 | 71.00 ± 1.41 |" in text
    paper = fmean([88.85, 84.07, 65.70])
    assert f"| - paper's | | 88.85 | 84.07 | 65.70 | {paper:.2f} |" in text
    assert "| Flex-Act (all layers) | +3.00 | +3.00 | +2.50 (p 0.126) | +3.00 |" in text
    assert "| RTE | card | 10.00 | 11.00 (1.10×) |" in text
    assert "Not done yet, 1 of 8: mrpc-flexact-all-1." in text


def test_a_fixed_activation_that_the_paper_lacks_has_a_row_without_the_papers() -> None:
    more = [row("rte", "mish", seed, accuracy=accuracy) for seed, accuracy in enumerate((61.0, 64.0))]
    text = " ".join(table([*RESULTS, *more], Protocol(), []).split())
    assert "| Mish | 2 | - | - | 62.50 ± 2.12 | - | | Flex-Act (all layers) |" in text
    assert "| Mish | - | - | +1.50 (p 0.205) | - |" in text


def test_the_majority_class_is_next_to_every_accuracy() -> None:
    text = " ".join(table(RESULTS, Protocol(), []).split())
    assert "| method | seeds | MRPC F1 | MRPC Acc | RTE Acc | average |" in text
    assert "| majority class | | | 68.38 | 52.71 | |" in text
    assert "majority class" not in table(RESULTS, Protocol(limit=10), [])
    split = [row("qnli", "fixed", 0, accuracy=80.0, split="of dev.tsv")]
    assert "| majority class | | 50.14 | |" in " ".join(table(split, Protocol(), []).split())


@pytest.mark.parametrize("name", ["cola", "mrpc", "qnli", "rte", "wnli"])
def test_the_majority_rates_match_the_dev_files(name: str) -> None:
    folder = Path(__file__).parents[4] / "shared" / "data" / "glue"
    if not folder.is_dir():
        pytest.skip("GLUE is not part of the repository")
    task = TASKS[name]
    labels = [label for _, label in read(task, folder / task.title / "dev.tsv")]
    assert task.majority == pytest.approx(100 * max(map(labels.count, labels)) / len(labels))
    parts = [label for _, label in load(name, folder).dev]
    rate = 100 * max(map(parts.count, parts)) / len(parts)
    assert majority(name, "accuracy", load(name, folder).split) == f"{rate:.2f}"


def test_the_conclusion_excludes_wnli() -> None:
    rows = []
    for seed in range(7):
        for method, gain in (
            ("fixed", 0.0),
            ("flexact-penultimate", 0.1 * (-1) ** seed),
            ("flexact-all", 1 + seed / 9),
        ):
            rows.append(row("rte", method, seed, accuracy=60.0 + seed + gain))
            rows.append(row("wnli", method, seed, accuracy=56.0 if method == "flexact-all" else 20.0))
    text = " ".join(table(rows, Protocol(), []).split())
    after = text.partition("**Verdict, without WNLI.**")[2]
    assert "Flex-Act (penultimate): +0.01 points (p 0.736 after Holm's correction), no significant difference." in after
    assert "Flex-Act (all layers): +1.33 points (p <0.001 after Holm's correction), a gain." in after
    assert "| Flex-Act (all layers) | +18.67 |" in text.partition("All tasks.")[2].partition("Without WNLI.")[0]
    assert "| Flex-Act (all layers) | +1.33 |" in text.partition("Without WNLI.")[2]
    one = [kept for kept in rows if kept.task == "rte"]
    assert "**Verdict.** Flex-Act (penultimate)" in table(one, Protocol(), [])
    assert "All tasks." not in table(one, Protocol(), [])
    equal = [row(task, method, 0, accuracy=50.0) for task in ("rte", "wnli") for method in ("fixed", "flexact-all")]
    text = table(equal, Protocol(), [])
    assert "**Verdict, without WNLI.** Flex-Act (all layers): +0.00 points, without a test." in text
    assert "Cohen's effect size" not in text  # there is no table to explain


def test_a_limited_run_is_marked_as_no_result() -> None:
    results = [row("qnli", "fixed", 0, accuracy=80.0, split="of dev.tsv")]
    text = " ".join(table(results, Protocol(limit=10), []).split())
    assert "QNLI has no training file here" in text
    assert "Only the first 10 rows of each file were used, so these are not results" in text
    assert "| fixed activation | 1 | 80.00 | - |" in text
    failed = [row("rte", "fixed", 0, state="failed", error="the loss is nan")]
    assert "- rte-fixed-0: the loss is nan" in table(failed, Protocol(), [])


def test_an_undefined_metric_is_excluded_from_means() -> None:
    defined = [row("stsb", "fixed", seed, pearson=80.0 + seed, spearman=81.0) for seed in (0, 1)]
    nan = {"pearson": math.nan, "spearman": math.nan}
    some = [*defined, row("stsb", "fixed", 2, **nan), row("stsb", "flexact-all", 0, **nan)]
    text = " ".join(table(some, Protocol(), []).split())
    assert "| fixed activation | 3 | 80.50 ± 0.71 | 81.00 ± 0.00 | 80.75 ± 0.35 |" in text
    assert "| Flex-Act (all layers) | 1 | - | - | - |" in text
    assert "| Flex-Act (all layers) | - | - | - |" in text  # nothing to compare
    assert "excluded from means: stsb-fixed-2, stsb-flexact-all-0." in text
    rte = row("rte", "fixed", 0, accuracy=60.0)
    text = " ".join(table([row("stsb", "fixed", 0, **nan), rte], Protocol(), []).split())
    assert "| fixed activation | 1 | - | - | 60.00 | 60.00 |" in text  # a column without figures is in no average
    assert STUDY.summary(some[2]) == "pearson -, spearman -"
    assert "nan" not in text


def test_the_papers_rows_are_the_papers() -> None:
    paper = Path(__file__).parents[4] / "shared" / "paper" / "flex-act.tex"
    if not paper.is_file():
        pytest.skip("the paper is not part of the repository")
    text = paper.read_text(encoding="utf-8")
    text = text[text.index(r"\label{tab:glue_results}") :]
    text = text[: text.index(r"\end{table}")]
    cells = [float(cell) for cell in re.findall(r"\[c\]\{@\{\}c@\{\}\}(?:\\\w+\{)?(\d\d\.\d\d)", text)]
    assert len(cells) == 27
    rows = [cells[k : k + 9] for k in range(0, 27, 9)]
    for method, found in zip(GLUE, rows, strict=True):
        assert list(GLUE[method].values()) == found[:8]
        assert math.isclose(fmean(found[:8]), found[8], abs_tol=0.006)
