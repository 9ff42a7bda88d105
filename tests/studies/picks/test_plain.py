"""Tests of plain runs: each network is trained once, whichever method needs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from flexact.errors import FlexActError
from flexact.studies.picks.train import RunContext, trained_alone
from flexact.studies.picks.training import Training

MakeContext = Callable[..., RunContext]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns one entry for each run that is trained."""
    runs: list[int] = []
    real = Training.run

    def run(self: Training, steps: int, *rest: object) -> None:
        runs.append(steps)
        real(self, steps, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Training, "run", run)
    return runs


def test_the_same_run_is_trained_once(make_context: MakeContext, trained: list[int]) -> None:
    one = make_context()
    first = trained_alone(one, one.everywhere("gelu"))
    backwards = dict(reversed(one.everywhere("gelu").items()))
    assert trained_alone(dataclasses.replace(one, name="another-cell"), backwards) == first
    assert trained == [20]
    assert [path.suffix for path in one.kept.iterdir()] == [".json"]


def test_a_different_run_is_trained(make_context: MakeContext, trained: list[int]) -> None:
    one = make_context()
    gelu = one.everywhere("gelu")
    trained_alone(one, gelu)
    trained_alone(one, {**gelu, "3": "tanh"})
    trained_alone(make_context(seed=1), gelu)
    trained_alone(make_context(steps=21), gelu)
    trained_alone(make_context("coordinates"), one.everywhere("gelu"))
    assert len(trained) == 5


def test_tasks_with_one_network_share_their_runs(make_context: MakeContext, trained: list[int]) -> None:
    one = make_context(network="shared")
    other = dataclasses.replace(one, task=dataclasses.replace(one.task, name="other", candidates=("relu", "gelu")))
    assert trained_alone(one, one.everywhere("gelu")) == trained_alone(other, one.everywhere("gelu"))
    assert len(trained) == 1


def test_a_damaged_result_is_trained_again(make_context: MakeContext, trained: list[int]) -> None:
    one = make_context()
    score = trained_alone(one, one.everywhere("gelu")).score
    (path,) = one.kept.iterdir()
    path.write_text("{")
    assert trained_alone(one, one.everywhere("gelu")).score == score
    assert len(trained) == 2


def test_a_task_whose_first_candidate_is_not_the_networks_activation_is_refused(make_context: MakeContext) -> None:
    one = make_context(candidates=("gelu", "relu"))
    with pytest.raises(FlexActError, match="has no GELU module"):
        one.everywhere("relu")
