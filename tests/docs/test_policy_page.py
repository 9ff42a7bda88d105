"""Tests the figures in docs/policy.md: its tables against their CSVs, and one figure that is computed here."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.stats import ttest_rel

from flexact.studies.picks.study import Store
from flexact.studies.picks.tasks import TASKS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")


def rows_of(name: str) -> list[dict[str, str]]:
    with (ROOT / "results" / "synthetic" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table_under(heading: str) -> list[list[str]]:
    """Returns the cells of the first table below a heading, without its header."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = section[section.index("\n|") :].strip().partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]


def test_the_counts_of_right_picks_match_picks_csv() -> None:
    documented = [row[1:] for row in (*table_under("Right picks"), *table_under("Where it fails"))]
    measured = rows_of("picks.csv")
    assert documented == [[f"{row['right']} of {row['of']}", f"{float(row['largest_mse']):.4f}"] for row in measured]


def test_every_line_of_picks_csv_has_its_rows() -> None:
    for line in rows_of("picks.csv"):
        rows = rows_of(f"{line['condition']}.csv")
        assert len(rows) == int(line["of"])
        assert sum(row["pick"] == row["truth"] for row in rows) == int(line["right"])


def test_the_ablation_matches_ablation_csv() -> None:
    measured = {(row["variant"], row["condition"]): row["right"] for row in rows_of("ablation.csv")}
    conditions = ("base", "epochs-50", "hidden-16", "hidden-16-first-seed-1000")
    documented = {row[0]: row[1:] for row in table_under("The ablation on the synthetic task")}
    assert list(documented) == list(dict.fromkeys(variant for variant, _ in measured))
    for variant, cells in documented.items():
        assert cells == [measured.get((variant, condition), "as default") for condition in conditions], variant


@pytest.mark.parametrize(("share", "expected"), [(0.0, 0.0059), (0.5, 0.0124), (0.6, 0.0136), (1.0, 0.0)])
def test_least_error_of_a_blend_of_sigmoid_and_relu_on_a_sigmoid(share: float, expected: float) -> None:
    x = np.linspace(-1, 1, 401)
    truth = 1 / (1 + np.exp(-5 * x))

    def error(weights: np.ndarray) -> float:
        h = weights[0] * x + weights[1]
        blend = share / (1 + np.exp(-h)) + (1 - share) * np.maximum(h, 0)
        return float(np.mean((blend - truth) ** 2))

    starts = [[w, b] for w in (0.5, 2, 5) for b in (-0.5, 0.5)]
    least = min(minimize(error, start, method="Nelder-Mead", options={"maxiter": 4000}).fun for start in starts)
    assert least == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize(("correlation", "documented"), [(0.0, 85), (0.5, 50)])
def test_how_often_a_trial_keeps_the_original_if_losses_are_noise(correlation: float, documented: int) -> None:
    """Simulates the losses that a trial of six candidates compares: the last third of each rung. 0 is the original."""
    generator = np.random.default_rng(0)

    def losses(steps: int) -> np.ndarray:
        noise = generator.standard_normal((2_000, 6, steps))
        for step in range(1, steps):
            noise[..., step] *= math.sqrt(1 - correlation**2)
            noise[..., step] += correlation * noise[..., step - 1]
        return noise

    left = np.ones((2_000, 6), dtype=bool)
    for steps, survivors in ((35, 3), (35, 2), (70, 1)):
        series = losses(steps)
        means = np.where(left, series.mean(-1), np.inf)
        ranked = means.argsort(1)
        behind = series[:, 0] - np.take_along_axis(series, ranked[:, :1, None], axis=1)[:, 0]
        protected = left[:, 0] & (behind.mean(1) <= 2 * behind.std(1, ddof=1) / math.sqrt(steps))
        ranked[protected & (ranked[:, :survivors] != 0).all(1), survivors - 1] = 0
        left = np.zeros_like(left)
        np.put_along_axis(left, ranked[:, :survivors], True, axis=1)
    assert 100 * left[:, 0].mean() == pytest.approx(documented, abs=3)  # three standard errors
    assert f"kept in {documented} %" in PAGE


