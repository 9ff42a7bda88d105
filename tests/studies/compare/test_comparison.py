"""Tests of `flexact.compare`: what is trained, the table, and resuming."""

from __future__ import annotations

import csv
import math
import random
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

import flexact
from flexact.studies.compare.comparison import Compared
from flexact.studies.compare.study import Store, learning_curves

Comparing = Callable[..., Compared]


def trained_by_hand(small: ModuleType, seed: int, activation: type[nn.Module] = nn.ReLU) -> float:
    """Returns the score of the small network with an activation set by hand, formatted as in the CSV."""
    torch.manual_seed(seed)
    model = small.build()
    model[1], model[3] = activation(), activation()
    torch.manual_seed(seed)
    return float(f"{small.train(model, seed, None):.9g}")


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_method_trains_the_network_of_its_name(comparing: Comparing, small: ModuleType) -> None:
    found = comparing()
    scores = {one.method: one.scores for one in found.summaries}
    assert list(scores) == [
        "original",
        "fixed-tanh",
        "fixed-gelu",
        "flexact",
        "flexact-alone",
    ]  # relu is it
    modules = {"original": nn.ReLU, "fixed-tanh": nn.Tanh, "fixed-gelu": nn.GELU}
    for method, activation in modules.items():
        assert scores[method] == {seed: trained_by_hand(small, seed, activation) for seed in range(3)}
    by_name = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}
    for seed, picks in found.picks.items():
        assert picks.keys() == {"1", "3"}
        assert len(set(picks.values())) == 1  # one pick for the model, by default
        assert scores["flexact-alone"][seed] == trained_by_hand(small, seed, by_name[picks["1"]])


def test_flexact_equals_the_training_of_the_converted_network(comparing: Comparing, small: ModuleType) -> None:
    found = comparing(methods=["flexact"], seeds=[4])
    torch.manual_seed(4)
    model = small.build()
    model = flexact.convert(model, config=flexact.FlexConfig(candidates=small.CANDIDATES, seed=4))
    torch.manual_seed(4)
    score = small.train(model, 4, lambda **options: flexact.Schedule(model, **options))
    assert found.summaries[0].scores[4] == float(f"{score:.9g}")
    assert found.picks[4] == flexact.selection(model).picks


def test_p_and_standard_deviation_equal_scipys_on_the_csv(comparing: Comparing, tmp_path: Path) -> None:
    found = comparing(seeds=4, methods=["original", "fixed", "flexact"])
    by_method: dict[str, list[float]] = {}
    for row in sorted(rows_of(tmp_path / "out"), key=lambda row: int(row["seed"])):
        by_method.setdefault(row["method"], []).append(float(row["score"]))
    for one in found.summaries:
        own, base = by_method[one.method], by_method["original"]
        assert one.mean == pytest.approx(np.mean(own), rel=1e-12)
        assert one.deviation == pytest.approx(np.std(own, ddof=1), rel=1e-12)
        if one.method == "original":
            assert one.against is None
            continue
        assert one.against is not None
        assert one.against.gain == pytest.approx(np.mean(own) - np.mean(base))
        assert one.against.p == pytest.approx(scipy.stats.ttest_rel(own, base).pvalue, rel=1e-12)
    expected = scipy.stats.ttest_rel(by_method["fixed-tanh"], by_method["original"]).pvalue
    assert f"| {expected:.3f} |" in next(line for line in str(found).splitlines() if "fixed-tanh" in line)


def test_the_cost_is_the_ratio_of_the_measured_times(comparing: Comparing) -> None:
    measured: dict[str, list[float]] = {}

    def sleeping(model: nn.Module, seed: int, make_schedule: Any) -> float:
        start = time.perf_counter()
        time.sleep({nn.ReLU: 0.05, nn.Tanh: 0.1, nn.GELU: 0.2}[type(model[1])])
        measured.setdefault(type(model[1]).__name__, []).append(time.perf_counter() - start)
        return random.random()

    found = comparing(sleeping, methods=["original", "fixed"])
    for name, method, slept in (("Tanh", "fixed-tanh", 2), ("GELU", "fixed-gelu", 4)):
        ratios = [one / base for one, base in zip(measured[name], measured["ReLU"], strict=True)]
        cost = next(one.cost for one in found.summaries if one.method == method)
        assert cost == pytest.approx(statistics.median(ratios), rel=0.02)
        assert cost == pytest.approx(slept, rel=0.2)
        low, high = next(one.cost_range for one in found.summaries if one.method == method)
        assert (low, high) == pytest.approx((min(ratios), max(ratios)), rel=0.02)
        shown = f"{cost:.2f}× ({low:.2f} to {high:.2f})"
        assert shown in next(line for line in str(found).splitlines() if method in line)


