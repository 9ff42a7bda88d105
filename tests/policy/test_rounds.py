"""Tests of how long picking takes: rounds of a blend, rungs of a trial, and the plan of a run."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flexact import FlexActError, FlexConfig
from flexact.policy.rounds import drops, left_after_rounds, planned, planned_for, rungs, trial_steps

HALF, ONE = FlexConfig(eliminate="half"), FlexConfig(eliminate="one")
counts = st.integers(2, 16)


@given(k=counts)
def test_a_round_leaves_the_better_half_or_all_but_one(k: int) -> None:
    half, one = left_after_rounds(k, HALF), left_after_rounds(k, ONE)
    assert one == list(range(k - 1, 0, -1))
    assert half[-1] == 1
    assert all(after == -(-before // 2) for before, after in zip([k, *half], half, strict=False))


def test_without_elimination_nothing_is_dropped_before_the_commitment() -> None:
    assert left_after_rounds(5, FlexConfig(eliminate="none")) == []


@given(k=counts, total=st.integers(100, 20_000), config=st.sampled_from([HALF, ONE]))
def test_drops_are_spaced_evenly_and_the_last_is_the_commitment(k: int, total: int, config: FlexConfig) -> None:
    plan = planned(k, config, False, total)
    found = drops(k, config, total, plan.commit_step)
    assert max(found) == plan.commit_step
    assert list(found.values()) == left_after_rounds(k, config)
    spans = [later - before for before, later in zip([0, *found], found, strict=False)]
    assert max(spans) - min(spans) <= 1


@given(k=counts, total=st.integers(1, 20_000))
def test_picking_ends_by_commit_at_and_a_round_is_no_longer_than_round_steps(k: int, total: int) -> None:
    plan = planned(k, HALF, False, total)
    assert plan.commit_step <= max(1, round(0.7 * total))
    assert plan.commit_step <= 350 * len(left_after_rounds(k, HALF))


@pytest.mark.parametrize(
    ("rewind", "total", "rewinds"),
    # Of seven candidates: three rounds of 350 steps, 1050 in all, or 70 % of a run that is shorter than 1500 steps.
    [(None, 2100, True), (None, 2099, False), (None, 400, False), (True, 400, True), (False, 10_000, False)],
)
def test_the_weights_are_rewound_if_half_of_the_run_is_left(rewind: bool | None, total: int, rewinds: bool) -> None:
    assert planned(7, FlexConfig(rewind=rewind), False, total).rewinds is rewinds


@given(k=counts, trial=st.integers(1, 500), total=st.integers(1, 20_000))
def test_each_rung_has_half_of_the_candidates_and_the_last_compares_two(k: int, trial: int, total: int) -> None:
    found = rungs(k, FlexConfig(trial_steps=trial), total)
    assert found[0].candidates == k
    assert found[-1].candidates == 2
    for before, after in pairwise(found):
        assert after.candidates == -(-before.candidates // 2)
        assert after.until > before.until


def test_a_trial_counts_a_candidates_earlier_steps() -> None:
    """105 steps for seven candidates, 105 more for four, 210 more for two."""
    found = rungs(7, FlexConfig(), 8_000)
    assert trial_steps(found) == 7 * 105 + 4 * 105 + 2 * 210


@given(k=counts, total=st.integers(1, 5_000), commit_at=st.sampled_from([0.1, 0.5, 0.7, 1.0]))
def test_a_trial_fits_into_its_run_or_is_not_made(k: int, total: int, commit_at: float) -> None:
    config = FlexConfig(commit_at=commit_at)
    plan = planned(k, config, True, total)
    if plan.rungs:
        assert plan.commit_step == trial_steps(list(plan.rungs)) <= min(commit_at * total, total - 1)
        assert plan.rewinds
    else:
        assert plan == planned(k, config, False, total)
        assert trial_steps(rungs(k, config, total)) > min(commit_at * total, total - 1)


@given(
    k=counts,
    steps=st.integers(1, 20_000),
    tries=st.booleans(),
    rewind=st.sampled_from([None, True]),
    commit_at=st.sampled_from([0.3, 0.5, 0.7, 1.0]),
    round_steps=st.sampled_from(["fill", 350]),
)
def test_the_network_is_trained_for_network_steps(
    k: int, steps: int, tries: bool, rewind: bool | None, commit_at: float, round_steps: int | None
) -> None:
    assume(rewind is None or commit_at < 1)  # a run that commits at its last step has none left
    config = FlexConfig(rewind=rewind, commit_at=commit_at, round_steps=round_steps)
    plan = planned_for(k, config, tries, steps)
    assert plan.network_steps == steps


def test_a_run_that_commits_at_its_end_has_no_steps_for_its_picks() -> None:
    with pytest.raises(FlexActError, match="smaller commit_at"):
        planned_for(5, FlexConfig(rewind=True, commit_at=1.0, round_steps="fill"), False, 100)


def test_without_a_rewind_the_picking_steps_train_the_network_too() -> None:
    assert planned_for(7, FlexConfig(rewind=False), False, 8_000).total_steps == 8_000
