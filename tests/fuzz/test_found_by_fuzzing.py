"""Regression tests: each of these bugs was found by the state machine or by invalid calls."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fuzz_networks import NETWORKS, state_of
from fuzz_odd_calls import ODD_CALLS, damaged
from torch import nn

import flexact
from flexact import FlexActError
from flexact.routing.sites import sites_of


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))


@pytest.mark.parametrize("name", ODD_CALLS)
@pytest.mark.parametrize("converted", [False, True])
def test_a_call_that_makes_no_sense_is_refused_and_changes_nothing(name: str, converted: bool) -> None:
    model = flexact.convert(network()) if converted else network()
    before = state_of(model)
    with pytest.raises(FlexActError):
        ODD_CALLS[name](model)
    assert state_of(model) == before


@pytest.mark.parametrize("damage", [name for name in damaged if not name.startswith(("no ", "more", "logits that"))])
def test_a_damaged_state_is_refused_before_the_first_tensor_is_loaded(damage: str) -> None:
    torch.manual_seed(0)
    model, other = flexact.convert(network()), flexact.convert(network())
    state = other.state_dict()
    before = state_of(model)
    damaged[damage](state)
    with pytest.raises(FlexActError, match="site '1'"):
        model.load_state_dict(state)
    assert state_of(model) == before


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_run_that_diverged_picks_nothing(value: float) -> None:
    model = flexact.convert(network())
    site, _ = sites_of(model)
    with torch.no_grad():
        site.logits[2] = value
    before = state_of(model)
    message = r"the logits of 1 of 2 sites are NaN or infinite \(1\), so nothing can be picked there"
    for ends in (flexact.commit, lambda model: flexact.extract(model, commit=True)):
        with pytest.raises(FlexActError, match=message):
            ends(model)
    assert state_of(model) == before
    assert not any(one.committed for one in sites_of(model))


def test_a_logit_of_a_candidate_that_was_dropped_does_not_count() -> None:
    model = flexact.convert(network())
    site, other = sites_of(model)
    with torch.no_grad():
        site.logits[0] = math.nan
        site.logits[3] = 1.0
    site.drop(torch.tensor([[True, False, False, False, True]]), step=1)
    flexact.commit(model)
    assert site.picks == (site.candidates[3],)
    assert other.picks == (other.candidates[0],)
    assert site.dropped_at[0, 0] == 1


def test_picks_for_one_place_of_a_shared_activation_are_refused_and_the_network_is_unchanged() -> None:
    build, _ = NETWORKS["shared"]
    together = flexact.selection(flexact.convert(build())).picks
    apart = flexact.selection(flexact.convert(build(), per_call=True)).picks
    assert (list(together), list(apart)) == (["1"], ["1", "3"])
    assert [type(module) for module in flexact.load_picks(build(), {"1": "tanh"})][1::2] == [nn.Tanh, nn.Tanh]
    fresh = build()
    before = state_of(fresh)
    with pytest.raises(FlexActError, match="per_call=True"):
        flexact.load_picks(fresh, {"1": "relu", "3": "tanh"})
    assert state_of(fresh) == before


@pytest.mark.parametrize("value", [10**400, "x", None, torch.ones(2)])
def test_a_value_that_is_no_number_is_not_recorded(value: Any) -> None:
    recorder = flexact.Recorder(flexact.convert(network()))
    with pytest.raises(FlexActError, match="numbers"):
        recorder.record(0, loss=value)
    assert recorder.history == []
