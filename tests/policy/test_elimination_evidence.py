"""Tests of the evidence of elimination: a dropped candidate keeps that of its round, and the original that of the
round in which it was first significantly behind.
"""

from __future__ import annotations

import torch
from torch import nn

import flexact
from flexact import FlexConfig, selection
from flexact.policy.elimination import Elimination
from flexact.policy.rounds import Plan

CANDIDATES = ("original", "tanh", "gelu", "silu")


def started(logits: list[float]) -> tuple[nn.Sequential, Elimination]:
    """A ReLU with three other candidates. One candidate is dropped at each of steps 10, 20 and 30."""
    config = FlexConfig(candidates=CANDIDATES, share="site", eliminate="one", rewind=False, pick_by="blend")
    model = flexact.convert(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), config=config)
    with torch.no_grad():
        model[1].logits.copy_(torch.tensor(logits))
    return model, Elimination(model[1].router, Plan(model[1].k, config, 60, 30, (), rewinds=False))


def add(elimination: Elimination, *steps: list[float]) -> None:
    """Returns advantages of relu, tanh, gelu and silu, step by step; the lowest is the best."""
    for advantage in steps:
        elimination.statistics.add(torch.tensor([advantage]))


NEARLY_EVEN = [[0.1, 0.0, 0.0, 0.0], [0.0, 0.1, 0.0, 0.0], [0.2, 0.0, 0.0, 0.0], [0.0, 0.1, 0.0, 0.0]]


def test_a_dropped_original_keeps_the_evidence_that_ended_its_protection() -> None:
    """It was significantly behind in the first round and dropped in the last, when it hardly was."""
    model, elimination = started([2.0, 3.0, 1.0, 0.0])
    add(elimination, [1.0, 0.0, 1.0, 2.0], [1.5, 0.0, 1.0, 2.0], [1.0, 0.5, 1.0, 2.0], [1.5, 0.0, 1.0, 2.5])
    elimination.drop(10)
    for step in (20, 30):
        add(elimination, *NEARLY_EVEN)
        elimination.drop(step)
    row = selection(model)[0]
    assert row.dropped == {"silu": 10, "gelu": 20, "relu": 30}
    behind = torch.tensor([1.0, 1.5, 0.5, 1.5])  # of relu in the first round
    assert row.evidence["relu"].margin == behind.mean()
    torch.testing.assert_close(row.evidence["relu"].standard_error, float(behind.std() / 2))
    assert (row.pick, row.runner_up, row.decided) == ("tanh", "relu", True)
    silu = torch.tensor([2.0, 2.0, 1.5, 2.5])
    assert row.evidence["silu"].margin == silu.mean()
    torch.testing.assert_close(row.evidence["silu"].standard_error, float(silu.std() / 2))
    assert [row.evidence[name].steps for name in ("silu", "gelu", "relu")] == [4, 4, 4]


def test_an_original_that_was_never_significantly_behind_stays() -> None:
    model, elimination = started([0.0, 3.0, 2.0, 1.0])  # the least likely of all
    for step in (10, 20, 30):
        add(elimination, *NEARLY_EVEN)
        elimination.drop(step)
    row = selection(model)[0]
    assert row.dropped == {"silu": 10, "gelu": 20, "tanh": 30}
    ahead = torch.tensor([0.1, -0.1, 0.2, -0.1])  # tanh of relu, but not significantly
    torch.testing.assert_close(row.evidence["tanh"].margin, float(-ahead.mean()))
    torch.testing.assert_close(row.evidence["tanh"].standard_error, float(ahead.std() / 2))
    assert (row.pick, row.runner_up, row.decided) == ("relu", "tanh", False)


def test_a_round_of_fewer_than_three_steps_is_no_evidence() -> None:
    model, elimination = started([3.0, 2.0, 1.0, 0.0])
    for step in (10, 20, 30):
        add(elimination, [0.0, 1.0, 1.0, 1.0])
        elimination.drop(step)
    row = selection(model)[0]
    assert (row.pick, row.decided, row.evidence, row.lead) == ("relu", False, {}, None)
