"""Tests of a saved state: the evidence of a site is validated and restored."""

from __future__ import annotations

import pytest
import torch

from flexact import FlexAct, FlexActError, selection

CANDIDATES = ("relu", "tanh", "gelu")


def dropped() -> FlexAct:
    site = FlexAct(CANDIDATES)
    site.drop(torch.tensor([[False, True, True]]), 7, torch.tensor([0.5, 0.125, 40.0]).expand(1, 3, 3))
    return site


def test_evidence_is_saved_in_the_state() -> None:
    site = FlexAct(CANDIDATES)
    site.load_state_dict(dropped().state_dict())
    assert selection(site) == selection(dropped())
    assert selection(site)[0].lead is not None


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 2), (2, 3, 3)])
def test_evidence_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    state = dropped().state_dict() | {"evidence": torch.zeros(shape)}
    with pytest.raises(FlexActError, match=r"evidence .*\(1, 3, 3\)"):
        FlexAct(CANDIDATES).load_state_dict(state)


def test_a_state_without_evidence_is_reported_by_torch() -> None:
    state = dropped().state_dict()
    del state["evidence"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "evidence"'):
        FlexAct(CANDIDATES).load_state_dict(state)
