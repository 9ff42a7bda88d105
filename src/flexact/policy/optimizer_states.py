"""The state that the optimizers of a model begin with, kept so that it can be given back to them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from flexact.policy.step_hooks import Listener

First = dict[str, dict[str, dict[str, Any]]]
"""By the optimizer's class and the parameter's name: the state of that parameter. Most optimizers begin with none."""


class OptimizerStates:
    """Finds every torch optimizer that steps one of the given parameters, and keeps the state it begins with.

    names: of the parameters, by their id.

    Optimizers are found by a hook that runs before each step of any of them, so at its first step an optimizer still
    has the state it was built with. `first` may be replaced by that of an interrupted run.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self.first: First = {}
        self.resumed = False
        """Whether `first` is that of an interrupted run: what an optimizer has here at its first step is from later."""
        self._names = names
        self._rates: weakref.WeakKeyDictionary[Optimizer, list[float]] = weakref.WeakKeyDictionary()
        self._hook = Listener(self)

    @property
    def seen(self) -> int:
        """The number of optimizers found so far."""
        return len(self._rates)

    def acts_before(self, stepping: Optimizer) -> bool:
        """Keep the state that an optimizer has before its first step; a hook asks."""
        self.note(stepping)
        return False

    def before_optimizer_step(self, stepping: Optimizer) -> None:
        """Nothing more."""

    def note(self, optimizer: Optimizer) -> None:
        """Keep the state of an optimizer, where it steps any of the parameters and is not known yet."""
        if optimizer in self._rates or not any(True for _ in _own(optimizer, self._names)):
            return
        self._rates[optimizer] = _rates(optimizer)
        if self.resumed:
            return
        first = self.first.setdefault(type(optimizer).__name__, {})
        self.first[type(optimizer).__name__] = _states(optimizer, self._names) | first

    def now(self, names: Mapping[int, str]) -> First:
        """A copy of the present state of every optimizer, in the form of `first`."""
        found: First = {}
        for optimizer in self._rates:
            found.setdefault(type(optimizer).__name__, {}).update(_states(optimizer, names))
        return found

    def restore(self, names: Mapping[int, str], states: First) -> None:
        """Give every optimizer these states. Parameters that have no name keep theirs."""
        for optimizer in self._rates:
            own = states.get(type(optimizer).__name__, {})
            for name, parameter in _own(optimizer, names):
                _put_back(optimizer, parameter, own.get(name))

    def changed_rates(self) -> dict[Optimizer, tuple[list[float], list[float]]]:
        """The optimizers whose learning rates are not those of their first step: these, and the present ones."""
        now = {optimizer: (first, _rates(optimizer)) for optimizer, first in self._rates.items()}
        return {optimizer: rates for optimizer, rates in now.items() if rates[0] != rates[1]}

    def close(self) -> None:
        """Stop looking for optimizers."""
        self._hook.remove()


def _rates(optimizer: Optimizer) -> list[float]:
    """The learning rates of its groups; without those that are tensors, which a loop of its own sets."""
    return [group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), float | int)]


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of an optimizer's hyperparameters, group by group."""
    return [copy.deepcopy({key: group[key] for key in group if key != "params"}) for group in optimizer.param_groups]


def restore_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Give an optimizer the hyperparameters of `groups_of` back; a learning rate that is a tensor keeps its memory."""
    for group, kept in zip(optimizer.param_groups, groups, strict=True):
        for key, value in kept.items():
            group[key] = _written(group.get(key), value)


def _own(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor]]:
    """The parameters of an optimizer that have a name."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in names:
                yield names[id(parameter)], parameter


def _states(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """Copies of the states of an optimizer's parameters, by name."""
    state = optimizer.state
    return {name: _on_host(state[one]) for name, one in _own(optimizer, names) if state.get(one)}


def _on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a parameter's state in host memory."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in state.items()
    }


def _put_back(optimizer: Optimizer, parameter: Tensor, first: Mapping[str, Any] | None) -> None:
    now = optimizer.state.pop(parameter, {})
    if not first:
        return
    group = next(group for group in optimizer.param_groups if any(one is parameter for one in group["params"]))
    on_device = group.get("capturable") or group.get("fused")  # where the number of steps is kept then
    state = {key: _written(now.get(key), value) for key, value in first.items()}
    for key, value in state.items():
        if isinstance(value, Tensor) and key not in now and (key != "step" or on_device):
            state[key] = value.to(parameter.device)
    optimizer.state[parameter] = state


def _written(now: Any, value: Any) -> Any:
    """A value in the place of the present one: in its own memory and on its own device where both are tensors."""
    if isinstance(now, Tensor) and isinstance(value, Tensor) and now.shape == value.shape:
        with torch.no_grad():
            return now.copy_(value)
    return copy.deepcopy(value)
