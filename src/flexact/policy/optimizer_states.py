"""Copies of the states and hyperparameters of optimizers, and how they are restored in place."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer


def learning_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rates of an optimizer's groups, except tensors, which the training loop sets itself."""
    return [group["lr"] for group in optimizer.param_groups if isinstance(group.get("lr"), float | int)]


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return a copy of an optimizer's hyperparameters, one dictionary per group."""
    return [copy.deepcopy({key: group[key] for key in group if key != "params"}) for group in optimizer.param_groups]


def restore_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Restore the hyperparameters that `groups_of` returned; a learning rate that is a tensor is restored in place.
    Groups that were added later keep theirs."""
    for group, kept in zip(optimizer.param_groups, groups, strict=False):
        for key, value in kept.items():
            group[key] = _copied_into(group.get(key), value)


def named_parameters(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Yield the name, the parameter and its group for each parameter of an optimizer that has a name. names: by id."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in names:
                yield names[id(parameter)], parameter, group


def states_of(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """Return copies of the states of these parameters, by name. Most optimizers start without any."""
    state = optimizer.state
    return {name: host_copies(state[one]) for name, one, _ in named_parameters(optimizer, names) if state.get(one)}


def restore_states(optimizer: Optimizer, names: Mapping[int, str], states: Mapping[str, dict[str, Any]]) -> None:
    """Restore the states that `states_of` returned. Those of parameters without a name are not changed."""
    for name, parameter, group in named_parameters(optimizer, names):
        now, first = optimizer.state.pop(parameter, {}), states.get(name)
        if not first:
            continue
        on_device = group.get("capturable") or group.get("fused")  # these keep their step count on the device
        state = {key: _copied_into(now.get(key), value) for key, value in first.items()}
        for key, value in state.items():
            if isinstance(value, Tensor) and key not in now and (key != "step" or on_device):
                state[key] = value.to(parameter.device)
        optimizer.state[parameter] = state


def host_copies(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies. Tensors are copied to host memory; of a sharded tensor, only this rank's shard is copied."""
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in values.items()
    }


def _copied_into(now: Any, value: Any) -> Any:
    """Copy a value into the current one in place if both are tensors of one shape; otherwise return a copy."""
    if isinstance(now, Tensor) and isinstance(value, Tensor) and now.shape == value.shape:
        with torch.no_grad():
            return now.copy_(value)
    return copy.deepcopy(value)