def test_yielded_scores_are_the_learning_curve(comparing: Comparing, small: ModuleType, tmp_path: Path) -> None:
    found = comparing(small.scores, seeds=2, methods=["original", "flexact"])
    torch.manual_seed(1)
    model = small.build()
    torch.manual_seed(1)
    curve = list(small.scores(model, 1, None))
    assert found.curves["original", 1] == pytest.approx(curve)
    assert len(found.curves["flexact", 0]) == 3 * len(curve)
    assert found.summaries[0].scores[1] == pytest.approx(curve[-1])
    for name in ("differences", "curves"):
        assert (tmp_path / "out" / "figures" / f"{name}.svg").is_file()
    page = found.page
    assert page == tmp_path / "out" / "report.html"
    assert 'id="curves"' in page.read_text()


def test_a_training_that_returns_one_score_has_no_curve(comparing: Comparing) -> None:
    found = comparing(seeds=1, methods=["original", "fixed-tanh"])
    assert found.curves == {}
    assert found.page is not None
    assert 'id="curves"' not in found.page.read_text()


def test_one_seed_has_no_agreement(comparing: Comparing) -> None:
    line = next(line for line in str(comparing(seeds=1, methods=["flexact"])).splitlines() if "2 sites" in line)
    assert line.split("|")[-2].strip() == "-"


def test_the_page_names_the_functions_and_has_its_title_once(comparing: Comparing, small: ModuleType) -> None:
    page = comparing(small.scores, seeds=2).page
    assert page is not None
    text = page.read_text()
    assert len(re.findall(r"<h\d>Comparison with fixed activations</h\d>", text)) == 1
    assert "Network <code>small_training:build</code>, training <code>small_training:scores</code>." in text


def test_learning_curves_of_two_methods_have_a_band(comparing: Comparing, small: ModuleType) -> None:
    found = comparing(small.scores, seeds=2)
    picture = learning_curves(Store(found.folder), found.runs)
    assert picture is not None
    assert len(picture.figure.axes[0].collections) == 2


def test_the_picks_are_listed_by_seed_with_their_agreement(comparing: Comparing, small: ModuleType) -> None:
    found = comparing(seeds=[2, 7, 5], methods=["flexact"])
    picks = [found.picks[seed]["1"] for seed in (2, 5, 7)]
    most = max(map(picks.count, picks))
    assert found.agreement == pytest.approx(most / 3)
    line = next(line for line in str(found).splitlines() if line.startswith("| 2 sites"))
    assert [cell.strip() for cell in line.strip("|").split("|")] == ["2 sites", *picks, f"{100 * most / 3:.0f} %"]


def test_only_missing_runs_are_trained_when_a_comparison_is_resumed(
    comparing: Comparing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("FLEXACT_TEST_LOG", str(log))
    first = comparing(seeds=2, methods=["original", "fixed-tanh"])
    table = str(first)
    assert len(log.read_text().splitlines()) == 4
    assert str(comparing(seeds=2, methods=["original", "fixed-tanh"])) == table
    assert len(log.read_text().splitlines()) == 4
    capsys.readouterr()
    grown = comparing(seeds=3, methods=["original", "fixed-tanh", "fixed-gelu"], quiet=False)
    assert "finished runs keep their results, even if build or train was edited since." in capsys.readouterr().err
    assert log.read_text().splitlines()[4:] == ["0 GELU", "1 GELU", "2 ReLU", "2 Tanh", "2 GELU"]
    assert {one.method: len(one.scores) for one in grown.summaries}["fixed-gelu"] == 3
    comparing(seeds=2, methods=["original"], overwrite=True)
    assert len(log.read_text().splitlines()) == 11


def test_the_users_random_states_are_unchanged(comparing: Comparing) -> None:
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]  # noqa: NPY002

    before = states()
    comparing(seeds=1)
    assert states() == before


def test_where_and_config_match_convert(comparing: Comparing, small: ModuleType) -> None:
    config = flexact.FlexConfig(candidates=("tanh", "gelu", "relu"), pick_by="blend", share="site")
    found = comparing(seeds=2, candidates=None, config=config, where="3", methods=["fixed-tanh", "flexact"])
    assert all(picks.keys() == {"3"} for picks in found.picks.values())
    torch.manual_seed(1)
    model = small.build()
    model[3] = nn.Tanh()
    torch.manual_seed(1)
    assert found.summaries[0].scores[1] == pytest.approx(small.train(model, 1, None), rel=1e-8)


def test_a_users_own_candidate_reaches_other_processes(comparing: Comparing, small: ModuleType) -> None:
    flexact.register_candidate("wave", lambda h: h + torch.sin(h), derivative=lambda h: 1 + torch.cos(h))
    options = {"seeds": 1, "candidates": ("relu", "wave"), "methods": ["fixed-wave", "flexact"]}
    here, there = comparing(**options), comparing(**options, engine="local", overwrite=True)
    assert [(row.method, row.score) for row in here.runs] == [(row.method, row.score) for row in there.runs]
    assert not math.isnan(here.runs[0].score)