def benchmark_scores() -> dict[str, dict[str, dict[int, float]]]:
    """Returns task → method → seed → score."""
    scores: dict[str, dict[str, dict[int, float]]] = {}
    with (ROOT / "results" / "picks" / "results.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["state"] == "done":
                seeds = scores.setdefault(row["task"], {}).setdefault(row["method"], {})
                seeds[int(row["seed"])] = float(row["score"])
    return scores


def regret(methods: dict[str, dict[int, float]], method: str, seeds: set[int]) -> float | None:
    """Returns the regret of a method's mean score over the seeds that it has, or None without any."""
    own = methods.get(method, {})
    if not (shared := seeds & set(own)):
        return None
    fixed = [np.mean([by_seed[seed] for seed in shared]) for name, by_seed in methods.items() if "fixed" in name]
    return float((max(fixed) - np.mean([own[seed] for seed in shared])) / (max(fixed) - np.median(fixed)))


def test_the_committed_tables_are_those_of_the_committed_rows() -> None:
    folder = ROOT / "results" / "picks"
    assert (folder / "table.md").read_text(encoding="utf-8") == Store(folder).table()


def test_the_table_of_the_benchmark_matches_its_results() -> None:
    scores = benchmark_scores()
    rows = table_under("The benchmark")
    assert [row[0].strip("`") for row in rows] == list(TASKS)
    overall: dict[str, list[float | None]] = {name: [] for name in ("flexact", "race", "original", "without")}
    for task, count, original, flexact, p, best, *documented in rows:
        methods = scores[task.strip("`")]
        compared = [by_seed for name, by_seed in methods.items() if name == "flexact" or "fixed" in name]
        seeds = set.intersection(*(set(by_seed) for by_seed in compared))
        assert int(count) == len(seeds)
        assert seeds <= {100, 101, 102, 103, 104}
        means = {name: np.mean([own[seed] for seed in seeds & set(own)]) for name, own in methods.items()}
        score, name = original.split()
        first = f"fixed-{name.strip('()')}"
        assert score == f"{means[first]:.{len(score.partition('.')[2])}f}"
        assert flexact == f"{means['flexact']:.{len(flexact.partition('.')[2])}f}"
        pairs = [(methods["flexact"][seed], methods[first][seed]) for seed in seeds]
        expected = ttest_rel(*zip(*pairs, strict=True)).pvalue if any(a != b for a, b in pairs) else math.nan
        assert p == ("-" if math.isnan(expected) else "<0.001" if expected < 0.001 else f"{expected:.3f}")
        score, name = best.split()
        assert max((one for one in means if "fixed" in one), key=means.__getitem__) == f"fixed-{name.strip('()')}"
        assert score == f"{means['fixed-' + name.strip('()')]:.{len(score.partition('.')[2])}f}"
        measured = [regret(methods, one, seeds) for one in ("flexact", "race", "random")]
        assert documented == ["-" if one is None else f"{one + 0.0:.2f}" for one in measured]
        overall["flexact"].append(measured[0])
        overall["race"].append(measured[1])
        overall["original"].append(regret(methods, first, seeds))
        overall["without"].append(regret(methods, "flexact", seeds - {100, 101}))
    mean = {name: f"{np.mean(values):.2f}" for name, values in overall.items()}
    assert f"mean regret of Flex-Act is {mean['flexact']}, that of the equally expensive race {mean['race']}, " in PAGE
    assert f"activation {mean['original']}. Flex-Act" in PAGE
    assert f"Without seeds 100 and 101 the mean regret over\nthe ten tasks is {mean['without']}." in PAGE


def test_flexact_scores_what_the_plain_network_with_its_picks_scores() -> None:
    far = []
    for task, methods in benchmark_scores().items():
        alone, flexact = methods["flexact-alone"], methods["flexact"]
        differences = [flexact[seed] - alone[seed] for seed in sorted(alone.keys() & flexact.keys())]
        if task.startswith("resnet"):
            far += [difference for difference in differences if difference]
        else:
            assert differences == [0.0] * 5
    assert sorted(f"{difference:.2f}" for difference in far) == ["-0.18", "0.30", "0.30"]


def test_the_ablation_on_ten_tasks_matches_its_results() -> None:
    scores = benchmark_scores()
    rows = table_under("The ablation on ten tasks")
    assert [row[0].strip("`") for row in rows] == list(TASKS)
    for task, *documented in rows:
        methods = scores[task.strip("`")]
        (other,) = {"flexact-blend", "flexact-trial"} & methods.keys() or {"flexact-trial"}
        seeds = set.intersection(*(set(by_seed) for name, by_seed in methods.items() if "fixed" in name))
        for method, cell in zip(("flexact", "flexact-sites", other, "flexact-unrewound"), documented, strict=True):
            found = regret(methods, method, seeds)
            assert cell == ("-" if found is None else f"{found + 0.0:.2f} ({len(seeds & set(methods[method]))})")


def test_the_times_of_the_benchmark_match_times_csv() -> None:
    with (ROOT / "results" / "picks" / "times.csv").open(encoding="utf-8", newline="") as file:
        measured = list(csv.DictReader(file))
    table = PAGE.partition("**Time.**")[2].partition("\n\nThe goal")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("| `")]
    documented = {row[0]: row[1:3] for row in rows}
    later = {(row["task"], row["seed"]) for row in measured if row["seed"] == "200"}
    for name, ratios in documented.items():
        task, _, seed = name.replace("`", "").partition(", seed ")
        own = [row for row in measured if row["task"] == task and ((task, row["seed"]) in later) == bool(seed)]
        totals = [
            [sum(float(row[column]) for row in own if row["method"] == method) for column in ("steps", "seconds")]
            for method in ("flexact", f"fixed-{TASKS[task].candidates[0]}")
        ]
        assert ratios == [f"{one / other:.2f}" for one, other in zip(*totals, strict=True)]
    assert {row["task"] for row in measured} == {name.replace("`", "").partition(",")[0] for name in documented}
