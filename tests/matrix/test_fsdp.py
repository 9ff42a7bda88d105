"""FSDP2 (`fully_shard`) over 2 gloo ranks, with blocks sharded separately: trains, saves, loads, extracts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexact
from matrix.models import Column
from matrix.ranks import COMMITTING, COMPARED, synced


@pytest.fixture
def found(ranks: Any, column: Column) -> list[dict[str, Any]]:
    return ranks.results("fsdp", column, 2)


@pytest.mark.parametrize("policy", COMPARED)
def test_a_sharded_model_trains_like_one_process(
    column: Column, policy: str, found: list[dict[str, Any]], alone: Any
) -> None:
    assert found[0]["kinds"] == ["DTensor"], "the logits were sharded"
    for name, tensor in alone(column, policy)["state"].items():
        torch.testing.assert_close(
            found[0][policy][name], tensor, rtol=0, atol=1e-5, equal_nan=name.endswith("evidence")
        )


def test_a_loaded_run_resumes_like_the_saved_one(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["committed"]
        assert one["end"].keys() == one["resumed"].keys()
    for name, tensor in found[0]["end"].items():
        torch.testing.assert_close(found[0]["resumed"][name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)


def test_the_gathered_state_is_extracted_as_the_plain_network(column: Column, found: list[dict[str, Any]]) -> None:
    assert all("get_model_state_dict" in one["message"] for one in found)
    model = column.build(COMMITTING, synced(column))
    model.load_state_dict(found[0]["end"])
    plain = flexact.extract(model)
    assert not any(isinstance(module, flexact.FlexAct) for module in plain.modules())
    inputs, _ = column.batch(99, 4)
    with torch.no_grad():
        torch.testing.assert_close(column.answer(plain.eval(), inputs), found[0]["answer"], rtol=1e-5, atol=1e-6)


def test_under_a_mixed_precision_policy_sites_sharded_by_themselves_stay_in_float32(
    column: Column, found: list[dict[str, Any]]
) -> None:
    for one in found:
        assert column.is_site or one["half"] == {torch.float32}
        assert "first shard each FlexAct site" in one["half, error"]
