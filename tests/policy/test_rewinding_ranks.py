"""Tests of rewinding over two gloo ranks in separate processes: under DistributedDataParallel and under FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import forked

Found = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The final state of each rank in each row."""
    folder = tmp_path_factory.mktemp("ranks")
    forked.outputs(*forked.ranks(2, "policy.rewinding_ranks", folder), timeout=150)
    rows = ("ddp", "fsdp")
    every = {row: [torch.load(folder / f"{row}-{rank}.pt", weights_only=False) for rank in range(2)] for row in rows}
    for row in rows:
        for one in every[row]:
            assert isinstance(one, dict), one
    return every


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "Adagrad"])
@pytest.mark.parametrize("row", ["ddp", "fsdp"])
def test_after_the_rewind_every_rank_trains_the_plain_network(row: str, optimizer: str, found: Found) -> None:
    for one in (rank[optimizer] for rank in found[row]):
        assert one["rewound_at"] == 8
        ours, theirs = one["losses"]
        assert ours == theirs
        assert one["state"].keys() == one["plain"].keys()
        for name, tensor in one["plain"].items():
            assert torch.equal(one["state"][name], tensor), name
    if row == "ddp":
        first, second = (rank[optimizer]["state"] for rank in found[row])
        assert all(torch.equal(second[name], tensor) for name, tensor in first.items() if "running" not in name)
    else:
        assert all(rank[optimizer]["kinds"] == {"DTensor"} for rank in found[row]), "a rank keeps its own shards"


@pytest.mark.parametrize("form", ["as it was saved", "with whole tensors"])
def test_a_resumed_sharded_run_rewinds_to_the_same_weights(form: str, found: Found) -> None:
    ends = found["fsdp"][0]["resumed"]
    for name, tensor in ends["whole"].items():
        assert torch.equal(ends[form][name], tensor), name
