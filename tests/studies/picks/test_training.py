"""Training one network of a task: restarts, stops and divergence."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexact.studies.picks.setting import Setting
from flexact.studies.picks.training import Diverged, Stopped, Training

Set = Callable[..., Setting]


class Rewinding:
    """What a Schedule does to a training that rewinds: the initial weights come back after some steps."""

    committed = False
    rewound_at: int | None = None

    def __init__(self, training: Training, after: int) -> None:
        self.steps_done, self._after, self._training = 0, after, training
        self._weights = copy.deepcopy(training.network.state_dict())

    def step(self) -> None:
        self.steps_done += 1
        if self.steps_done == self._after:
            self._training.network.load_state_dict(self._weights)
            self._training.optimizer.state.clear()
            self.rewound_at, self.committed = self.steps_done, True


def same(one: Training, other: Training) -> bool:
    pairs = zip(one.network.parameters(), other.network.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("picking", [3, 25])
def test_a_run_that_rewinds_ends_where_a_plain_run_does(setting: Set, picking: int) -> None:
    one = setting(steps=20)
    plain = one.plain(one.everywhere("gelu"), 20)
    plain.run(20)
    rewound = one.plain(one.everywhere("gelu"), 20)
    schedule: Any = Rewinding(rewound, picking)
    rewound.schedule = schedule
    rewound.run(picking)
    assert not same(plain, rewound)
    rewound.run(20)
    assert same(plain, rewound)


def test_the_learning_rate_rises_and_falls_to_0(setting: Set) -> None:
    one = setting(steps=400)
    training = one.training(one.network(), 400)
    rates = training._rates.tolist()
    assert rates[0] < rates[50] < rates[99]
    assert math.isclose(rates[200], one.task.lr / 2, rel_tol=1e-6)
    assert rates[399] < 1e-4 * one.task.lr


def test_a_network_that_diverges_is_an_error_that_says_so(setting: Set) -> None:
    one = setting(steps=20, lr=1e12, optimizer="sgd")
    training = one.training(one.network(), 20)
    training.run(20)
    with pytest.raises(Diverged, match="a network of tabular diverged: its training loss is nan"):
        training.evaluate(one.problem.score)


def test_a_run_stops_soon_when_it_is_asked_to(setting: Set) -> None:
    one = setting(steps=1000)
    training = one.training(one.network(), 1000)
    asked = iter([False, False, True])
    with pytest.raises(Stopped, match="stopped after 2 of 1000 steps"):
        training.run(1000, lambda: next(asked))


def test_seconds_are_those_of_training(setting: Set) -> None:
    one = setting(steps=20)
    training = one.training(one.network(), 20)
    assert training.seconds == 0
    training.run(10)
    half = training.seconds
    training.evaluate(one.problem.score)
    assert training.seconds == half
    training.run(10)
    assert training.seconds > half > 0
