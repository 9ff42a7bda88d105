"""Tests of how the methods pick, and that picks do not depend on the order of cells."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flexact
from flexact import FlexConfig, Schedule
from flexact.studies.grid.study import picked
from flexact.studies.picks import train
from flexact.studies.picks.protocol import Cell, Protocol, Result, policy
from flexact.studies.picks.tasks import TASKS
from flexact.studies.picks.train import (
    FILE,
    RunContext,
    flexact_run,
    further_steps,
    picked_at_random,
    picked_by_race,
    rungs_of,
    train_cell,
)

MakeContext = Callable[..., RunContext]
SHORT = Protocol(steps=30)
pytestmark = pytest.mark.filterwarnings("ignore:.*steps are few for a pick")


def outcome(folder: Path, method: str, seed: int = 0, task: str = "tabular") -> Result:
    """Returns the row of a cell in a grid's folder."""
    cell = Cell(task, method, seed)
    own = folder / "cells" / cell.name
    own.mkdir(parents=True, exist_ok=True)
    return train_cell(cell, SHORT, None, own, torch.device("cpu"))


def without_seconds(one: Result) -> Result:
    return one._replace(method="", seconds=0.0)


def test_flexact_alone_is_the_same_before_and_after_flexact(tmp_path: Path) -> None:
    flexact = outcome(tmp_path / "after", "flexact")
    after = outcome(tmp_path / "after", "flexact-alone")
    before = outcome(tmp_path / "before", "flexact-alone")
    assert after.picks == flexact.picks == before.picks
    assert without_seconds(before) == without_seconds(after)


def test_flexact_alone_takes_the_picks_and_their_cost_from_the_flexact_cell(tmp_path: Path) -> None:
    picks = dict.fromkeys(("1", "3", "5"), "tanh")
    folder = tmp_path / "cells" / "tabular-flexact-0"
    folder.mkdir(parents=True)
    (folder / FILE).write_text(json.dumps({"picks": picks, "steps": 7, "seconds": 100.0}))
    alone, fixed = outcome(tmp_path, "flexact-alone"), outcome(tmp_path, "fixed-tanh")
    assert (picked(alone.picks), alone.score, alone.steps) == (picks, fixed.score, 7 + 30)
    assert alone.seconds == 100.0 + fixed.seconds


def test_flexact_writes_its_picks_after_picking(tmp_path: Path) -> None:
    done = outcome(tmp_path, "flexact")
    found = json.loads((tmp_path / "cells" / "tabular-flexact-0" / FILE).read_text())
    assert found["picks"] == picked(done.picks)
    assert 0 < found["seconds"] < done.seconds


def test_flexact_one_picks_one_candidate_for_all_sites(make_context: MakeContext) -> None:
    picks = flexact_run(make_context("coordinates", steps=30), share="model")[1].picks
    assert len(picks) == 4
    assert len(set(picks.values())) == 1


def test_random_picks_depend_on_task_and_seed_only(make_context: MakeContext) -> None:
    first = picked_at_random(make_context())
    assert first == picked_at_random(make_context())
    assert (first.steps, first.seconds) == (0, 0.0)
    many = [tuple(picked_at_random(make_context(seed=seed)).picks.values()) for seed in range(40)]
    assert {pick for picks in many for pick in picks} == set(TASKS["tabular"].candidates)


def test_flexact_sites_picks_for_each_site_by_a_blend(make_context: MakeContext) -> None:
    training, found = flexact_run(make_context("coordinates", steps=60), share="site")
    assert training.schedule is not None
    assert training.schedule.committed
    assert len(found.picks) == 4
    assert all(site.group is None for site in training.schedule.router.sites)


@pytest.mark.parametrize("steps", [1, 7, 40, 2000, 8000])
def test_flexact_trains_its_picks_as_long_as_a_plain_run(steps: int, make_context: MakeContext) -> None:
    one = make_context(steps=steps)
    network = flexact.convert(one.network(), config=policy(one.task, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = Schedule(network, network_steps=steps)
        assert schedule.total_steps == steps + further_steps(one)
    assert schedule._plan.network_steps == steps


def test_the_cost_of_a_trial_is_the_training_of_its_losers(make_context: MakeContext) -> None:
    """7 candidates for 75 steps, 4 for 75 more, 2 for 150 more, of which 300 steps are the winner's own."""
    assert further_steps(make_context(steps=8000)) == 7 * 105 + 4 * 105 + 2 * 210 - 420


@pytest.mark.parametrize("task", ["tabular", "coordinates"])
def test_flexact_by_a_trial_scores_like_its_picks_alone(task: str, tmp_path: Path) -> None:
    flexact, alone = (outcome(tmp_path, method, task=task) for method in ("flexact", "flexact-alone"))
    assert flexact.score == alone.score
    assert flexact.steps == alone.steps > 30
    assert len(set(picked(flexact.picks).values())) == 1


def test_flexact_with_a_rewind_scores_like_its_picks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rewinding(task: object, seed: int) -> FlexConfig:
        return dataclasses.replace(policy(TASKS["tabular"], seed), rewind=True, pick_by="blend")

    monkeypatch.setattr(train, "policy", rewinding)
    flexact, alone = outcome(tmp_path, "flexact"), outcome(tmp_path, "flexact-alone")
    assert flexact.steps == alone.steps > 2 * 30
    assert math.isclose(flexact.score, alone.score, rel_tol=1e-4)


@pytest.mark.parametrize("count", range(2, 16))
def test_a_race_ends_with_one_network_and_within_its_steps(count: int) -> None:
    rungs = rungs_of(count, 1200)
    assert len(rungs) == math.ceil(math.log2(count))
    assert (rungs[-1][0] + 1) // 2 == 1
    assert 0.9 * 1200 < sum(networks * steps for networks, steps in rungs) <= 1200


def test_the_race_costs_as_much_as_picking_and_drops_diverged_networks(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {"relu": 3.0, "gelu": math.inf, "silu": 2.5, "elu": 1.0, "tanh": 0.5, "sigmoid": math.inf, "identity": 9.0}
    ran: list[tuple[str, int]] = []

    def raced(one: RunContext, candidate: str, steps: int) -> tuple[float, float]:
        ran.append((candidate, steps))
        return losses[candidate], 1.0

    monkeypatch.setattr(train, "_raced", raced)
    one = make_context(steps=8000)
    found = picked_by_race(one)
    assert found.picks == one.everywhere("tanh")
    assert found.steps == sum(steps for _, steps in ran)
    assert found.seconds == len(ran) == 7 + 4 + 2
    assert [name for name, _ in ran[7:]] == ["tanh", "elu", "silu", "relu", "tanh", "elu"]
    assert 0.95 * further_steps(one) < found.steps <= further_steps(one)


def test_the_race_finds_the_best_network(make_context: MakeContext) -> None:
    found = picked_by_race(make_context(steps=300))
    assert set(found.picks.values()) <= {"identity", "tanh", "elu"}  # after 300 steps no other is near


def test_a_network_that_diverges_in_the_race_is_last(make_context: MakeContext) -> None:
    loss, seconds = train._raced(make_context(lr=1e12, optimizer="sgd"), "relu", 20)
    assert loss == math.inf
    assert seconds > 0
