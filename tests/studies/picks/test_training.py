"""Tests of training one network of a task: restarts, stops and divergence."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import flexact
from flexact import FlexConfig
from flexact.studies.cuda_graph import study_stream
from flexact.studies.picks.train import RunContext
from flexact.studies.picks.training import Diverged, Stopped, Training

MakeContext = Callable[..., RunContext]
pytestmark = pytest.mark.filterwarnings("ignore:.*steps are few for a pick")


def same(one: Training, other: Training) -> bool:
    theirs = dict(other.network.named_parameters())
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.network.named_parameters())


@pytest.mark.parametrize(
    "config", [FlexConfig(trial_steps=8), FlexConfig(pick_by="blend", rewind=True)], ids=["trial", "blend"]
)
def test_a_run_that_picks_ends_like_a_plain_run_of_its_picks(make_context: MakeContext, config: FlexConfig) -> None:
    """Data and learning rate follow the network's step, whichever weights are restored."""
    one = make_context(steps=40)
    training = one.training(flexact.convert(one.network(), config=config), 40)
    training.schedule = flexact.Schedule(training.network, optimizer=training.optimizer, network_steps=40)
    while training.schedule.steps_done < training.schedule.total_steps:
        assert int(training._place) == training.schedule.trained_steps % 40
        training.run(1)
    (pick,) = set(flexact.selection(training.network).picks.values())
    plain = one.plain(one.everywhere(pick), 40)
    plain.run(40)
    assert training.schedule.trained_steps == 40
    assert same(plain, training)


@pytest.mark.gpu
def test_on_a_gpu_a_trial_that_reuses_its_captured_steps_ends_like_the_plain_run(make_context: MakeContext) -> None:
    one = make_context(steps=200, device=torch.device("cuda"))
    with study_stream(one.device):
        training = one.training(
            flexact.convert(one.network(), config=FlexConfig(candidates=one.task.candidates, trial_steps=80)), 200
        )
        training.schedule = flexact.Schedule(training.network, optimizer=training.optimizer, network_steps=200)
        training.run(training.schedule.total_steps)
        (pick,) = set(flexact.selection(training.network).picks.values())
        plain = one.plain(one.everywhere(pick), 200)
        plain.run(200)
    assert len(training._tried) == len(one.task.candidates)
    assert same(plain, training)


def test_the_learning_rate_rises_and_falls_to_0(make_context: MakeContext) -> None:
    one = make_context(steps=400)
    training = one.training(one.network(), 400)
    rates = training._rates.tolist()
    assert rates[0] < rates[50] < rates[99]
    assert math.isclose(rates[200], one.task.lr / 2, rel_tol=1e-6)
    assert rates[399] < 1e-4 * one.task.lr


def test_a_network_that_diverges_is_a_clear_error(make_context: MakeContext) -> None:
    one = make_context(steps=20, lr=1e12, optimizer="sgd")
    training = one.training(one.network(), 20)
    training.run(20)
    with pytest.raises(Diverged, match=r"tabular diverged.*nan"):
        training.evaluate(one.problem.score)


def test_a_run_stops_soon_when_it_is_asked_to(make_context: MakeContext) -> None:
    one = make_context(steps=1000)
    training = one.training(one.network(), 1000)
    asked = iter([False, False, True])
    with pytest.raises(Stopped, match="2 of 1000 steps"):
        training.run(1000, lambda: next(asked))


def test_seconds_count_training_only(make_context: MakeContext) -> None:
    one = make_context(steps=20)
    training = one.training(one.network(), 20)
    assert training.seconds == 0
    training.run(10)
    half = training.seconds
    training.evaluate(one.problem.score)
    assert training.seconds == half
    training.run(10)
    assert training.seconds > half > 0
