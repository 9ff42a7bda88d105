"""Tests of the statistics of a step's calls, averaged by row of the routing."""

from __future__ import annotations

import torch

from flexact.routing.call_statistics import Gathered

CPU = torch.device("cpu")


def test_each_row_gets_the_mean_of_its_own_calls() -> None:
    gathered = Gathered(rows=5, k=3, start=0)
    first, again, channels = torch.rand(1, 3), torch.rand(1, 3), torch.rand(2, 3)
    gathered.add(1, first)
    gathered.add(2, channels)
    gathered.add(1, again)
    means = gathered.means(CPU)
    torch.testing.assert_close(means[1:2], (first + again) / 2)
    torch.testing.assert_close(means[2:4], channels)
    assert not means[[0, 4]].any()
    assert gathered.called(CPU).flatten().tolist() == [False, True, True, True, False]


def test_sites_with_fewer_candidates_are_padded() -> None:
    gathered = Gathered(rows=2, k=4, start=0)
    gathered.add(0, torch.ones(1, 2))
    gathered.add(1, 2 * torch.ones(1, 4))
    assert gathered.means(CPU).tolist() == [[1, 1, 0, 0], [2, 2, 2, 2]]


def test_a_new_step_starts_without_calls() -> None:
    gathered = Gathered(rows=1, k=2, start=0)
    gathered.add(0, torch.ones(1, 2))
    gathered.clear()
    assert not gathered.called(CPU).any()
    assert not gathered.means(CPU).any()
    gathered.add(0, 3 * torch.ones(1, 2))
    assert gathered.means(CPU).unique().tolist() == [3]
