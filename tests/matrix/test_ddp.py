"""DistributedDataParallel over 2 and 3 gloo ranks in separate processes: equal to one process with the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexact.routing.gumbel import gumbel_noise
from matrix.models import Column
from matrix.ranks import COMPARED, POLICIES


@pytest.fixture(params=[2, 3], ids=["2 ranks", "3 ranks"])
def found(request: pytest.FixtureRequest, ranks: Any, column: Column) -> list[dict[str, Any]]:
    """The final state of each rank."""
    return ranks.results("ddp", column, request.param)


def test_logits_are_bit_identical_on_all_ranks_after_every_step(found: list[dict[str, Any]]) -> None:
    for policy in found[0].keys() & POLICIES.keys():
        first = torch.stack(found[0][policy]["logits"])
        assert first.std(0).max() > 1e-4, "they must move"
        assert all(torch.equal(torch.stack(one[policy]["logits"]), first) for one in found[1:])
    assert all(one["picks"] == found[0]["picks"] and one["committed"] for one in found)


@pytest.mark.parametrize("policy", COMPARED)
def test_one_process_with_the_whole_batch_gives_the_same(
    column: Column, policy: str, found: list[dict[str, Any]], alone: Any
) -> None:
    expected = alone(column, policy)
    for one in found:
        for what in ("logits", "statistics", "noise"):
            torch.testing.assert_close(torch.stack(one[policy][what]), torch.stack(expected[what]), rtol=0, atol=1e-5)
        for name, tensor in expected["state"].items():
            torch.testing.assert_close(one[policy]["state"][name], tensor, rtol=0, atol=1e-5, equal_nan=True)
    assert torch.stack(expected["statistics"]).any()


def test_all_ranks_draw_the_same_noise(found: list[dict[str, Any]]) -> None:
    for one in found:
        for step, noise in enumerate(one["paper"]["noise"]):
            assert torch.equal(noise, gumbel_noise(*noise.shape, seed=0, step=step).float())
