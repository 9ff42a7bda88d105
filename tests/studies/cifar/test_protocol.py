"""Tests of cells and protocols: what they refuse, and that they round-trip through JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flexact import FlexActError, FlexConfig
from flexact.studies.cifar.protocol import RECTIFIERS, Cell, Protocol


def test_the_default_equals_the_papers_protocol() -> None:
    protocol = Protocol()
    assert (protocol.epochs, protocol.batch, protocol.lr, protocol.momentum) == (200, 128, 0.1, 0.9)
    assert protocol.config(seed=3) == FlexConfig(candidates=RECTIFIERS, seed=3)  # the shipped policy
    assert Protocol(policy="paper").config(seed=3) == FlexConfig.paper(seed=3)


def test_a_protocol_round_trips_through_json_and_names_a_policy() -> None:
    protocol = Protocol(epochs=30, policy="paper", candidates=("relu", "gelu"), changes={"commit_at": 0.6}, width=8)
    again = Protocol.from_dict(json.loads(json.dumps(protocol.to_dict())))
    assert again == protocol
    assert hash(again) == hash(protocol)
    assert again.config(1) == FlexConfig.paper(candidates=("relu", "gelu"), commit_at=0.6, seed=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epochs": 0}, "epochs"),
        ({"batch": 1.5}, "batch"),
        ({"lr": float("nan")}, "lr"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"policy": "papers"}, "did you mean 'paper'"),
        ({"precision": "fp16"}, "precision"),
        ({"candidates": ("relu", "gellu")}, "did you mean 'gelu'"),
        ({"candidates": "relu"}, "candidates"),
        ({"changes": {"comit_at": 0.5}}, "did you mean 'commit_at'"),
        ({"changes": {"pick_by": "trial"}}, "pick_by='trial' has no checkpoints"),
    ],
)
def test_an_invalid_protocol_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FlexActError, match=message):
        Protocol(**fields)


@pytest.mark.parametrize("data", [{}, {"flexact_protocol": 2}, {"flexact_protocol": 1, "epoch": 3}, []])
def test_a_dictionary_that_is_no_protocol_is_refused(data: Any) -> None:
    with pytest.raises(FlexActError):
        Protocol.from_dict(data)


def test_cells_have_distinct_names() -> None:
    cells = [Cell("cifar10", "resnet18", method, seed) for method in ("relu", "flexact-all") for seed in (1, 11)]
    assert len({cell.name for cell in cells}) == 4
