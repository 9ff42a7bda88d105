"""Tests of plain runs: each network is trained once, whichever method needs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from flexact.errors import FlexActError
from flexact.studies.picks.train import Setting, trained_alone
from flexact.studies.picks.training import Training

Set = Callable[..., Setting]


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


def test_the_same_run_is_trained_once(setting: Set, trained: list[int]) -> None:
    one = setting()
    first = trained_alone(one, one.everywhere("gelu"))
    backwards = dict(reversed(one.everywhere("gelu").items()))
    assert trained_alone(dataclasses.replace(one, name="another-cell"), backwards) == first
    assert trained == [20]
    assert [path.suffix for path in one.kept.iterdir()] == [".json"]


def test_a_different_run_is_trained(setting: Set, trained: list[int]) -> None:
    one = setting()
    gelu = one.everywhere("gelu")
    trained_alone(one, gelu)
    trained_alone(one, {**gelu, "3": "tanh"})
    trained_alone(setting(seed=1), gelu)
    trained_alone(setting(steps=21), gelu)
    trained_alone(setting("coordinates"), one.everywhere("gelu"))
    assert len(trained) == 5


def test_tasks_with_one_network_share_their_runs(setting: Set, trained: list[int]) -> None:
    one = setting(network="shared")
    other = dataclasses.replace(one, task=dataclasses.replace(one.task, name="other", candidates=("relu", "gelu")))
    assert trained_alone(one, one.everywhere("gelu")) == trained_alone(other, one.everywhere("gelu"))
    assert len(trained) == 1


def test_a_damaged_result_is_trained_again(setting: Set, trained: list[int]) -> None:
    one = setting()
    score = trained_alone(one, one.everywhere("gelu")).score
    (path,) = one.kept.iterdir()
    path.write_text("{")
    assert trained_alone(one, one.everywhere("gelu")).score == score
    assert len(trained) == 2


def test_a_task_whose_first_candidate_is_not_the_networks_activation_is_refused(setting: Set) -> None:
    one = setting(candidates=("gelu", "relu"))
    with pytest.raises(FlexActError, match="has no GELU module"):
        one.everywhere("relu")
