"""The initial states of a model's optimizers, kept so that a rewind can restore them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

First = dict[str, dict[str, dict[str, Any]]]
"""The state of each parameter, by optimizer class and parameter name. Most optimizers start without any."""


class OptimizerStates:
    """The initial state of every optimizer that holds one of a model's parameters, the logits included.

    `note` is called before each step of any optimizer; before its first step, an optimizer has its initial state. If a
    run is resumed, `first` is replaced by that of the saved run.
    """

    def __init__(self, model: nn.Module) -> None:
        self.first: First = {}
        self.resumed = False
        """Whether `first` is from a saved run, so that the states found at the first step are not the initial ones."""
        self.rates: weakref.WeakKeyDictionary[Optimizer, list[float]] = weakref.WeakKeyDictionary()
        """The optimizers found so far, with their initial learning rates."""
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    def note(self, optimizer: Optimizer) -> None:
        """Keep the state of an optimizer that holds any of the parameters and was not seen before."""
        if optimizer in self.rates or not any(self._parameters(optimizer)):
            return
        self.rates[optimizer] = learning_rates(optimizer)
        states, kind = self._states(optimizer), type(optimizer).__name__
        if states and not self.resumed:
            self.first[kind] = states | self.first.get(kind, {})

    def now(self) -> First:
        """Return a copy of the current state of every optimizer, in the form of `first`."""
        found: First = {}
        for optimizer in self.rates:
            found.setdefault(type(optimizer).__name__, {}).update(self._states(optimizer))
        return found

    def restore(self, states: First) -> None:
        """Restore these states in every optimizer. The states of other models' parameters are not changed."""
        for optimizer in self.rates:
            own = states.get(type(optimizer).__name__, {})
            for name, parameter, group in self._parameters(optimizer):
                _restore_state(optimizer, group, parameter, own.get(name))

    def _parameters(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Return the parameters of the model that an optimizer holds, with their names and groups."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._names:
                    yield self._names[id(parameter)], parameter, group

    def _states(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """Return copies of the states of these parameters, by name."""
        state = optimizer.state
        return {name: host_copies(state[one]) for name, one, _ in self._parameters(optimizer) if state.get(one)}


def learning_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rates of an optimizer's groups, except tensors, which the training loop sets itself."""
    return [group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), float | int)]


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return a copy of an optimizer's hyperparameters, one dictionary per group."""
    return [copy.deepcopy({key: group[key] for key in group if key != "params"}) for group in optimizer.param_groups]


def restore_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Restore the hyperparameters that `groups_of` returned; a learning rate that is a tensor is restored in place.
    Groups that were added since keep theirs."""
    for group, kept in zip(optimizer.param_groups, groups, strict=False):
        for key, value in kept.items():
            group[key] = _copied_into(group.get(key), value)


def host_copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies. Tensors are copied to host memory; of a sharded tensor, only this rank's shard is copied."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in values.items()
    }


def _restore_state(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, first: Mapping[str, Any] | None
) -> None:
    now = optimizer.state.pop(parameter, {})
    if not first:
        return
    on_device = group.get("capturable") or group.get("fused")  # these keep their step count on the device
    state = {key: _copied_into(now.get(key), value) for key, value in first.items()}
    for key, value in state.items():
        if isinstance(value, Tensor) and key not in now and (key != "step" or on_device):
            state[key] = value.to(parameter.device)
    optimizer.state[parameter] = state


def _copied_into(now: Any, value: Any) -> Any:
    """Copy a value into the current one in place if both are tensors of one shape; otherwise return a copy."""
    if isinstance(now, Tensor) and isinstance(value, Tensor) and now.shape == value.shape:
        with torch.no_grad():
            return now.copy_(value)
    return copy.deepcopy(value)
