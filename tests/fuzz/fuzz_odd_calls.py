"""Invalid places, policies and calls, which must be refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import flexact
from flexact import FlexAct, FlexConfig, Policy

PLACES: dict[str, Any] = {
    "all": "all",
    "penultimate": "penultimate",
    "a pattern": "*",
    "the first": ["1"],
    "a name of a call": "relu*",
    "a block": ["1.relu", "1.relu"],
    "nowhere": "nowhere",
    "no names": [],
    "a function": lambda name, module: isinstance(module, nn.ReLU | nn.Tanh),
    "never": lambda name, module: False,
    "a number": 3,
    "bytes": b"all",
    "a class": nn.ReLU,
    "a module": nn.ReLU(),
    "not strings": [1, None],
}

CONFIGS: dict[str, Callable[[], FlexConfig]] = {
    "default": FlexConfig,
    "paper": FlexConfig.paper,
    "noisy": lambda: FlexConfig(eval="pick", seed=-(10**30), policy=Policy(noise=1.0, forward="hard")),
    "from the original": lambda: FlexConfig(init="original", init_probability=0.9),
    "by channel": lambda: FlexConfig(granularity="channel", policy=Policy(noise=0.5)),
    "by another channel": lambda: FlexConfig(granularity="channel", channel_dim=-1),
    "by a channel there is none of": lambda: FlexConfig(granularity="channel", channel_dim=10**30),
    "clipped": lambda: FlexConfig(policy=Policy(correction="clip_logit_gradient", logit_step="optimizer", clip=1e-300)),
    "normalised outputs": lambda: FlexConfig(policy=Policy(correction="output_norm", noise=1.0)),
    "clipped norms": lambda: FlexConfig(
        policy=Policy(correction="clipped_norm_kl", alpha_kind="absolute", kl_on="p", noise=1.0)
    ),
    "never commits": lambda: FlexConfig(eliminate="none", commit_at=None, policy=Policy(lam="temperature")),
    "extremes": lambda: FlexConfig(
        policy=Policy(temperature=1e38, final_temperature=1e-6, alpha=1e30, lam=1e-30, logit_step_size=1e30, noise=9)
    ),
    "two": lambda: FlexConfig(candidates=("identity", "sigmoid"), round_steps=2**53, warmup=0.1),
    "the original and another": lambda: FlexConfig(candidates=("original", "softplus")),
}


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for key in [key for key in state if key.endswith(name)]:
            state[key] = value(state[key]) if callable(value) else value

    return change


def _lose(name: str) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        for key in [key for key in state if key.endswith(name)]:
            del state[key]

    return change


damaged: dict[str, Callable[[dict[str, Any]], None]] = {
    "no signature": _lose("signature"),
    "no logits": _lose("logits"),
    "no dropped_at": _lose("dropped_at"),
    "no weights": _lose("weight"),
    "another signature": _set("signature", lambda tensor: tensor + 1),
    "a signature of no tensor": _set("signature", "relu"),
    "a signature of one number": _set("signature", torch.tensor(3)),
    "a signature of fractions": _set("signature", lambda tensor: tensor.float()),
    "everything dropped": _set("dropped_at", lambda tensor: torch.zeros_like(tensor)),
    "a dropped_at of one number": _set("dropped_at", torch.tensor(3)),
    "a dropped_at of no tensor": _set("dropped_at", [1, 2]),
    "a dropped_at of other candidates": _set("dropped_at", lambda tensor: tensor[..., :1]),
    "a dropped_at of flags": _set("dropped_at", lambda tensor: tensor < 0),
    "logits of another size": _set("logits", lambda tensor: tensor[:1]),
    "logits that are no numbers": _set("logits", lambda tensor: tensor * math.nan),
    "a temperature of 0": _set("temperature", lambda tensor: tensor * 0),
    "a temperature that is no number": _set("temperature", lambda tensor: tensor * math.nan),
    "a temperature of two": _set("temperature", lambda tensor: torch.ones(2)),
    "more than there is": lambda state: state.update({"another.weight": torch.ones(1)}),
}
"""Invalid changes to a saved state."""


ODD_CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "convert nothing": lambda model: flexact.convert(None),
    "convert a class": lambda model: flexact.convert(nn.ReLU),
    "a config of a dictionary": lambda model: flexact.convert(model, config={"seed": 1}),
    "a config of text": lambda model: flexact.convert(model, config="default"),
    "inputs it cannot take": lambda model: flexact.convert(model, example_inputs={"nonsense": torch.zeros(1)}),
    "inputs that are too many": lambda model: flexact.convert(model, example_inputs=(torch.zeros(1),) * 9),
    "commit nothing": lambda model: flexact.commit(None),
    "commit a plain network": lambda model: flexact.commit(nn.Linear(1, 1)),
    "extract text": lambda model: flexact.extract("model"),
    "extract a plain network": lambda model: flexact.extract(nn.ReLU(), commit=True),
    "selection of a list": lambda model: flexact.selection([model]),
    "penalty of nothing": lambda model: flexact.penalty(None),
    "groups of nothing": lambda model: flexact.param_groups(None),
    "groups of parameters": lambda model: flexact.param_groups(model.parameters()),
    "groups that decay by text": lambda model: flexact.param_groups(model, weight_decay="much"),
    "groups that grow": lambda model: flexact.param_groups(model, weight_decay=-1.0),
    "groups at no rate": lambda model: flexact.param_groups(model, lr=math.nan),
    "groups at a negative rate": lambda model: flexact.param_groups(model, lr=-0.1),
    "groups with logits at a rate of text": lambda model: flexact.param_groups(model, logit_lr="fast"),
    "a schedule of no steps": lambda model: flexact.Schedule(model, 0),
    "a schedule of half a step": lambda model: flexact.Schedule(model, 0.5),
    "a schedule of True": lambda model: flexact.Schedule(model, True),
    "a schedule longer than a float": lambda model: flexact.Schedule(model, 10**400),
    "a schedule of nothing": lambda model: flexact.Schedule(None, 5),
    "a schedule with an optimizer of others": lambda model: flexact.Schedule(
        model, 5, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    ),
    "a schedule with no optimizer": lambda model: flexact.Schedule(model, 5, "sgd"),
    "a recorder of nothing": lambda model: flexact.Recorder(None),
    "a recorder at a number": lambda model: flexact.Recorder(model, 7),
    "a recorder below a file": lambda model: flexact.Recorder(model, __file__ + "/history.jsonl"),
    "a recorder over a program": lambda model: flexact.Recorder(model, __file__),
    "a history of nothing": lambda model: flexact.Recorder.load(None),
    "a history of a folder": lambda model: flexact.Recorder.load("/"),
    "picks of nothing": lambda model: flexact.load_picks(model, None),
    "picks for nothing": lambda model: flexact.load_picks(None, "/"),
    "picks of a program": lambda model: flexact.load_picks(nn.Linear(1, 1), __file__),
    "one candidate": lambda model: FlexAct(candidates=("relu",)),
    "candidates in no order": lambda model: FlexAct(candidates={"relu", "tanh"}),
    "a candidate there is none of": lambda model: FlexAct(candidates=("relu", "tahn")),
    "an original of text": lambda model: FlexAct(original="relu"),
    "an original with weights": lambda model: FlexAct(original=nn.PReLU()),
    "a site of no channels": lambda model: FlexAct(config=FlexConfig(granularity="channel"), channels=0),
    "whole numbers": lambda model: FlexAct()(torch.zeros(2, dtype=torch.int64)),
    "complex numbers": lambda model: FlexAct()(torch.zeros(2, dtype=torch.complex64)),
    "no tensor": lambda model: FlexAct()([1.0]),
    "channels that are not there": lambda model: FlexAct(config=FlexConfig(granularity="channel"), channels=3)(
        torch.zeros(2, 4)
    ),
    "a candidate called relu": lambda model: flexact.register_candidate("relu", torch.sin),
    "a candidate that is no function": lambda model: flexact.register_candidate("odd", None),
    "a candidate that mixes": lambda model: flexact.register_candidate("odd", lambda h: h - h.mean()),
    "a candidate with a wrong derivative": lambda model: flexact.register_candidate("odd", torch.sin, torch.sin),
    "a number that is none": lambda model: FlexConfig(policy=Policy(alpha=math.nan)),
    "a number too large": lambda model: FlexConfig(policy=Policy(logit_step_size=10**400)),
    "rounds without an end": lambda model: FlexConfig(round_steps=10**400),
    "a policy there is none of": lambda model: FlexConfig(policy=Policy(forward=["soft"])),
    "a config of nothing": lambda model: FlexConfig.from_dict(None),
    "a config that is cut off": lambda model: FlexConfig.from_json(FlexConfig().to_json()[:200]),
    "a config that goes deep": lambda model: FlexConfig.from_json("[" * 100_000),
    "a config with a long number": lambda model: FlexConfig.from_json('{"flexact_config": ' + "9" * 5000 + "}"),
}
"""Calls that are refused for every model."""
