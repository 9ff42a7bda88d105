"""Tests of finding the sites of a model and binding them to a router."""

from __future__ import annotations

import warnings

import pytest
from torch import nn

import flexact
from flexact import FlexAct, FlexActError
from flexact.routing.sites import blend, routers_of, sites_of, unbind
from flexact.surgery.watching import unwatch


def test_sites_of_a_converted_model_share_a_router_and_those_built_by_hand_do_not() -> None:
    model = flexact.convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Tanh()), "*")
    assert len(routers_of(sites_of(model))) == 1
    assert len(routers_of(sites_of(nn.Sequential(FlexAct(), FlexAct())))) == 2


def test_unbinding_leaves_no_hook() -> None:
    model = flexact.convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    unwatch(model)
    unbind(model)
    assert not model._forward_pre_hooks
    assert not model._load_state_dict_pre_hooks


def test_sites_that_are_set_to_blend_need_no_loss() -> None:
    model = flexact.convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)))
    blend(sites_of(model))
    schedule = flexact.Schedule(model, 2000)
    assert schedule.router.trying is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()


def test_sites_that_are_asked_for_a_trial_are_not_set_to_blend() -> None:
    config = flexact.FlexConfig(pick_by="trial")
    model = flexact.convert(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), config=config)
    with pytest.raises(FlexActError, match="pick_by='trial'"):
        blend(sites_of(model))


def test_an_object_that_is_no_module_is_refused() -> None:
    with pytest.raises(FlexActError, match=r"torch\.nn\.Module; got dict"):
        sites_of({})
