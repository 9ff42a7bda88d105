"""Tests of the statistics of a step's calls, averaged by row of the routing."""

from __future__ import annotations

import torch

from flexact.routing.call_statistics import CallStatistics

CPU = torch.device("cpu")


def test_each_row_gets_the_mean_of_its_own_calls() -> None:
    statistics = CallStatistics(rows=5, k=3, start=0)
    first, again, channels = torch.rand(1, 3), torch.rand(1, 3), torch.rand(2, 3)
    statistics.add(1, first)
    statistics.add(2, channels)
    statistics.add(1, again)
    means = statistics.means(CPU)
    torch.testing.assert_close(means[1:2], (first + again) / 2)
    torch.testing.assert_close(means[2:4], channels)
    assert not means[[0, 4]].any()
    assert statistics.called(CPU).flatten().tolist() == [False, True, True, True, False]


def test_sites_with_fewer_candidates_are_padded() -> None:
    statistics = CallStatistics(rows=2, k=4, start=0)
    statistics.add(0, torch.ones(1, 2))
    statistics.add(1, 2 * torch.ones(1, 4))
    assert statistics.means(CPU).tolist() == [[1, 1, 0, 0], [2, 2, 2, 2]]


def test_a_new_step_starts_without_calls() -> None:
    statistics = CallStatistics(rows=1, k=2, start=0)
    statistics.add(0, torch.ones(1, 2))
    statistics.clear()
    assert not statistics.called(CPU).any()
    assert not statistics.means(CPU).any()
    statistics.add(0, 3 * torch.ones(1, 2))
    assert statistics.means(CPU).unique().tolist() == [3]
